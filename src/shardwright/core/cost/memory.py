"""Peak memory of each device in a training step, predicted without allocating anything.

    peak = parameters + optimizer state + inputs               always
         + gathered parameters + gradients                     by the sharding level
         + activations of the micro-batches in flight          by the schedule
         + temporary tensors of the current pass

A dry run measures each chunk for one micro-batch (`core/cost/dry_run.py`), the schedule gives the
number of micro-batches in flight (`core/cost/pipeline_timeline.py`), and `BorderBytes` adds the
messages between stages that stay alive.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import prod
from typing import ClassVar

import torch
from rich.console import Console
from rich.table import Table

from shardwright.core.cost.dry_run import (
    ACTIVATIONS,
    BATCH,
    BUFFERS,
    GRADIENTS,
    TEMPORARY,
    DryRun,
    DryRunCache,
    Kinds,
    plus,
)
from shardwright.core.cost.optimizer_state import OptimizerBytes, optimizer_bytes, optimizer_name
from shardwright.core.cost.pipeline_timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    actions,
)
from shardwright.core.cost.tensor_tracking import PARAMETERS, WEIGHTS
from shardwright.core.graph.graph import Value
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import initial_layout, storage_as_used
from shardwright.core.partition.decisions import LEVELS
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.progress import OnShare, ignore_share, subrange

MAX_CURVE_PASSES = 600
"""Number of passes of a step above which no memory curve is recorded."""

OUTSIDE = BEGIN, END, UPDATE = "begin of the step", "end of the step", "optimizer step"
"""Moments outside of forward and backward passes."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one device of a stage at its peak, in bytes by kind.

    Args:
        parameters: parameters as stored.
        optimizer: optimizer state.
        gradients: gradients of parameters.
        gathered: gathered or cast parameters.
        activations: saved for backward passes.
        inputs: batch, buffers and constants.
        temporary: gradients of activations, buffers of collectives, intermediate results.
        moment: name of the pass at the peak.
        largest: largest tensors of the current micro-batch: name of the operator that produces or
            first reads them, kind, bytes.
        curve: peak of each pass; empty if there are more than `MAX_CURVE_PASSES`.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        *("parameters", "optimizer", "gradients", "gathered"),
        *("activations", "inputs", "temporary"),
    )

    stage: int
    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    activations: int
    inputs: int
    temporary: int
    moment: str
    largest: tuple[tuple[str, str, int], ...] = ()
    curve: tuple[tuple[str, int], ...] = ()

    @property
    def in_a_pass(self) -> bool:
        """Whether the peak is in a forward or backward pass."""
        return self.moment not in OUTSIDE

    @property
    def peak(self) -> int:
        """Bytes of all kinds together."""
        return sum(getattr(self, name) for name in self.NAMES)


