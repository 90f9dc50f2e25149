"""Build a `Plan` from the decisions of a search: operator rows, redistributions and bytes."""

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
from shardwright.core.cost.predict import Predicted, predicted_timeline
from shardwright.core.cost.time_model import TimeModel
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
from shardwright.core.rules.rule import GATHER, Cuts
from shardwright.core.search.request import TimedStep
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
    timed_step: TimedStep | None = None,
) -> Plan:
    """Build the plan of a partitioned model.

    Args:
        partitioned: the graph with the search's decisions.
        mode: the search mode.
        options: the options of the search mode, by name.
        search_seconds: duration of the search in seconds.
        training: whether the plan is for training rather than evaluation.
        pins: the strategies that the user fixed, by operator.
        predicted: the predicted step time; None without a cluster.
        memory_limit: bytes that a step may use on each device; None for no limit.
        optimizer: the optimizer that the memory prediction assumes.
        dry_runs: cached dry runs, made during the search.
        timed_step: cluster and step for which a time-based search minimized seconds; None for other
            searches.

    Raises:
        PlanError: if the operators cannot be assigned to the chunks of the pipeline, or an
            argument's class cannot be serialized.
    """
    graph, mesh, decisions = partitioned.graph, partitioned.mesh, partitioned.decisions
    # Stages communicate at the same time, so the one that sends most is shown.
    step_bytes = max(partitioned.step_bytes, key=sum)
    # Ids of the transfers whose bytes are in a row; filled by `_build_redistribution_row`.
    counted_transfers: set[int] = set()
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
            # A search may leave factors without axes, which plan files do not allow.
            for name, factors in decisions.cuts.items()
            if any(factors.values())
        },
        storage={name: tuple(axes) for name, axes in decisions.storage.items()},
        outputs=dict(decisions.outputs),
        arrivals=dict(decisions.arrivals),
        sharding=decisions.sharding,
        bucket_bytes=decisions.bucket_bytes,
        recompute=dict(decisions.recompute),
        # Without the prefix `torch.`.
        compute_dtype=None if graph.compute_dtype is None else str(graph.compute_dtype)[6:],
        pipeline=partitioned.pipeline,
        pins=dict(pins),
        parameters={v.name: (v.shape, dtype_name(v)) for v in graph.parameters},
        inputs=leaves,
        structure=_serialize_argument_structure(graph),
        fingerprint=graph.fingerprint,
        operators=_build_operator_rows(partitioned, pins, counted_transfers, predicted),
        returned=_build_returned_rows(partitioned, counted_transfers),
        crossings=_build_crossing_rows(partitioned),
        step=None if predicted is None else _build_step_row(partitioned, predicted),
        chunk_seconds=_predict_chunk_seconds(partitioned, predicted),
        forward_bytes=step_bytes[0],
        backward_bytes=step_bytes[1],
        training=training,
        memory_limit=memory_limit,
        optimizer=optimizer,
        search_seconds=search_seconds,
        capture_seconds=graph.capture_seconds,
        graph=graph,
        dry_runs=dry_runs or DryRunCache(),
        timed_step=timed_step,
    )
    # The partitioned model has derived its chunks and communication: do not derive them again.
    plan.analysis.partitioned = partitioned
    return plan


def _serialize_argument_structure(graph: Graph) -> str:
    """Return the pytree structure of the model's arguments as JSON.

    Raises:
        PlanError: if an argument's class, such as a namedtuple, cannot be serialized.
    """
    try:
        # PyTorch serializes only classes that are registered with a serialized name.
        return pytree.treespec_dumps(graph.in_spec)
    except NotImplementedError as error:
        raise PlanError(
            f"a plan cannot store the class of an argument, such as a namedtuple: {error}\n"
            "pass the argument's fields (`net(*batch)`, `net(**batch._asdict())`), a tuple or a"
            " dictionary"
        ) from error


def _build_step_row(partitioned: Partitioned, predicted: Predicted) -> StepRow:
    return StepRow(
        predicted.cluster.name,
        predicted.seconds,
        predicted.computation,
        predicted.communication,
        predicted.bubble,
        utilization(partitioned, predicted),
        time_parts(partitioned, predicted),
    )


def _predict_chunk_seconds(
    partitioned: Partitioned, predicted: Predicted | None
) -> tuple[ChunkSeconds, ...]:
    if partitioned.pipeline.stages == 1:
        return ()
    timeline = None if predicted is None else predicted.timeline
    # Without a cluster a chunk takes one second per GFLOP.
    return (timeline or predicted_timeline(partitioned)).chunks


def _build_operator_rows(
    partitioned: Partitioned,
    pins: Mapping[str, OperatorStrategy],
    counted_transfers: set[int],
    predicted: Predicted | None,
) -> tuple[OperatorRow, ...]:
    """Return one row per operator, in the order of the graph.

    If several chunks compute an operator, the row describes the operator in the first of these
    chunks.

    Args:
        partitioned: the graph with the search's decisions.
        pins: the strategies that the user fixed, by operator.
        counted_transfers: ids of the transfers whose bytes a row counts already; extended in place.
        predicted: the predicted step time; None without a cluster.
    """
    mesh, cuts, time_model = partitioned.mesh, partitioned.decisions.cuts, None
    if predicted is not None:
        # Seconds of rows exist on a cluster only; without one they are 0.
        time_model = TimeModel(predicted.cluster, mesh, partitioned.pipeline.stages)
    trace = trace_meanings(partitioned.graph)
    rows: dict[str, OperatorRow] = {}
    for chunk in partitioned.chunks:
        for op in chunk.graph.ops:
            if op.name not in rows:
                operator_cuts = cuts.get(op.name, {})
                row = _build_operator_row(
                    op, mesh, operator_cuts, chunk.communication, counted_transfers
                )
                meanings = {factor: trace.of_factor(op, factor) for factor in row.cuts}
                rows[op.name] = replace(
                    row,
                    pinned=op.name in pins,
                    stage=chunk.stage,
                    seconds=0.0
                    if time_model is None
                    else sum(time_model.operator_seconds(op, operator_cuts)),
                    # In lower case, as plan files have them (`plan_file.MEANINGS`).
                    meanings={
                        f: meaning.name.lower() for f, meaning in meanings.items() if meaning
                    },
                )
    return tuple(rows[op.name] for op in partitioned.graph.ops)


