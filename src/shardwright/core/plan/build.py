"""From what a search decided to a plan: redistributions, bytes and rows follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.cost.pipeline_timeline import ChunkSeconds
from shardwright.core.cost.predict import Predicted, planned_timeline
from shardwright.core.cost.step_time import TimeModel
from shardwright.core.cost.time_parts import time_parts, utilization
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.axis_meaning import trace_meanings
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.transfer import Transfer
from shardwright.core.plan.data import dtype_name, target_text
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.rows import CrossingRow, OperatorRow, RedistributionRow, StepRow
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.request import Pricing
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError

NO_PINS: Mapping[str, OperatorStrategy] = MappingProxyType({})


def make_plan(
    partitioned: Partitioned,
    *,
    mode: str,
    options: dict[str, Any],
    search_seconds: float,
    training: bool,
    pins: Mapping[str, OperatorStrategy] = NO_PINS,
    predicted: Predicted | None = None,
    memory_limit: int | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    dry_runs: DryRunCache | None = None,
    pricing: Pricing | None = None,
) -> Plan:
    """Joins what a search decided with what follows from it: redistributions and their bytes.

    Args:
        predicted: what a step takes, where a cluster was named.
        dry_runs: that were made while it was searched.
        pricing: what the search counted, if it was one by seconds.

    Raises:
        PlanError: if the operators cannot be divided into the chunks of the pipeline.
    """
    graph, mesh, decisions = partitioned.graph, partitioned.mesh, partitioned.decisions
    sent = max(partitioned.step_bytes, key=sum)
    seen: set[int] = set()
    leaves = tuple(
        {"name": leaf.name, "shape": leaf.shape, "dtype": dtype_name(leaf)}
        if isinstance(leaf, Value)
        else leaf
        for leaf in graph.inputs
    )
    plan = Plan(
        mesh=mesh,
        mode=mode,
        options=options,
        cuts={
            name: {f: tuple(axes) for f, axes in factors.items() if axes}
            for name, factors in decisions.cuts.items()
            if any(factors.values())
        },
        storage={name: tuple(axes) for name, axes in decisions.storage.items()},
        outputs=dict(decisions.outputs),
        arrivals=dict(decisions.arrivals),
        sharding=decisions.sharding,
        bucket_bytes=decisions.bucket_bytes,
        recompute=dict(decisions.recompute),
        compute_dtype=None if graph.compute_dtype is None else str(graph.compute_dtype)[6:],
        pipeline=partitioned.pipeline,
        pins=dict(pins),
        parameters={v.name: (v.shape, dtype_name(v)) for v in graph.parameters},
        inputs=leaves,
        structure=_structure_text(graph),
        fingerprint=graph.fingerprint,
        operators=_rows(partitioned, pins, seen, predicted),
        returned=_returned(partitioned, seen),
        crossings=_crossings(partitioned),
        step=None if predicted is None else _step(partitioned, predicted),
        chunk_seconds=_chunk_seconds(partitioned, predicted),
        forward_bytes=sent[0],
        backward_bytes=sent[1],
        training=training,
        memory_limit=memory_limit,
        optimizer=optimizer,
        search_seconds=search_seconds,
        capture_seconds=graph.capture_seconds,
        graph=graph,
        dry_runs=dry_runs or DryRunCache(),
        pricing=pricing,
    )
    # Its chunks and communication are known already.
    plan.analysis.partitioned = partitioned
    return plan


def _structure_text(graph: Graph) -> str:
    """The nesting of the arguments as text.

    Raises:
        PlanError: if it has a class of the user's that nobody could read again.
    """
    try:
        return pytree.treespec_dumps(graph.in_spec)
    except NotImplementedError as error:
        raise PlanError(
            "a plan cannot name the class of an argument, such as a namedtuple: pass its fields "
            f"(`net(*batch)`, `net(**batch._asdict())`), a tuple or a dictionary ({error})"
        ) from error


def _step(partitioned: Partitioned, predicted: Predicted) -> StepRow:
    return StepRow(
        predicted.cluster.name,
        predicted.seconds,
        predicted.computation,
        predicted.communication,
        predicted.bubble,
        utilization(partitioned, predicted),
        time_parts(partitioned, predicted),
    )


def _chunk_seconds(
    partitioned: Partitioned, predicted: Predicted | None
) -> tuple[ChunkSeconds, ...]:
    if partitioned.pipeline.stages == 1:
        return ()
    timeline = None if predicted is None else predicted.timeline
    return (timeline or planned_timeline(partitioned)).chunks


def _rows(
    partitioned: Partitioned,
    pins: Mapping[str, OperatorStrategy],
    seen: set[int],
    predicted: Predicted | None,
) -> tuple[OperatorRow, ...]:
    """One row for each operator; of those that several chunks compute that of the first."""
    mesh, cuts, model = partitioned.mesh, partitioned.decisions.cuts, None
    if predicted is not None:
        model = TimeModel(predicted.cluster, mesh, partitioned.pipeline.stages)
    trace = trace_meanings(partitioned.graph)
    rows: dict[str, OperatorRow] = {}
    for chunk in partitioned.chunks:
        for op in chunk.graph.ops:
            if op.name not in rows:
                own = cuts.get(op.name, {})
                row = _row(op, mesh, own, chunk.communication, seen)
                known = {factor: trace.of_factor(op, factor) for factor in row.cuts}
                rows[op.name] = replace(
                    row,
                    pinned=op.name in pins,
                    stage=chunk.stage,
                    seconds=0.0 if model is None else sum(model.operator(op, own)),
                    meanings={f: each.name.lower() for f, each in known.items() if each},
                )
    return tuple(rows[op.name] for op in partitioned.graph.ops)


def _row(
    op: Op, mesh: DeviceMatrix, cuts: Cuts, flow: Communication, seen: set[int]
) -> OperatorRow:
    rule, segment = rule_of(op), flow.segment_of.get(op.name)
    redistributions = []
    for index, value in enumerate(op.inputs):
        route = flow.routes[op.name, index]
        if route:
            redistributions.append(replace(_redistribution(value, route, seen), input=index))
    for value in op.outputs:
        if value in flow.leading_transfers:
            redistributions.append(_redistribution(value, flow.leading_transfers[value], seen))
    if op.name in flow.reductions:
        redistributions.append(_inside(op, flow))
    return OperatorRow(
        name=op.name,
        operator=target_text(op),
        rule=str(rule) if rule is not None else None,
        inputs=tuple((v.name, v.shape, v.kind.value) for v in op.inputs),
        outputs=tuple(v.shape for v in op.outputs),
        cuts={f: tuple(mesh.alias_names[a] for a in axes) for f, axes in cuts.items() if axes},
        input_layouts=flow.input_layouts[op.name],
        output_layouts=tuple(flow.initial_layouts[value] for value in op.outputs),
        redistributions=tuple(redistributions),
        source=op.source,
        main=rule is not None and rule.main is not None,
        segment=segment.name if segment is not None else "",
    )


def _returned(partitioned: Partitioned, seen: set[int]) -> tuple[RedistributionRow, ...]:
    """What becomes of the model's outputs, then of the new values of what it changes."""
    routes = [
        (value, chunk.communication.output_routes[value])
        for chunk in partitioned.chunks
        for value in chunk.graph.output_values
    ]
    routes += [
        (value, chunk.communication.update_routes[before])
        for chunk in partitioned.chunks
        for before, value in chunk.graph.updates
    ]
    return tuple(_redistribution(value, route, seen) for value, route in routes if route)


