"""Find the cheapest recomputation with which a plan fits into the memory of its devices.

Each pipeline stage has *levels* of recomputation that free more and more memory, from none to all.
Estimates suggest the lowest level that fits, and dry runs confirm or correct it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.core.cost.memory import Memory, StageMemory
from shardwright.core.cost.pipeline_timeline import actions, alive
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.search.recompute.blocks import (
    DEFAULT_PRICES,
    RecomputeBlock,
    RecomputeBlocks,
    RecomputeByOp,
    RecomputePrices,
)
from shardwright.core.search.recompute.knapsack import cheapest

NUM_LEVELS = 16
"""Levels are apart by this fraction of the memory that a stage can free."""

MIN_PEAK_RATIO = 0.93
"""The smallest ratio of memory in a dry run to its estimate, for stages with large activations."""

MAX_PEAK_RATIO = 1.4
"""The largest usual ratio of memory in a dry run to its estimate. It is reached where gradients of
full parameters are reduced at the end of a step."""

RATIO_SPREAD = 1.05
"""How much the ratio of a dry run to its estimate usually varies between plans with equal stages,
schedule and sharding level."""

MIN_ACTIVATION_RATIO = 0.75
"""The smallest ratio for activations alone, where they are small beside other memory."""


def max_peak_ratio(measured_ratio: float | None) -> float:
    """Return the largest ratio of memory in a dry run to its estimate that is to be expected.

    Args:
        measured_ratio: the ratio of another plan with equal stages, schedule and sharding level;
            None if none was measured.
    """
    return (
        MAX_PEAK_RATIO
        if measured_ratio is None
        else min(MAX_PEAK_RATIO, RATIO_SPREAD * measured_ratio)
    )


WHOLE_BLOCK_OPTIONS = ("kept", "again")
"""Options that recompute a whole block at once."""

UNIFORM_OPTIONS = ("lean", "cheap", *WHOLE_BLOCK_OPTIONS)
"""Options that also form a level if applied to all blocks, as users do by hand."""

MeasureMemory = Callable[[Decisions, Container[int] | None], Memory]
"""The peak memory of devices under decisions, for some stages or (None) for all."""

Levels = tuple[int, ...]
"""For each stage the index of its level."""


@dataclass(frozen=True)
class MeasuredDecisions:
    """Decisions and their memory in a dry run."""

    decisions: Decisions
    memory: Memory


class StageLevels:
    """The recomputation levels of one stage; they do not depend on the memory limit.

    Args:
        blocks: of its operators.
        saved: estimated bytes saved for the backward pass of a micro-batch without recomputation.
        in_flight: the number of micro-batches whose activations are held at once.

    Attributes:
        activation_bytes: estimated bytes of activations at the first and at the last level.
        key: equal for stages with equal chunks, so that they share measured levels.
    """

    def __init__(self, blocks: Sequence[RecomputeBlock], saved: int, in_flight: int) -> None:
        self._blocks = blocks
        self._items = [[item for item, _ in block.options.values()] for block in blocks]
        self._freeable_bytes = sum(max(item.freed for item in items) for items in self._items)
        self._cached_recompute: dict[int, RecomputeByOp] = {}
        self.activation_bytes = in_flight * saved, in_flight * (saved - self._freeable_bytes)
        self._largest_block_bytes = max(map(_recomputed_bytes, blocks), default=0)
        self.key = saved, tuple(map(tuple, self._items))

    @cached_property
    def _levels(self) -> list[tuple[int, str]]:
        """For each level the bytes freed, and the option if all blocks have the same."""
        steps = {self._freeable_bytes * step // NUM_LEVELS: "" for step in range(NUM_LEVELS + 1)}
        for option in UNIFORM_OPTIONS:
            steps[sum(block.options[option][0].freed for block in self._blocks_with(option))] = (
                option
            )
        # Freeing nothing needs no option, even if one happens to free no bytes.
        steps[0] = ""
        return sorted(steps.items())

    @property
    def last_level(self) -> int:
        """The index of the level that frees most."""
        return len(self._levels) - 1

    def freed_share(self, level: int) -> float:
        """The share of all freeable bytes that a level frees."""
        return self._levels[level][0] / max(self._freeable_bytes, 1)

    def first_level_freeing(self, freed_share: float) -> int:
        """The lowest level that frees at least this share of all freeable bytes."""
        return next(
            (n for n in range(self.last_level) if self.freed_share(n) >= freed_share),
            self.last_level,
        )

    def fully_recomputed_bytes(self, other_bytes: int) -> int:
        """Estimated peak of the stage at its last level.

        Args:
            other_bytes: bytes of everything but activations.
        """
        return other_bytes + self.activation_bytes[1] + self._largest_block_bytes

    def min_memory(self, other_bytes: int, gradients_present: bool) -> int:
        """Lower bound of the peak of the stage at any level, by an estimate.

        Args:
            other_bytes: bytes of everything but activations.
            gradients_present: whether all of them are allocated while activations are at their
                peak.
        """
        activations = self.fully_recomputed_bytes(0)
        return int(
            max(
                MIN_PEAK_RATIO * (other_bytes + activations),
                other_bytes + MIN_ACTIVATION_RATIO * activations * gradients_present,
            )
        )

    def expected_level(self, other_bytes: int, limit: int, min_ratio: float = 1.0) -> int:
        """The lowest level at which the stage fits, by an estimate.

        Args:
            other_bytes: bytes of everything but activations.
            limit: bytes of a device.
            min_ratio: factor on the estimate of the peak.
        """
        largest, smallest = self.activation_bytes
        missing = min_ratio * (other_bytes + largest) - limit
        return (
            0
            if missing <= 0
            else self.first_level_freeing(min(1.0, missing / max(largest - smallest, 1)))
        )

    def level_freeing_more(self, level: int, missing: int) -> int:
        """The lowest level that frees `missing` bytes more than `level`, by an estimate."""
        largest, smallest = self.activation_bytes
        return self.first_level_freeing(
            self.freed_share(level) + missing / max(MIN_PEAK_RATIO * (largest - smallest), 1)
        )

    def recompute_of(self, level: int) -> RecomputeByOp:
        """The recomputation of operators at a level."""
        if level not in self._cached_recompute:
            self._cached_recompute[level] = dict(self._enumerate_recompute(*self._levels[level]))
        return self._cached_recompute[level]

    def _blocks_with(self, option: str) -> list[RecomputeBlock]:
        """The blocks with an option; operators outside of modules do not count."""
        return [block for block in self._blocks if block.name and option in block.options]

    def _enumerate_recompute(self, needed: int, option: str) -> Iterator[tuple[str, Recompute]]:
        if option:
            for block in self._blocks_with(option):
                yield from block.options[option][1].items()
            return
        indices = cheapest(self._items, needed)
        # No level frees more than all blocks together.
        assert indices is not None
        for block, index in zip(self._blocks, indices, strict=True):
            if index >= 0:
                yield from list(block.options.values())[index][1].items()


def _recomputed_bytes(block: RecomputeBlock) -> int:
    """Bytes that exist at once when the backward pass of a block begins with its recomputation."""
    option, (item, _) = max(block.options.items(), key=lambda option: option[1][0].freed)
    # A block that is recomputed as a whole exists in full before its backward pass; the cheap
    # options recompute short segments one by one.
    return item.freed if option in WHOLE_BLOCK_OPTIONS else 0


class RecomputeLevels:
    """The recomputation levels of all stages of a plan; the user's own recomputation is kept.

    Args:
        prices: of bytes that are moved and sent again.
        depths: depths of the module tree whose modules may be blocks: groups of depths, the first
            group the cheapest and later ones with lower peaks; by default chosen by an estimate.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMatrix,
        decisions: Decisions,
        pipeline: PipelineSpec,
        prices: RecomputePrices = DEFAULT_PRICES,
        depths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._recompute_blocks = RecomputeBlocks(graph, mesh, decisions, self._stage_of, prices)
        self.depths = self._recompute_blocks.depths if depths is None else depths
        self._by_depth: dict[int, tuple[StageLevels, ...]] = {}

    def at_depth(self, depth: int) -> tuple[StageLevels, ...]:
        """Return the levels of each stage, with blocks at a depth of the module tree."""
        if depth not in self._by_depth:
            blocks, in_flight = (
                self._recompute_blocks.blocks(depth),
                _micro_batches_in_flight(self._pipeline),
            )
            self._by_depth[depth] = tuple(
                StageLevels([each for each in blocks if each.stage == number], *activations)
                for number, activations in enumerate(zip(self._saved, in_flight, strict=True))
            )
        return self._by_depth[depth]

    def may_fit_without_recompute(self, other_bytes: Sequence[int], limit: int) -> bool:
        """Whether all stages may fit without recomputation, by an estimate.

        Args:
            other_bytes: for each stage bytes of everything but activations.
        """
        stages = zip(
            other_bytes, _micro_batches_in_flight(self._pipeline), self._saved, strict=True
        )
        return all(
            MIN_PEAK_RATIO * (size + in_flight * saved) <= limit
            for size, in_flight, saved in stages
        )

    def min_memory(self, depth: int, other_bytes: Sequence[int]) -> list[int]:
        """Lower bounds of the peak of each stage, with blocks at a depth of the module tree.

        Args:
            other_bytes: for each stage bytes of everything but activations.
        """
        # From the second micro-batch on, all gradients exist throughout a backward pass.
        gradients_present = self._pipeline.micro_batches > 1
        stages = zip(self.at_depth(depth), other_bytes, strict=True)
        return [stage.min_memory(size, gradients_present) for stage, size in stages]

    def expected_decisions(
        self, plain: Decisions, other_bytes: Sequence[int], limit: int
    ) -> Decisions:
        """Decisions with the least recomputation with which all stages may fit, by an estimate that
        hardly ever recomputes more than necessary."""
        stages = self.at_depth(self.depths[0][0])
        sizes = zip(stages, other_bytes, strict=True)
        return with_recompute(
            plain,
            stages,
            [stage.expected_level(size, limit, MIN_PEAK_RATIO) for stage, size in sizes],
        )

    @cached_property
    def _saved(self) -> list[int]:
        """For each stage the bytes saved for the backward pass of a micro-batch."""
        saved = [0] * self._pipeline.stages
        operators = self._recompute_blocks.graph.by_name
        for name, size in self._recompute_blocks.plain.items():
            if name in operators:
                saved[self._stage_of(operators[name])] += size
        return saved

    def _stage_of(self, op: Op) -> int:
        return self._pipeline.stage_of(self._pipeline.chunk_of.get(op.name, 0))