def _build_operator_row(
    op: Op, mesh: DeviceMatrix, cuts: Cuts, comm: Communication, counted_transfers: set[int]
) -> OperatorRow:
    rule, segment = rule_of(op), comm.segment_of.get(op.name)
    redistributions = []
    for index, value in enumerate(op.inputs):
        route = comm.routes[op.name, index]
        if route:
            redistributions.append(
                replace(_build_redistribution_row(value, route, counted_transfers), input=index)
            )
    for value in op.outputs:
        # A pinned output is redistributed once, before all of its consumers.
        if value in comm.leading_transfers:
            redistributions.append(
                _build_redistribution_row(value, comm.leading_transfers[value], counted_transfers)
            )
    if op.name in comm.reductions:
        redistributions.append(_build_kernel_collectives_row(op, comm))
    return OperatorRow(
        name=op.name,
        operator=target_text(op),
        rule=str(rule) if rule is not None else None,
        inputs=tuple((v.name, v.shape, v.origin.value) for v in op.inputs),
        outputs=tuple(v.shape for v in op.outputs),
        cuts={f: tuple(mesh.alias_names[a] for a in axes) for f, axes in cuts.items() if axes},
        input_layouts=comm.input_layouts[op.name],
        output_layouts=tuple(comm.initial_layouts[value] for value in op.outputs),
        redistributions=tuple(redistributions),
        source=op.source,
        main=rule is not None and rule.main is not None,
        segment=segment.name if segment is not None else "",
    )


def _build_returned_rows(
    partitioned: Partitioned, counted_transfers: set[int]
) -> tuple[RedistributionRow, ...]:
    """Return the redistributions of the model's outputs, then those of updated buffers."""
    routes = [
        (value, chunk.communication.output_routes[value])
        for chunk in partitioned.chunks
        for value in chunk.graph.output_values
    ]
    routes += [
        # An update returns to the layout of the old value, by which its route is listed.
        (value, chunk.communication.update_routes[before])
        for chunk in partitioned.chunks
        for before, value in chunk.graph.updates
    ]
    return tuple(
        _build_redistribution_row(value, route, counted_transfers)
        for value, route in routes
        if route
    )


def _build_crossing_rows(partitioned: Partitioned) -> tuple[CrossingRow, ...]:
    rows = []
    for chunk, following in pairwise(partitioned.chunks):
        # Consecutive chunks on one stage, as at the tip of a V, send nothing.
        if chunk.stage != following.stage:
            names = tuple(value.name for value in chunk.leaving)
            # Bytes to the next chunk, and of gradients from the next chunk back to this one.
            forward, backward = chunk.border_bytes[0], following.border_bytes[1]
            rows.append(CrossingRow(chunk.stage, following.stage, names, forward, backward))
    return tuple(rows)


def _build_kernel_collectives_row(op: Op, comm: Communication) -> RedistributionRow:
    """Return one row for the collectives inside a kernel, such as batch norm's all-reduces."""
    steps, forward, backward = [], 0, 0
    for inner in comm.reductions[op.name]:
        reduction = inner.reduction
        is_gather = reduction.operation == GATHER
        # A gather has no reduction, such as a sum or a maximum, to name.
        collective = (
            reduction.collective if is_gather else f"{reduction.collective} {reduction.operation}"
        )
        steps.append(f"{collective} over {comm.mesh.named(inner.axes)}")
        sum_forward, sum_backward = inner.bytes(comm.mesh, op.output.requires_grad)
        # Activation checkpointing runs the forward collectives again in the backward pass.
        recomputed = sum_forward if op.name in comm.recomputed_ops else 0
        forward, backward = forward + sum_forward, backward + sum_backward + recomputed
    return RedistributionRow("", tuple(steps), forward, backward, False)


def _build_redistribution_row(
    value: Value, route: tuple[Transfer, ...], counted_transfers: set[int]
) -> RedistributionRow:
    # Consumers of a value share leading steps; the first consumer's row has their bytes, so that
    # the bytes of all rows add up to what the program sends.
    unshared = [t for t in route if id(t) not in counted_transfers]
    counted_transfers.update(id(t) for t in unshared)
    return RedistributionRow(
        value=value.name,
        steps=tuple(transfer_text(t) for t in route),
        forward_bytes=sum(t.forward_bytes for t in unshared),
        backward_bytes=sum(t.backward_bytes for t in unshared),
        shared=len(unshared) < len(route),
    )


def transfer_text(transfer: Transfer) -> str:
    """Format a transfer by its forward and backward collectives: `all_gather dim 1 over tp /
    reduce_scatter`."""
    step = transfer.step
    words = [step.operation]
    if step.dim is not None:
        words.append(f"dim {step.dim}")
    if step.to_dim is not None:
        words.append(f"to dim {step.to_dim}")
    words.append(f"over {step.source.layout.named(step.axes)}")
    # A value without a gradient has no backward pass to communicate in.
    if transfer.trained and step.backward is not None:
        words.append(f"/ {step.backward}")
    return " ".join(words)