def _crossings(partitioned: Partitioned) -> tuple[CrossingRow, ...]:
    rows = []
    for chunk, following in pairwise(partitioned.chunks):
        if chunk.stage != following.stage:
            names = tuple(value.name for value in chunk.leaving)
            forward, backward = chunk.border_bytes[0], following.border_bytes[1]
            rows.append(CrossingRow(chunk.stage, following.stage, names, forward, backward))
    return tuple(rows)


def _inside(op: Op, flow: Communication) -> RedistributionRow:
    """The collectives that the operator makes itself."""
    steps, forward, backward = [], 0, 0
    for inner in flow.reductions[op.name]:
        what = f"{inner.reduction.collective} {inner.reduction.kind}"
        steps.append(f"{what} over {flow.mesh.named(inner.axes)}")
        there, back = inner.bytes(flow.mesh, op.output.requires_grad)
        again = there if op.name in flow.computed_again else 0
        forward, backward = forward + there, backward + back + again
    return RedistributionRow("", tuple(steps), forward, backward, False)


def _redistribution(value: Value, route: tuple[Transfer, ...], seen: set[int]) -> RedistributionRow:
    fresh = [t for t in route if id(t) not in seen]
    seen.update(id(t) for t in fresh)
    return RedistributionRow(
        value=value.name,
        steps=tuple(describe(t) for t in route),
        forward_bytes=sum(t.forward_bytes for t in fresh),
        backward_bytes=sum(t.backward_bytes for t in fresh),
        shared=len(fresh) < len(route),
    )


def describe(transfer: Transfer) -> str:
    """A step in words: `all_gather dim 1 over tp / reduce_scatter`."""
    step = transfer.step
    words = [step.kind]
    if step.dim is not None:
        words.append(f"dim {step.dim}")
    if step.to_dim is not None:
        words.append(f"to dim {step.to_dim}")
    words.append(f"over {step.source.layout.named(step.axes)}")
    if transfer.trained and step.backward is not None:
        words.append(f"/ {step.backward}")
    return " ".join(words)
