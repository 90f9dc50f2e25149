"""The lines below the table of a plan: its batch, stages, time, bytes and memory, each once."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.cost.memory import binary
from shardwright.plan.folding import folded_crossings, folded_names
from shardwright.plan.plan import Plan
from shardwright.plan.words import seconds, tells


def summary(plan: Plan, every: bool = False) -> list[str]:
    """The lines below the table."""
    options = ", ".join(f"{key}={value}" for key, value in plan.options.items())
    lines = [
        f"{plan.mode}({options}); captured in {plan.capture_seconds:.2f} s, "
        f"searched in {plan.search_seconds * 1e3:.1f} ms",
        f"each device sends {binary(plan.forward_bytes)} forward and {binary(plan.backward_bytes)} "
        f"backward a step, and keeps {binary(plan.parameter_bytes)} of parameters",
    ]
    for part in (_batch, _stages, _seconds, _again, _needs, _idle):
        lines += part(plan)
    silent = sum(not tells(row) for row in plan.operators)
    if silent and not every:
        lines.append(
            f"{silent} more operators follow their neighbours and send nothing: "
            "plan.text(every=True), --every"
        )
    if plan.without_rule:
        lines.append(
            "without a sharding rule, computed whole on every device: "
            + ", ".join(folded_names(plan.without_rule))
        )
    return lines


def _batch(plan: Plan) -> Iterable[str]:
    """The global batch, and the pieces in which it is computed."""
    samples, pieces = plan.global_batch, plan.pipeline.micro_batches
    if samples is None:
        return
    line = f"global batch of {samples:,} samples"
    if plan.sequence is not None:
        line = f"global batch of {samples:,} sequences of {plan.sequence:,} tokens"
    if pieces > 1:
        line += (
            f", in {pieces:,} micro-batches of {samples // pieces:,}; shapes and conversions are"
            " those of one micro-batch"
        )
    yield line


def _stages(plan: Plan) -> Iterable[str]:
    """Stages, their schedule, and what goes from stage to stage."""
    pipeline = plan.pipeline
    if pipeline.stages > 1:
        chunks = f", {pipeline.chunks} chunks a stage" if pipeline.chunks > 1 else ""
        yield (
            f"{pipeline.stages} stages of {plan.mesh.num_devices} devices{chunks}, in the order"
            f" {pipeline.schedule}"
        )
    for crossing in folded_crossings(plan.crossings):
        yield (
            f"{crossing.way}: {', '.join(crossing.values)};"
            f" {binary(crossing.forward_bytes)} there and {binary(crossing.backward_bytes)} back a"
            " micro-batch"
        )


def _seconds(plan: Plan) -> Iterable[str]:
    """What a step takes, where a cluster was named."""
    step = plan.step
    if step is not None:
        bubble = f", {step.bubble:.1%} of the stages' time in bubbles" if step.bubble else ""
        yield (
            f"a step takes {seconds(step.seconds)} on {step.cluster}{_speed(plan, step.seconds)}:"
            f" computation {seconds(step.computation)}, communication that it waits for"
            f" {seconds(step.communication)}{bubble}"
        )


def _speed(plan: Plan, seconds: float) -> str:
    if plan.global_batch is None:
        return ""
    if plan.sequence is None:
        return f", {plan.global_batch / seconds:,.0f} samples a second"
    return f", {plan.global_batch * plan.sequence / seconds:,.0f} tokens a second"


def _needs(plan: Plan) -> Iterable[str]:
    """How much memory a device of the stage that needs most needs, and what of it is for what; how
    much the others. Only where the plan has its graph to find it out."""
    if plan.graph is None or not plan.training:
        return
    stages = sorted(plan.memory.stages, key=lambda stage: stage.peak)
    most, others = stages[-1], stages[:-1]
    sizes = ((getattr(most, name), name) for name in most.NAMES)
    parts = ", ".join(
        f"{name} {binary(number)}" for number, name in sorted(sizes, reverse=True) if number
    )
    who = f"each device of stage {most.stage}" if others else "each device"
    yield (
        f"{who} needs {binary(most.peak)} at most in a training step with"
        f" {plan.memory.optimizer}{_limit(plan)}: {parts}"
    )
    if not others:
        return
    if len(others) > 1:
        ends = (f"{binary(each.peak)} (stage {each.stage})" for each in (others[0], others[-1]))
        yield f"the others need {' to '.join(ends)}"
    else:
        yield f"each of stage {others[0].stage} needs {binary(others[0].peak)}"
    if plan.step is None:
        bubbles = plan.timeline().bubble
        yield f"stages wait for {bubbles:.1%} of the time, if operations say how long parts take"


def _limit(plan: Plan) -> str:
    """Against what a device has."""
    limit = plan.memory_limit
    if limit is None:
        return ""
    if plan.memory.peak > limit:
        return f", more than the {binary(limit)} that it has"
    return f", of {binary(limit)} that it has"


def _again(plan: Plan) -> Iterable[str]:
    """How much is computed again in the backward pass."""
    rows = [row for row in plan.operators if row.segment]
    if rows:
        segments = len({row.segment for row in rows})
        yield (
            f"{len(rows)} operators in {segments} segment{'s' if segments > 1 else ''} are computed"
            " again in the backward pass"
        )


def _idle(plan: Plan) -> list[str]:
    """Names the axes that cut no operator: the devices along them all do the same work."""
    used = {axis for factors in plan.cuts.values() for axes in factors.values() for axis in axes}
    idle = tuple(axis for axis in range(len(plan.mesh.device_matrix)) if axis not in used)
    if not idle:
        return []
    names = "".join(plan.mesh.alias_names[axis] for axis in idle)
    return [
        f"nothing is cut over {names}: groups of {plan.mesh.size(idle)} devices do the same work"
    ]
