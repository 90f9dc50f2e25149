"""Peak memory of each device in a training step, predicted without allocating device memory.

    peak = parameters + optimizer state + inputs               always
         + gathered parameters + gradients                     by the ZeRO level
         + activations of the micro-batches in flight          by the schedule
         + temporary tensors of the current pass

A dry run measures each chunk for one micro-batch (`core/cost/dry_run.py`), the schedule decides the
number of micro-batches in flight (`core/cost/pipeline_actions.py`), and `BorderBytes` adds the
tensors sent between stages that stay alive, and removes what two chunks of a stage share.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import ClassVar

import torch
from rich.console import Console
from rich.table import Table

from shardwright.core.cost.border_bytes import (
    BorderBytes,
    border_bytes,
)
from shardwright.core.cost.dry_run import DryRun, DryRunCache
from shardwright.core.cost.meta_chunk import (
    ACTIVATIONS,
    BATCH,
    BUFFERS,
    GRADIENTS,
    TEMPORARY,
    BytesByCategory,
    sum_by_category,
)
from shardwright.core.cost.optimizer_state import (
    OptimizerBytes,
    TrainedShard,
    optimizer_bytes,
    optimizer_name,
    table_shapes_of,
)
from shardwright.core.cost.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    PASS_TYPES,
    Action,
    actions,
)
from shardwright.core.cost.tensor_tracking import PARAMETERS, WEIGHTS
from shardwright.core.layout.axes import Shape
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import initial_layout
from shardwright.core.partition.partitioned import Partitioned
from shardwright.progress import OnShare, ignore_share, subrange

MAX_CURVE_PASSES = 600
"""Maximum number of passes of a step for which a memory curve is recorded."""

MOMENTS_OUTSIDE_PASSES = BEGIN, END, UPDATE = (
    "begin of the step",
    "end of the step",
    "optimizer step",
)
"""Names of the moments of a step outside of forward and backward passes."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one device of a stage at its peak, in bytes by category of tensor.

    Args:
        stage: index of the pipeline stage.
        parameters: stored parameters.
        optimizer: optimizer state.
        gradients: gradients of parameters.
        gathered: gathered or cast parameters.
        activations: tensors saved for backward passes.
        inputs: batch, buffers and constants.
        temporary: gradients of activations, buffers of collectives, intermediate results.
        moment: name of the pass with the peak, or of the moment in `MOMENTS_OUTSIDE_PASSES`.
        largest: (name of the operator that produces or first reads the tensor, category of tensor,
            bytes) of the largest tensors of the micro-batch at the peak.
        curve: (name of the pass, peak in bytes) of each pass; empty if there are more than
            `MAX_CURVE_PASSES`.
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
        """Whether memory peaks in a forward or backward pass."""
        return self.moment not in MOMENTS_OUTSIDE_PASSES

    @property
    def peak(self) -> int:
        """Peak memory in bytes, the sum over all categories of tensors."""
        return sum(getattr(self, name) for name in self.NAMES)


@dataclass(frozen=True)
class Memory:
    """Peak memory of each stage in a training step.

    Args:
        stages: memory of each measured stage, equal on all of its devices.
        optimizer: name of the assumed optimizer.
    """

    stages: tuple[StageMemory, ...]
    optimizer: str

    @property
    def largest_stage(self) -> StageMemory:
        """Memory of the pipeline stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak(self) -> int:
        """Peak memory in bytes of the stage with the highest peak."""
        return self.largest_stage.peak

    def __str__(self) -> str:
        """Return a table of the memory with one row per stage, as text."""
        # Without a terminal rich would assume 80 columns, and wrap the cells.
        console = Console(file=StringIO(), width=140, color_system=None)
        console.print(memory_table(self))
        written: StringIO = console.file  # type: ignore[assignment]
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def memory_table(memory: Memory) -> Table:
    """Return a table of the memory with one row per stage."""
    title = f"Memory of one device at its peak, with {memory.optimizer}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("stage")
    for column in (*StageMemory.NAMES, "peak"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("when")
    for stage in memory.stages:
        sizes = (bytes_text(getattr(stage, name)) for name in (*StageMemory.NAMES, "peak"))
        table.add_row(str(stage.stage), *sizes, stage.moment)
    return table


def bytes_text(number: int) -> str:
    """Return a number of bytes in binary units: 1536 → `1.5 KiB`."""
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
        optimizer: `sgd`, `momentum`, `adam`, `adamw`, `muon`, or an optimizer with the options of
            the training.
        dry_runs: cache of dry runs; by default a new one.
        on_share: called with the completed fraction of the stages.
        stages: indices of the stages to measure; by default all.

    Raises:
        PlanError: if the schedule or the optimizer is unknown.
    """
    pipeline, dry_runs = partitioned.pipeline, dry_runs or DryRunCache()
    stages_memory, table_shapes = [], table_shapes_of(partitioned.graph)
    for number, order in enumerate(actions(pipeline)):
        if stages is not None and number not in stages:
            continue
        chunks = partitioned.chunks_of(number)
        pass_types_of_stage = {action.pass_type for action in order}
        # In the order of one micro-batch, as the schedule interleaves those of several.
        pass_types = tuple(each for each in PASS_TYPES if each in pass_types_of_stage)
        stage_share = subrange(on_share, number, pipeline.stages)
        dry_run_of = {
            chunk.number: dry_runs.of(
                partitioned, chunk, pass_types, subrange(stage_share, n, len(chunks))
            )
            for n, chunk in enumerate(chunks)
        }
        borders = {chunk.number: border_bytes(chunk, pipeline) for chunk in chunks}
        state = optimizer_bytes(optimizer, trained_shards(chunks, table_shapes))
        bytes_before_step = _bytes_before_step(dry_run_of.values(), pipeline.micro_batches)
        moments = list(_compute_action_memories(order, dry_run_of, borders, state))
        stages_memory.append(_stage_memory(number, bytes_before_step, moments, state, chunks))
    return Memory(tuple(stages_memory), optimizer_name(optimizer))


