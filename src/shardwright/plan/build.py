"""From what a search decided to a plan: conversions, bytes and rows follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from shardwright.constraints import OperatorStrategy
from shardwright.cost.dry_run import DryRunCache
from shardwright.cost.predict import Predicted
from shardwright.graph.graph import Graph, Op, Value
from shardwright.layout.layout import Layout
from shardwright.partition.communication import Communication, communication
from shardwright.partition.decisions import Decisions
from shardwright.partition.pipeline_spec import ONE_STAGE, PipelineSpec
from shardwright.partition.stages import Chunk, chunks, step_bytes
from shardwright.partition.transfer import Transfer
from shardwright.plan.data import dtype_name, target_text
from shardwright.plan.plan import Plan
from shardwright.plan.rows import CrossingRow, OperatorRow, RedistributionRow, StepRow
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts
from shardwright.torch_internals import pytree

NO_PINS: Mapping[str, OperatorStrategy] = MappingProxyType({})


def make_plan(
    graph: Graph,
    mesh: Layout,
    decisions: Decisions,
    *,
    mode: str,
    options: dict[str, Any],
    search_seconds: float,
    training: bool,
    pipeline: PipelineSpec = ONE_STAGE,
    pins: Mapping[str, OperatorStrategy] = NO_PINS,
    predicted: Predicted | None = None,
    memory_limit: int | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    dry_runs: DryRunCache | None = None,
) -> Plan:
    """Joins what a search decided with what follows from it: conversions and their bytes.

    Args:
        predicted: what a step takes, where a cluster was named.
        rehearsals: that were made while it was searched.

    Raises:
        PlanError: if the operators cannot be divided into the parts of `pipeline`.
    """
    cuts = decisions.cuts
    found = chunks(graph, mesh, decisions, pipeline)
    flows = [communication(part.graph, mesh, part.decisions) for part in found]
    sent = max(step_bytes(found, flows, mesh, pipeline), key=sum)
    seen: set[int] = set()
    leaves = tuple(
        {"name": leaf.name, "shape": leaf.shape, "dtype": dtype_name(leaf)}
        if isinstance(leaf, Value)
        else leaf
        for leaf in graph.inputs
    )
    return Plan(
        mesh=mesh,
        mode=mode,
        options=options,
        cuts={
            name: {f: tuple(axes) for f, axes in factors.items() if axes}
            for name, factors in cuts.items()
            if any(factors.values())
        },
        storage={name: tuple(axes) for name, axes in decisions.storage.items()},
        outputs=dict(decisions.outputs),
        arrivals=dict(decisions.arrivals),
        sharding=decisions.sharding,
        bucket_bytes=decisions.bucket_bytes,
        recompute=dict(decisions.recompute),
        compute_dtype=None if graph.compute_dtype is None else str(graph.compute_dtype)[6:],
        pipeline=pipeline,
        pins=dict(pins),
        parameters={v.name: (v.shape, dtype_name(v)) for v in graph.parameters},
        inputs=leaves,
        structure=pytree.treespec_dumps(graph.in_spec),
        fingerprint=graph.fingerprint,
        operators=_rows(graph, mesh, cuts, found, flows, pins, seen),
        returned=_returned(found, flows, seen),
        crossings=_crossings(found, mesh),
        step=None if predicted is None else _step(predicted),
        forward_bytes=sent[0],
        backward_bytes=sent[1],
        training=training,
        memory_limit=memory_limit,
        optimizer=optimizer,
        search_seconds=search_seconds,
        capture_seconds=graph.capture_seconds,
        graph=graph,
        dry_runs=dry_runs or DryRunCache(),
    )


def _step(predicted: Predicted) -> StepRow:
    return StepRow(
        predicted.cluster,
        predicted.seconds,
        predicted.computation,
        predicted.communication,
        predicted.bubble,
    )


def _rows(
    graph: Graph,
    mesh: Layout,
    cuts: Mapping[str, Cuts],
    found: Sequence[Chunk],
    flows: Sequence[Communication],
    pins: Mapping[str, OperatorStrategy],
    seen: set[int],
) -> tuple[OperatorRow, ...]:
    """One row for each operator; of those that several parts compute that of the first."""
    rows: dict[str, OperatorRow] = {}
    for part, flow in zip(found, flows, strict=True):
        for op in part.graph.ops:
            if op.name not in rows:
                row = _row(op, mesh, cuts.get(op.name, {}), flow, seen)
                rows[op.name] = replace(row, pinned=op.name in pins, stage=part.stage)
    return tuple(rows[op.name] for op in graph.ops)


def _row(op: Op, mesh: Layout, cuts: Cuts, flow: Communication, seen: set[int]) -> OperatorRow:
    found, segment = rule_of(op), flow.segment_of.get(op.name)
    conversions = []
    for index, value in enumerate(op.inputs):
        route = flow.routes[op.name, index]
        if route:
            conversions.append(replace(_conversion(value, route, seen), input=index))
    for value in op.outputs:
        if value in flow.left:
            conversions.append(_conversion(value, flow.left[value], seen))
    if op.name in flow.reductions:
        conversions.append(_inside(op, flow))
    return OperatorRow(
        name=op.name,
        operator=target_text(op),
        rule=str(found) if found is not None else None,
        inputs=tuple((v.name, v.shape, v.kind.value) for v in op.inputs),
        outputs=tuple(v.shape for v in op.outputs),
        cuts={f: tuple(mesh.alias_names[a] for a in axes) for f, axes in cuts.items() if axes},
        read=flow.read[op.name],
        made=tuple(flow.made[value] for value in op.outputs),
        conversions=tuple(conversions),
        source=op.source,
        main=found is not None and found.main is not None,
        segment=segment.name if segment is not None else "",
    )


def _returned(
    found: Sequence[Chunk], flows: Sequence[Communication], seen: set[int]
) -> tuple[RedistributionRow, ...]:
    """What becomes of the model's outputs, then of the new values of its buffers."""
    ways = [
        (value, flow.output_routes[value])
        for part, flow in zip(found, flows, strict=True)
        for value in part.graph.output_values
    ]
    ways += [
        (value, flow.update_routes[value])
        for part, flow in zip(found, flows, strict=True)
        for _, value in part.graph.updates
    ]
    return tuple(_conversion(value, route, seen) for value, route in ways if route)