@dataclass(frozen=True)
class Memory:
    """Peak memory of each stage in a training step.

    Args:
        stages: requested stages; all devices of a stage need the same.
        optimizer: name of the assumed optimizer.
    """

    stages: tuple[StageMemory, ...]
    optimizer: str

    @property
    def largest_stage(self) -> StageMemory:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak(self) -> int:
        """Bytes of the device with the highest peak."""
        return self.largest_stage.peak

    def __str__(self) -> str:
        """The memory as a table."""
        console = Console(file=StringIO(), width=140, color_system=None)
        console.print(memory_table(self))
        written: StringIO = console.file  # type: ignore[assignment]
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def memory_table(memory: Memory) -> Table:
    """Table of a memory prediction with one row per stage."""
    title = f"Memory of one device at its peak, with {memory.optimizer}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("stage")
    for column in (*StageMemory.NAMES, "peak"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("when")
    for stage in memory.stages:
        sizes = (binary(getattr(stage, name)) for name in (*StageMemory.NAMES, "peak"))
        table.add_row(str(stage.stage), *sizes, stage.moment)
    return table


def binary(number: int) -> str:
    """Bytes in binary units: 1536 → `1.5 KiB`."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def memory(
    partitioned: Partitioned,
    optimizer: str | torch.optim.Optimizer = "adamw",
    dry_runs: DryRunCache | None = None,
    on_share: OnShare = ignore_share,
    stages: Container[int] | None = None,
) -> Memory:
    """Predict the peak memory of each stage in a training step.

    Args:
        optimizer: `sgd`, `momentum`, `adam`, `adamw`, or an optimizer with the options to be used.
        dry_runs: cache of earlier dry runs.
        on_share: receives the share of the stages that is done.
        stages: stages to measure; by default all.

    Raises:
        PlanError: if the schedule or the optimizer is unknown.
    """
    pipeline, dry_runs = partitioned.pipeline, dry_runs or DryRunCache()
    stages_memory = []
    for number, order in enumerate(actions(pipeline)):
        if stages is not None and number not in stages:
            continue
        chunks = partitioned.chunks_of(number)
        kinds = tuple(dict.fromkeys(action.kind for action in order))
        stage_share = subrange(on_share, number, pipeline.stages)
        dry_run_of = {
            chunk.number: dry_runs.of(
                partitioned, chunk, kinds, subrange(stage_share, n, len(chunks))
            )
            for n, chunk in enumerate(chunks)
        }
        borders = {chunk.number: border_bytes(chunk, pipeline) for chunk in chunks}
        state = optimizer_bytes(optimizer, _trained(chunks))
        moments = _moments(order, dry_run_of, borders, state, pipeline.micro_batches)
        stages_memory.append(_stage_memory(number, list(moments), state, chunks))
    return Memory(tuple(stages_memory), optimizer_name(optimizer))


def least_memory(partitioned: Partitioned, optimizer: str | torch.optim.Optimizer) -> list[int]:
    """Lower bound of `memory` per stage in bytes, for any recomputation and without a dry run.

    Sum of stored parameters, their gradients, optimizer state, what the sharding level keeps
    unsharded over the micro-batches of a step, and inputs of all micro-batches with what stages
    receive for them.

    Raises:
        PlanError: if the optimizer is unknown.
    """
    stages, leaves = [], {each for each in partitioned.graph.inputs if isinstance(each, Value)}
    for number in range(partitioned.pipeline.stages):
        chunks = partitioned.chunks_of(number)
        shards = _trained(chunks)
        stored = sum(prod(shape) * dtype.itemsize for shape, dtype in shards)
        needed = stored + optimizer_bytes(optimizer, shards).state + stored
        if partitioned.pipeline.micro_batches > 1:
            needed += sum(map(_unsharded, chunks))
        received = sum(_received(chunk, leaves) for chunk in chunks)
        stages.append(needed + received * partitioned.pipeline.micro_batches)
    return stages


def _received(chunk: Chunk, leaves: set[Value]) -> int:
    """Bytes of a micro-batch's inputs, and of what neighboring chunks send for it."""
    given = sum(
        _local_bytes(value, chunk, value.stored_dtype)
        for value in chunk.graph.input_values
        if value in leaves
    )
    arriving = sum(_local_bytes(value, chunk, value.dtype) for value in chunk.arriving)
    returning = chunk.border_bytes[0]
    return given + arriving + returning


def _local_bytes(value: Value, chunk: Chunk, dtype: torch.dtype) -> int:
    layout = initial_layout(value, chunk.mesh, chunk.decisions)
    return prod(layout.shard_shape(value.shape)) * dtype.itemsize


def _unsharded(chunk: Chunk) -> int:
    """Bytes of gathered or cast parameters, and of unsharded gradients beyond their shards, that
    are kept over the micro-batches of a step."""
    sharding, decisions = chunk.decisions.sharding, chunk.decisions
    level = None if sharding is None else sharding.level
    used = storage_as_used(chunk.graph, chunk.mesh, decisions.cuts)
    unsharded_bytes = 0
    for value in (each for each in chunk.graph.parameters if each.requires_grad):
        as_used = TensorLayout(chunk.mesh, used[value.name])
        stored = initial_layout(value, chunk.mesh, decisions)
        full_numel, shard_numel = (
            prod(each.shard_shape(value.shape)) for each in (as_used, stored)
        )
        # A parameter that is not sharded is kept once more only if it is cast. Of sharded ones,
        # level1 (ZeRO-1) keeps the gathered parameter and its full gradient over micro-batches,
        # level2 (ZeRO-2) the gathered parameter, level3 (ZeRO-3) neither.
        if stored.axes == as_used.axes:
            unsharded_bytes += (
                full_numel * value.itemsize if value.dtype != value.stored_dtype else 0
            )
        elif level in (LEVELS[0], LEVELS[1]):
            unsharded_bytes += full_numel * value.itemsize
            if level == LEVELS[0]:
                unsharded_bytes += (full_numel - shard_numel) * value.stored_dtype.itemsize
    return unsharded_bytes


def _trained(chunks: Sequence[Chunk]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Local shapes and dtypes of the parameters that a stage's optimizer updates."""
    # By name: a parameter that several chunks of a stage read is stored once.
    shards = {}
    for chunk in chunks:
        for value in chunk.graph.parameters:
            axes = chunk.decisions.storage.get(value.name, ((),) * len(value.shape))
            if value.requires_grad:
                shape = TensorLayout(chunk.mesh, tuple(axes)).shard_shape(value.shape)
                shards[value.name] = (shape, value.stored_dtype)
    return list(shards.values())


@dataclass(frozen=True)
class _Moment:
    """Memory at the peak of one action, without optimizer state."""

    name: str
    kinds: Kinds
    chunk: int = 0
    largest: tuple[tuple[str, int, int], ...] = ()

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def _stage_memory(
    number: int, moments: Sequence[_Moment], optimizer: OptimizerBytes, chunks: Sequence[Chunk]
) -> StageMemory:
    moment = max(moments, key=lambda each: each.total)
    ops = next((c.graph.ops for c in chunks if c.number == moment.chunk), chunks[0].graph.ops)
    curve, kinds = moments if len(moments) <= MAX_CURVE_PASSES else (), moment.kinds
    return StageMemory(
        stage=number,
        parameters=kinds.get(PARAMETERS, 0),
        optimizer=optimizer.state,
        gradients=kinds.get(GRADIENTS, 0),
        gathered=kinds.get(WEIGHTS, 0),
        activations=kinds.get(ACTIVATIONS, 0),
        inputs=kinds.get(BATCH, 0) + kinds.get(BUFFERS, 0),
        temporary=kinds.get(TEMPORARY, 0),
        moment=moment.name,
        largest=tuple((ops[op].name, kind or "temporary", n) for kind, op, n in moment.largest),
        curve=tuple((each.name, each.total + optimizer.state) for each in curve),
    )


def _moments(
    order: Sequence[Action],
    dry_run_of: Mapping[int, DryRun],
    borders: Mapping[int, BorderBytes],
    optimizer: OptimizerBytes,
    micro_batches: int,
) -> Iterator[_Moment]:
    live: Kinds = plus({}, *(each.stock for each in dry_run_of.values()))
    # Dry runs have the batch of one micro-batch; a device has all of them from the start.
    live = {**live, BATCH: live.get(BATCH, 0) * micro_batches}
    for each in dry_run_of.values():
        yield _Moment(BEGIN, plus(live, each.begin.peak))
        live = plus(live, each.begin.change)
    done_actions: set[tuple[int, str]] = set()
    for action in order:
        each, key = dry_run_of[action.chunk], (action.chunk, action.kind)
        # The first backward pass allocates gradients, later ones accumulate into them.
        phase = (each.later if key in done_actions else each.first)[action.kind]
        name, peak = _action_name(action, len(dry_run_of)), plus(live, phase.peak)
        yield _Moment(name, peak, action.chunk, phase.largest)
        border_change = borders[action.chunk].border_change(action.kind, key in done_actions)
        live = plus(live, phase.change, {ACTIVATIONS: border_change})
        done_actions.add(key)
    for each in dry_run_of.values():
        yield _Moment(END, plus(live, each.end.peak))
        live = plus(live, each.end.change)
    # All messages between stages are freed by the end of the step.
    live = {**live, ACTIVATIONS: 0}
    yield _Moment(UPDATE, plus(live, {TEMPORARY: optimizer.temporary}))


def _action_name(action: Action, num_chunks: int) -> str:
    direction = "forward" if action.kind == FORWARD else "backward"
    chunk_text = f" through chunk {action.chunk}" if num_chunks > 1 else ""
    return f"{direction} of micro-batch {action.micro_batch}{chunk_text}"


@dataclass(frozen=True)
class BorderBytes:
    """Bytes of values that cross the borders of a chunk and stay alive, per micro-batch.

    Args:
        shared: outputs that are the input buffers of the next chunk on the same stage, so that they
            are not counted twice.
        sent: outputs that stay alive after the backward pass.
        returned: gradients of inputs that stay alive after the backward pass.
        reuses_messages: whether only those of one micro-batch stay alive.
    """

    shared: int = 0
    sent: int = 0
    returned: int = 0
    reuses_messages: bool = False

    def border_change(self, kind: str, repeats_kind: bool) -> int:
        """Change of live bytes by an action, in addition to that of its dry run.

        Args:
            kind: kind of the action.
            repeats_kind: whether the chunk has run an action of this kind before.
        """
        border_change, sends = 0, not (self.reuses_messages and repeats_kind)
        if kind == FORWARD:
            border_change -= self.shared
        if kind in (BACKWARD, BACKWARD_INPUT) and sends:
            border_change += self.returned
        if kind in (BACKWARD, BACKWARD_WEIGHT):
            border_change += self.shared + (self.sent if sends else 0)
        return border_change


def border_bytes(chunk: Chunk, pipeline: PipelineSpec) -> BorderBytes:
    """Bytes that stay alive at the borders of `chunk`."""
    sent, returned = chunk.border_bytes

    def on_same_stage(number: int) -> bool:
        return 0 <= number < pipeline.num_chunks and pipeline.stage_of(number) == chunk.stage

    if on_same_stage(chunk.number - 1):
        # The gradients of its buffers are the buffers for the gradients of the chunk before.
        returned = 0
    if on_same_stage(chunk.number + 1):
        return BorderBytes(shared=sent, returned=returned)
    # 1F1B keeps one forward message, from before its first backward pass, and the last gradient.
    return BorderBytes(
        sent=sent, returned=returned, reuses_messages=pipeline.schedule_spec.reuses_messages
    )