def _micro_batches_in_flight(pipeline: PipelineSpec) -> list[int]:
    """For each stage the largest number of micro-batches whose activations it holds, averaged over
    its chunks."""
    return [
        max(max(1, sum(counts.values()) // len(counts)) for counts in alive(order))
        for order in actions(pipeline)
    ]


def with_recompute(
    plain: Decisions, stages: Sequence[StageLevels], levels: Sequence[int]
) -> Decisions:
    """Return decisions in which each stage recomputes the operators of its level."""
    chosen = (stage.recompute_of(level) for stage, level in zip(stages, levels, strict=True))
    recompute_of_stages = {name: recompute for each in chosen for name, recompute in each.items()}
    return replace(plain, recompute={**plain.recompute, **recompute_of_stages})


class RecomputeSearch:
    """The search by dry runs for the lowest levels with which a plan fits.

    Args:
        stages: the levels of each stage.
        plain: decisions without further recomputation.
        measure: a dry run of decisions.
        limit: bytes of a device.
        other_bytes: for each stage bytes of everything but activations.
        max_ratio: factor on estimates up to which they replace the first dry run; None if they
            never do.

    Attributes:
        estimate_fits: whether the plan fits at the last levels by its estimate times `max_ratio`.
    """

    def __init__(
        self,
        stages: Sequence[StageLevels],
        plain: Decisions,
        measure: MeasureMemory,
        limit: int,
        other_bytes: Sequence[int],
        max_ratio: float | None = None,
    ) -> None:
        self._stages, self._plain, self._measure, self._limit = stages, plain, measure, limit
        self._other_bytes = other_bytes
        self._estimates = [
            stage.fully_recomputed_bytes(size)
            for stage, size in zip(stages, other_bytes, strict=True)
        ]
        self.estimate_fits = max_ratio is not None and max_ratio * max(self._estimates) <= limit
        self._peaks: list[dict[int, int]] = [{} for _ in stages]
        self._measured: dict[object, set[int]] = {stage.key: set() for stage in stages}
        self._cached_full: MeasuredDecisions | None = None

    @property
    def fully_recomputed(self) -> MeasuredDecisions:
        """The decisions and the memory at the last levels."""
        if self._cached_full is None:
            self._cached_full = self._measure_levels(self._last_levels)
        return self._cached_full

    @property
    def _last_levels(self) -> Levels:
        return tuple(stage.last_level for stage in self._stages)

    @cached_property
    def largest_stage(self) -> StageMemory:
        """The memory at the last level of the stage with the largest estimate."""
        sizes = [
            stage.fully_recomputed_bytes(size)
            for stage, size in zip(self._stages, self._other_bytes, strict=True)
        ]
        number = sizes.index(max(sizes))
        (stage,) = self._measure(self._decided(self._last_levels), {number}).stages
        return stage

    @property
    def can_fit(self) -> bool:
        """Whether the plan fits at the last levels.

        Needs no dry run if the estimate fits, and one of a single stage if the largest does not.
        """
        # A dry run of one stage takes a fraction of one of all; the largest stage mostly decides.
        fits = self.estimate_fits or self.largest_stage.peak <= self._limit
        return fits and (self.estimate_fits or self.fully_recomputed.memory.peak <= self._limit)

    @property
    def is_measured(self) -> bool:
        """Whether all stages were measured at their last levels."""
        return self._cached_full is not None

    @property
    def measured_ratio(self) -> float:
        """The ratio of measured to estimated memory of the largest stage at its last level."""
        return self.largest_stage.peak / max(self._estimates)

    @property
    def peak_outside_passes(self) -> int:
        """The largest measured peak outside of forward and backward passes, at the last levels.

        Such a peak, in the optimizer's step for example, is a lower bound for blocks at all depths.
        0 if the measured stages peak in passes.
        """
        stages = self.fully_recomputed.memory.stages if self.is_measured else (self.largest_stage,)
        return max((stage.peak for stage in stages if not stage.in_a_pass), default=0)

    def expected_decisions(self) -> Decisions:
        """Decisions with the levels that are expected to fit."""
        return self._decided(tuple(map(self._next_level, range(len(self._stages)))))

    def run(self) -> MeasuredDecisions:
        """Return the lowest levels that fit, or the last levels if none do."""
        while True:
            measured = zip(self._last_levels, self._peaks, strict=True)
            # A stage that does not fit with everything recomputed rules out all levels.
            if any(peaks.get(last_level, 0) > self._limit for last_level, peaks in measured):
                return self.fully_recomputed
            levels = tuple(map(self._next_level, range(len(self._stages))))
            if all(level in peaks for level, peaks in zip(levels, self._peaks, strict=True)):
                decisions = self._decided(levels)
                return MeasuredDecisions(decisions, self._measure(decisions, None))
            self._measure_levels(levels)

    def _measure_levels(self, levels: Levels) -> MeasuredDecisions:
        decisions = self._decided(levels)
        needs = self._measure(decisions, None)
        for number, (level, stage) in enumerate(zip(levels, needs.stages, strict=True)):
            self._peaks[number][level] = stage.peak
            self._measured[self._stages[number].key].add(level)
        return MeasuredDecisions(decisions, needs)

    def _next_level(self, number: int) -> int:
        """The level to measure next; the lowest that fits once that is known."""
        stage, peaks = self._stages[number], self._peaks[number]
        lowest_fitting = min(
            (n for n, peak in peaks.items() if peak <= self._limit), default=stage.last_level
        )
        highest_exceeding = max((level for level in peaks if level < lowest_fitting), default=-1)
        between = range(highest_exceeding + 1, lowest_fitting)
        if not between:
            return lowest_fitting
        # A peak measured at the last level may be outside of passes, and then says nothing about
        # lower levels.
        if highest_exceeding >= 0 or lowest_fitting < stage.last_level:
            nearest = min(peaks, key=lambda level: abs(peaks[level] - self._limit))
            guess = stage.level_freeing_more(nearest, peaks[nearest] - self._limit)
        else:
            guess = stage.expected_level(self._other_bytes[number], self._limit)
        # Levels measured for a stage with equal chunks come from the cache of dry runs.
        measured_levels = self._measured[stage.key].intersection(between)
        return min(measured_levels or between, key=lambda level: (abs(level - guess), level))

    def _decided(self, levels: Levels) -> Decisions:
        return with_recompute(self._plain, self._stages, levels)