def _crossings(found: Sequence[Chunk], mesh: Layout) -> tuple[CrossingRow, ...]:
    rows = []
    for part, after in pairwise(found):
        if part.stage != after.stage:
            names = tuple(value.name for value in part.leaving)
            there, back = part.sent_bytes(mesh)[0], after.sent_bytes(mesh)[1]
            rows.append(CrossingRow(part.stage, after.stage, names, there, back))
    return tuple(rows)


def _inside(op: Op, flow: Communication) -> RedistributionRow:
    """The all-reduces that the operator makes itself."""
    steps, forward, backward = [], 0, 0
    for inner in flow.reductions[op.name]:
        over = "".join(flow.mesh.alias_names[a] for a in inner.axes)
        steps.append(f"all_reduce {inner.reduction.kind} over {over}")
        there, back = inner.bytes(flow.mesh, op.output.requires_grad)
        again = there if op.name in flow.segment_of else 0
        forward, backward = forward + there, backward + back + again
    return RedistributionRow("", tuple(steps), forward, backward, False)


def _conversion(value: Value, route: tuple[Transfer, ...], seen: set[int]) -> RedistributionRow:
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
    """A step in words: `all_gather dim 1 over bc / reduce_scatter`."""
    step = transfer.step
    names = step.source.layout.alias_names
    words = [step.kind]
    if step.dim is not None:
        words.append(f"dim {step.dim}")
    if step.to_dim is not None:
        words.append(f"to dim {step.to_dim}")
    words.append(f"over {''.join(names[a] for a in step.axes)}")
    if transfer.differentiable and step.backward is not None:
        words.append(f"/ {step.backward}")
    return " ".join(words)