def trained_shards(chunks: Sequence[Chunk], table_shapes: Container[Shape]) -> list[TrainedShard]:
    """Return the shard of each parameter that the optimizer of a stage updates.

    Args:
        table_shapes: shapes of the embeddings of the model.
    """
    # By name: a parameter that several chunks of a stage read is stored once.
    shards = {}
    for chunk in chunks:
        for value in chunk.graph.parameters:
            if value.requires_grad:
                stored = initial_layout(value, chunk.mesh, chunk.decisions)
                shape = stored.shard_shape(value.shape)
                is_table = value.shape in table_shapes
                shards[value.name] = TrainedShard(shape, value.stored_dtype, value.shape, is_table)
    return list(shards.values())


_PASSES_WITH_GRADIENTS = {
    BACKWARD: (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT),
    BACKWARD_WEIGHT: (BACKWARD, BACKWARD_WEIGHT),
}
"""Pass types that add to gradients of parameters, by the pass type that allocated the gradients."""


@dataclass(frozen=True)
class _ActionMemory:
    """Memory of one action of a stage, relative to the bytes that are live before the action.

    Args:
        name: name of the action, as shown to users.
        peak_bytes, change: changes in bytes by category, from the start of the action to its peak
            and to its end. Actions of a pass type share these objects.
        chunk: index of the chunk.
        largest: (category of tensor, operator index, bytes) of the largest tensors.
    """

    name: str
    peak_bytes: BytesByCategory
    change: BytesByCategory
    chunk: int = 0
    largest: tuple[tuple[str, int, int], ...] = ()


def _stage_memory(
    stage_index: int,
    bytes_before_step: BytesByCategory,
    moments: Sequence[_ActionMemory],
    optimizer: OptimizerBytes,
    chunks: Sequence[Chunk],
) -> StageMemory:
    """Return the memory of a pipeline stage at its peak.

    Args:
        bytes_before_step: bytes by category of tensor before the step.
        moments: all actions of the step, in order.
    """
    totals = _peak_bytes_of_actions(bytes_before_step, moments)
    # The first of equal peaks, where memory first becomes scarce.
    index = max(range(len(moments)), key=totals.__getitem__)
    moment = moments[index]
    # Most actions of a step share their `change` object.
    repeated: dict[int, tuple[BytesByCategory, int]] = {}
    for earlier in moments[:index]:
        change, num_repeats = repeated.get(id(earlier.change), (earlier.change, 0))
        repeated[id(change)] = change, num_repeats + 1
    changes = [
        {category: num_repeats * size for category, size in change.items()}
        for change, num_repeats in repeated.values()
    ]
    sizes = sum_by_category(bytes_before_step, *changes, moment.peak_bytes)
    # Moments outside of passes have chunk 0, perhaps of another stage; they list no tensors.
    ops = next((c.graph.ops for c in chunks if c.number == moment.chunk), chunks[0].graph.ops)
    curve = zip(moments, totals, strict=True) if len(moments) <= MAX_CURVE_PASSES else ()
    return StageMemory(
        stage=stage_index,
        parameters=sizes.get(PARAMETERS, 0),
        optimizer=optimizer.state,
        gradients=sizes.get(GRADIENTS, 0),
        gathered=sizes.get(WEIGHTS, 0),
        activations=sizes.get(ACTIVATIONS, 0),
        inputs=sizes.get(BATCH, 0) + sizes.get(BUFFERS, 0),
        temporary=sizes.get(TEMPORARY, 0),
        moment=moment.name,
        largest=tuple((ops[op].name, what or "temporary", n) for what, op, n in moment.largest),
        curve=tuple((each.name, total + optimizer.state) for each, total in curve),
    )


