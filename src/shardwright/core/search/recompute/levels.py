"""The recomputation levels of pipeline stages.

Each level frees more memory than the level before, from no recomputation to full recomputation.
Levels do not depend on the memory limit, so candidates with equal cuts share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property

from shardwright.core.cost.pipeline_actions import actions, in_flight_counts
from shardwright.core.graph.graph import Op
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.search.recompute.blocks import (
    RecomputeBlock,
    RecomputeBlocks,
    RecomputeByOp,
)
from shardwright.core.search.recompute.knapsack import cheapest

NUM_LEVELS = 16
"""Number of equal steps into which the recomputation levels divide the bytes that recomputation can
free."""

MIN_PEAK_RATIO = 0.93
"""Minimum expected ratio of measured peak memory (dry run) to estimated, for stages whose memory is
mostly activations."""

MIN_ACTIVATION_RATIO = 0.75
"""Minimum expected ratio of measured activation bytes (dry run) to estimated, for stages whose
memory is mostly parameters, gradients and optimizer state."""


FULL_BLOCK_OPTIONS = ("block", "block_and_communication")
"""Names of the options that recompute all operators of a block at once."""

UNIFORM_OPTIONS = ("lean", "cheap", *FULL_BLOCK_OPTIONS)
"""Names of the options that have a recomputation level in which all blocks take them, as in
configurations written by hand."""


class StageLevels:
    """The recomputation levels of one pipeline stage, from no recomputation to full recomputation.

    Args:
        blocks: blocks of the operators of the stage.
        saved_bytes: estimated bytes that a device saves for the backward pass of a micro-batch
            without recomputation.
        in_flight: maximum number of micro-batches whose activations exist at the same time.

    Attributes:
        activation_bytes: estimated bytes of activations on a device, as (bytes at the first level,
            bytes at the last level).
        key: hashable value that is equal for stages with equal chunks, which share measured levels.
    """

    def __init__(self, blocks: Sequence[RecomputeBlock], saved_bytes: int, in_flight: int) -> None:
        self._blocks = blocks
        self._items = [[item for item, _ in block.options.values()] for block in blocks]
        # A block takes at most one option.
        self._freeable_bytes = sum(max(item.freed for item in items) for items in self._items)
        self._cached_recompute: dict[int, RecomputeByOp] = {}
        min_saved_bytes = saved_bytes - self._freeable_bytes
        self.activation_bytes = in_flight * saved_bytes, in_flight * min_saved_bytes
        self._largest_block_bytes = max(map(_bytes_at_start_of_backward, blocks), default=0)
        self.key = saved_bytes, tuple(map(tuple, self._items))

    @cached_property
    def _option_by_freed_bytes(self) -> list[tuple[int, str]]:
        """Recomputation levels, as ascending (bytes to free, name of the option of all blocks).

        The name is "" for a level at which a knapsack chooses the option of each block.
        """
        # By freed bytes, so that options which free equally many are one level.
        steps = {self._freeable_bytes * step // NUM_LEVELS: "" for step in range(NUM_LEVELS + 1)}
        for option in UNIFORM_OPTIONS:
            # Replaces a combination that frees equally many bytes by what users configure by hand.
            steps[
                sum(block.options[option][0].freed for block in self._blocks_with_option(option))
            ] = option
        # Level 0 has no option, even if an option happens to free no bytes.
        steps[0] = ""
        return sorted(steps.items())

    @property
    def last_level(self) -> int:
        """Index of the recomputation level that frees the most memory."""
        return len(self._option_by_freed_bytes) - 1

    def freed_share(self, level: int) -> float:
        """Return the fraction of the freeable activation bytes that a recomputation level frees."""
        # A stage without blocks frees nothing.
        return self._option_by_freed_bytes[level][0] / max(self._freeable_bytes, 1)

    def first_level_freeing(self, freed_share: float) -> int:
        """Return the first recomputation level that frees at least `freed_share` of the freeable
        bytes; the last level if no level does."""
        return next(
            (n for n in range(self.last_level) if self.freed_share(n) >= freed_share),
            self.last_level,
        )

    def fully_recomputed_bytes(self, other_bytes: int) -> int:
        """Return the estimated peak memory of the stage at its highest recomputation level, in
        bytes per device.

        Args:
            other_bytes: bytes per device without activations.
        """
        return other_bytes + self.activation_bytes[1] + self._largest_block_bytes

    def min_memory(self, other_bytes: int, gradients_present: bool) -> int:
        """Return a lower estimate of the stage's peak memory at its highest recomputation level, in
        bytes per device.

        Args:
            other_bytes: bytes per device without activations.
            gradients_present: whether all gradients are allocated while activations are at their
                peak.
        """
        # Both corrections of the estimate are lower bounds, so the larger of them holds.
        activations = self.fully_recomputed_bytes(0)
        return int(
            max(
                MIN_PEAK_RATIO * (other_bytes + activations),
                other_bytes + MIN_ACTIVATION_RATIO * activations * gradients_present,
            )
        )

    def expected_level(self, other_bytes: int, limit: int, peak_ratio: float = 1.0) -> int:
        """Return the lowest recomputation level whose estimated peak memory is at most `limit`, or
        the last level.

        Args:
            other_bytes: bytes per device without activations.
            limit: memory limit in bytes per device.
            peak_ratio: expected ratio of measured to estimated peak memory.
        """
        largest, smallest = self.activation_bytes
        missing = peak_ratio * (other_bytes + largest) - limit
        return (
            0
            if missing <= 0
            else self.first_level_freeing(min(1.0, missing / max(largest - smallest, 1)))
        )

    def peak_ratio(self, other_bytes: int, level: int, peak_bytes: int) -> float:
        """Return the ratio with which `expected_level` predicts the measured peak memory of the
        stage at a recomputation level.

        Args:
            other_bytes: bytes per device without activations.
            peak_bytes: measured peak memory in bytes per device.
        """
        largest, smallest = self.activation_bytes
        freed = self.freed_share(level) * (largest - smallest)
        return (peak_bytes + freed) / max(other_bytes + largest, 1)

    def level_freeing_more(self, level: int, missing: int) -> int:
        """Return the lowest recomputation level that frees an estimated `missing` bytes per device
        more than `level`, or the last level."""
        largest, smallest = self.activation_bytes
        return self.first_level_freeing(
            self.freed_share(level) + missing / max(MIN_PEAK_RATIO * (largest - smallest), 1)
        )

    def recompute_of(self, level: int) -> RecomputeByOp:
        """Return the stage's operators that a level recomputes, with their `Recompute`
        decisions."""
        if level not in self._cached_recompute:
            self._cached_recompute[level] = dict(
                self._recompute_decisions_of_level(*self._option_by_freed_bytes[level])
            )
        return self._cached_recompute[level]

    def _blocks_with_option(self, option: str) -> list[RecomputeBlock]:
        """Return the blocks that are module calls and offer the recomputation option named
        `option`."""
        return [block for block in self._blocks if block.name and option in block.options]

    def _recompute_decisions_of_level(
        self, needed: int, option: str
    ) -> Iterator[tuple[str, Recompute]]:
        """Yield (operator name, `Recompute` decision) for each operator that a level recomputes.

        Args:
            needed: bytes to free with the cheapest combination of options; ignored if `option` is
                not "".
            option: name of the option of all blocks; "" for the cheapest combination of options.
        """
        if option:
            for block in self._blocks_with_option(option):
                yield from block.options[option][1].items()
            return
        indices = cheapest(self._items, needed)
        # No level frees more than all blocks together.
        assert indices is not None
        for block, index in zip(self._blocks, indices, strict=True):
            if index >= 0:
                yield from list(block.options.values())[index][1].items()


def _bytes_at_start_of_backward(block: RecomputeBlock) -> int:
    """Return the bytes of recomputed activations when the backward pass of a block begins.

    Assumes the option of the block that frees the most memory.
    """
    option, (item, _) = max(block.options.items(), key=lambda option: option[1][0].freed)
    # All activations of a block that is recomputed as a whole exist before its backward pass; the
    # cheap options recompute short segments one by one.
    return item.freed if option in FULL_BLOCK_OPTIONS else 0


class RecomputeLevels:
    """The recomputation levels of all stages of a plan, in addition to the user's recomputation.

    Args:
        blocks: blocks of the model, with the sharding of the plan.
        depths: groups of depths of the module tree at which modules may be blocks; None for
            `RecomputeBlocks.depths`.
    """

    def __init__(
        self,
        blocks: RecomputeBlocks,
        pipeline: PipelineSpec,
        depths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._pipeline, self.blocks = pipeline, blocks
        self.depths = blocks.depths(self._stage_of_op) if depths is None else depths
        self._by_depth: dict[int, tuple[StageLevels, ...]] = {}

    def at_depth(self, depth: int) -> tuple[StageLevels, ...]:
        """Return the recomputation levels of each stage, with the modules at a depth of the module
        tree as blocks."""
        if depth not in self._by_depth:
            blocks = self.blocks.blocks(depth, self._stage_of_op)
            in_flight = micro_batches_in_flight(self._pipeline)
            self._by_depth[depth] = tuple(
                StageLevels([each for each in blocks if each.stage == stage], *activations)
                for stage, activations in enumerate(zip(self._saved_bytes, in_flight, strict=True))
            )
        return self._by_depth[depth]

    def may_fit_without_recompute(self, other_bytes: Sequence[int], limit: int) -> bool:
        """Whether a low estimate of the memory of all stages without recomputation is within
        `limit`.

        Args:
            other_bytes: bytes per device of each stage without activations.
            limit: memory limit in bytes per device.
        """
        stages = zip(
            other_bytes, micro_batches_in_flight(self._pipeline), self._saved_bytes, strict=True
        )
        return all(
            MIN_PEAK_RATIO * (size + in_flight * saved) <= limit
            for size, in_flight, saved in stages
        )

    def min_memory(self, depth: int, other_bytes: Sequence[int]) -> list[int]:
        """Return a low estimate of each stage's peak memory at its highest recomputation level, in
        bytes per device.

        Args:
            depth: depth of the module tree at which modules are blocks.
            other_bytes: bytes per device of each stage without activations.
        """
        # From the second micro-batch on, all gradients exist throughout a backward pass.
        gradients_present = self._pipeline.micro_batches > 1
        stages = zip(self.at_depth(depth), other_bytes, strict=True)
        return [stage.min_memory(size, gradients_present) for stage, size in stages]

    def expected_decisions(
        self, decisions: Decisions, other_bytes: Sequence[int], limit: int
    ) -> Decisions:
        """Return `decisions` with the least recomputation at which all stages may fit into memory.

        Memory is underestimated, so that the result rarely recomputes more than necessary.

        Args:
            other_bytes: bytes per device of each stage without activations.
            limit: memory limit in bytes per device.
        """
        # The first depth of the first group has the lowest estimated peak.
        stages = self.at_depth(self.depths[0][0])
        sizes = zip(stages, other_bytes, strict=True)
        return with_recompute(
            decisions,
            stages,
            [stage.expected_level(size, limit, MIN_PEAK_RATIO) for stage, size in sizes],
        )

    @cached_property
    def _saved_bytes(self) -> list[int]:
        return stage_saved_bytes(self.blocks, self._pipeline)

    def _stage_of_op(self, op: Op) -> int:
        # Without stages `chunk_of` is empty, and chunk 0 has all operators.
        return self._pipeline.stage_of(self._pipeline.chunk_of.get(op.name, 0))


def stage_saved_bytes(blocks: RecomputeBlocks, pipeline: PipelineSpec) -> list[int]:
    """Return the bytes that a device of each stage saves for the backward pass of a micro-batch,
    without recomputation."""
    saved_bytes = [0] * pipeline.stages
    for name, size in blocks.saved_without_blocks.items():
        # Inputs, buffers and constants have no operator and are not freed by recomputation.
        if name in blocks.graph.by_name:
            saved_bytes[pipeline.stage_of(pipeline.chunk_of.get(name, 0))] += size
    return saved_bytes


def micro_batches_in_flight(pipeline: PipelineSpec) -> tuple[int, ...]:
    """Return for each stage the maximum number of micro-batches in flight, as a mean over the
    chunks of the stage."""
    # Assignments of operators to chunks are neither hashable nor needed.
    return _max_micro_batches_in_flight(
        pipeline.stages, pipeline.micro_batches, pipeline.schedule, pipeline.chunks
    )


@cache
def _max_micro_batches_in_flight(
    stages: int, micro_batches: int, schedule: str, chunks: int
) -> tuple[int, ...]:
    pipeline = PipelineSpec(stages, micro_batches, schedule, chunks)
    return tuple(
        # At least 1: the mean over chunks rounds down, but every pass has a micro-batch in flight.
        max(max(1, sum(counts.values()) // len(counts)) for counts in in_flight_counts(order))
        for order in actions(pipeline)
    )


def with_recompute(
    decisions: Decisions, stages: Sequence[StageLevels], levels: Sequence[int]
) -> Decisions:
    """Return `decisions` with the operators added that each stage recomputes at its level.

    Args:
        stages: levels of each stage.
        levels: index of the level of each stage.
    """
    by_stage = (stage.recompute_of(level) for stage, level in zip(stages, levels, strict=True))
    recompute_of_stages = {name: recompute for each in by_stage for name, recompute in each.items()}
    # No conflicts: operators that the user recomputes belong to no block.
    return replace(decisions, recompute={**decisions.recompute, **recompute_of_stages})