def _peak_bytes_of_actions(
    bytes_before_step: BytesByCategory, moments: Sequence[_ActionMemory]
) -> list[int]:
    """Return the peak bytes of a stage in each action of a step, without optimizer state."""
    sums: dict[int, int] = {}
    live, totals = sum(bytes_before_step.values()), []
    for moment in moments:
        for sizes in (moment.peak_bytes, moment.change):
            # Summed once for each dict, as all actions of a pass type share theirs.
            if id(sizes) not in sums:
                sums[id(sizes)] = sum(sizes.values())
        totals.append(live + sums[id(moment.peak_bytes)])
        live += sums[id(moment.change)]
    return totals


def _bytes_before_step(dry_runs: Iterable[DryRun], micro_batches: int) -> BytesByCategory:
    """Return the bytes that a stage has allocated before a step, by category of tensor."""
    bytes_before_step = sum_by_category({}, *(each.bytes_before_step for each in dry_runs))
    # A dry run has the inputs of one micro-batch; a device has those of all micro-batches.
    return {**bytes_before_step, BATCH: bytes_before_step.get(BATCH, 0) * micro_batches}


def _compute_action_memories(
    order: Sequence[Action],
    dry_run_of: Mapping[int, DryRun],
    borders: Mapping[int, BorderBytes],
    optimizer: OptimizerBytes,
) -> Iterator[_ActionMemory]:
    # Every chunk of the stage starts its gathers before the first pass of any.
    for each in dry_run_of.values():
        yield _ActionMemory(BEGIN, each.begin.peak_bytes, each.begin.change)
    changes: dict[tuple[int, str, bool], tuple[BytesByCategory, BytesByCategory]] = {}
    done_actions: set[tuple[int, str]] = set()
    activations = 0
    for action in order:
        each, key = dry_run_of[action.chunk], (action.chunk, action.pass_type)
        # The first backward pass allocates gradients, and later backward passes add to them.
        is_repeated_pass = key in done_actions
        phase = (each.later if is_repeated_pass else each.first)[action.pass_type]
        if (*key, is_repeated_pass) not in changes:
            border = borders[action.chunk]
            shared = border.shared_bytes(action.pass_type)
            # The shared bytes have been allocated by a neighbor on this stage.
            border_change = border.border_change(action.pass_type, is_repeated_pass) - shared
            changes[*key, is_repeated_pass] = (
                sum_by_category(phase.peak_bytes, {ACTIVATIONS: -shared}),
                sum_by_category(phase.change, {ACTIVATIONS: border_change}),
            )
        peak_bytes, change = changes[*key, is_repeated_pass]
        activations += change[ACTIVATIONS]
        name = _action_name(action, len(dry_run_of))
        yield _ActionMemory(name, peak_bytes, change, action.chunk, phase.largest)
        # A schedule may split the backward passes of some micro-batches only.
        equivalent = _PASSES_WITH_GRADIENTS.get(action.pass_type, (action.pass_type,))
        done_actions |= {(action.chunk, each) for each in equivalent}
    for each in dry_run_of.values():
        yield _ActionMemory(END, each.end.peak_bytes, each.end.change)
        activations += each.end.change.get(ACTIVATIONS, 0)
    activations += sum(
        each.bytes_before_step.get(ACTIVATIONS, 0) + each.begin.change.get(ACTIVATIONS, 0)
        for each in dry_run_of.values()
    )
    # All tensors sent between stages are freed by the end of the step.
    yield _ActionMemory(UPDATE, {ACTIVATIONS: -activations, TEMPORARY: optimizer.temporary}, {})


def _action_name(action: Action, num_chunks: int) -> str:
    direction = "forward" if action.pass_type == FORWARD else "backward"
    chunk_text = f" through chunk {action.chunk}" if num_chunks > 1 else ""
    return f"{direction} of micro-batch {action.micro_batch}{chunk_text}"
