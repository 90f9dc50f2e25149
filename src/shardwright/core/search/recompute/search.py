"""Find the cheapest recomputation with which a plan fits into the memory of its devices.

Estimates suggest the lowest level (`levels`) of each pipeline stage that fits, and dry runs confirm
or correct it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.cost.memory import Memory, StageMemory
from shardwright.core.partition.decisions import Decisions
from shardwright.core.search.recompute.levels import StageLevels, with_recompute

MAX_PEAK_RATIO = 1.4
"""Largest usual ratio of the peak memory in a dry run to its estimate. It is reached where
gradients of full parameters are reduced at the end of a step."""

RATIO_SPREAD = 1.05
"""Usual factor between the ratios of measured to estimated peaks of plans with equal stages,
schedule and sharding level."""


def max_peak_ratio(measured_ratio: float | None) -> float:
    """Return the largest ratio of peak memory in a dry run to its estimate to expect.

    Args:
        measured_ratio: the ratio of another plan with equal stages, schedule and sharding level;
            None if none was measured.
    """
    return (
        MAX_PEAK_RATIO
        if measured_ratio is None
        else min(MAX_PEAK_RATIO, RATIO_SPREAD * measured_ratio)
    )


MeasureMemory = Callable[[Decisions, Container[int] | None], Memory]
"""Returns the memory per device under decisions, of the given stages or (None) of all."""

Levels = tuple[int, ...]
"""The index of each stage's level."""


@dataclass(frozen=True)
class MeasuredDecisions:
    """Decisions with their memory per device, measured by a dry run."""

    decisions: Decisions
    memory: Memory


class RecomputeSearch:
    """The search, by dry runs, for the lowest levels with which a plan fits.

    Args:
        stages: the levels of each stage.
        decisions: decisions to which the search adds recomputation.
        measure: returns the memory of decisions by a dry run.
        limit: memory limit in bytes per device.
        other_bytes: for each stage bytes of everything but activations.
        max_ratio: largest expected ratio of measured to estimated peak memory; an estimate that
            fits even times this ratio replaces the first dry run. None to always make the dry run.

    Attributes:
        estimate_fits: whether the plan fits at the last levels by its estimate times `max_ratio`.
    """

    def __init__(
        self,
        stages: Sequence[StageLevels],
        decisions: Decisions,
        measure: MeasureMemory,
        limit: int,
        other_bytes: Sequence[int],
        max_ratio: float | None = None,
    ) -> None:
        self._stages, self._decisions, self._measure, self._limit = (
            stages,
            decisions,
            measure,
            limit,
        )
        self._other_bytes = other_bytes
        self._estimates = [
            stage.fully_recomputed_bytes(size)
            for stage, size in zip(stages, other_bytes, strict=True)
        ]
        self.estimate_fits = max_ratio is not None and max_ratio * max(self._estimates) <= limit
        self._peaks: list[dict[int, int]] = [{} for _ in stages]
        self._measured_levels: dict[object, set[int]] = {stage.key: set() for stage in stages}
        self._fully_recomputed: MeasuredDecisions | None = None

    @property
    def fully_recomputed(self) -> MeasuredDecisions:
        """Decisions with all stages at their last levels, and their memory by a dry run."""
        if self._fully_recomputed is None:
            self._fully_recomputed = self._measure_levels(self._last_levels)
        return self._fully_recomputed

    @property
    def _last_levels(self) -> Levels:
        return tuple(stage.last_level for stage in self._stages)

    @cached_property
    def largest_stage(self) -> StageMemory:
        """Measured memory, at its last level, of the stage with the largest estimate."""
        sizes = [
            stage.fully_recomputed_bytes(size)
            for stage, size in zip(self._stages, self._other_bytes, strict=True)
        ]
        stage_index = sizes.index(max(sizes))
        (stage,) = self._measure(self._decisions_at(self._last_levels), {stage_index}).stages
        return stage

    @property
    def can_fit(self) -> bool:
        """Whether the plan fits at the last levels.

        No dry run is made if the estimate fits, and one of a single stage if the largest stage does
        not fit.
        """
        # A dry run of one stage takes a fraction of one of all; the largest stage mostly decides.
        fits = self.estimate_fits or self.largest_stage.peak <= self._limit
        return fits and (self.estimate_fits or self.fully_recomputed.memory.peak <= self._limit)

    @property
    def is_measured(self) -> bool:
        """Whether all stages were measured at their last levels."""
        return self._fully_recomputed is not None

    @property
    def measured_ratio(self) -> float:
        """Ratio of measured to estimated peak memory of the largest stage at its last level."""
        return self.largest_stage.peak / max(self._estimates)

    @property
    def peak_outside_passes(self) -> int:
        """The largest measured peak outside of forward and backward passes, at the last levels.

        In bytes per device; 0 if the measured stages peak in a pass. Such a peak, for example in
        the optimizer's step, is a lower bound for blocks at all depths.
        """
        stages = self.fully_recomputed.memory.stages if self.is_measured else (self.largest_stage,)
        return max((stage.peak for stage in stages if not stage.in_a_pass), default=0)

    def expected_decisions(self) -> Decisions:
        """Return decisions with the levels that are expected to fit."""
        return self._decisions_at(tuple(map(self._next_level, range(len(self._stages)))))

    def run(self) -> MeasuredDecisions:
        """Return the lowest levels that fit, or the last levels if none do."""
        while True:
            measured = zip(self._last_levels, self._peaks, strict=True)
            # A stage that does not fit with everything recomputed rules out all levels.
            if any(peaks.get(last_level, 0) > self._limit for last_level, peaks in measured):
                return self.fully_recomputed
            levels = tuple(map(self._next_level, range(len(self._stages))))
            # Stages are measured together, but their levels are found independently; the dry run of
            # the final combination comes from the cache.
            if all(level in peaks for level, peaks in zip(levels, self._peaks, strict=True)):
                decisions = self._decisions_at(levels)
                return MeasuredDecisions(decisions, self._measure(decisions, None))
            self._measure_levels(levels)

    def _measure_levels(self, levels: Levels) -> MeasuredDecisions:
        decisions = self._decisions_at(levels)
        memory = self._measure(decisions, None)
        for stage_index, (level, stage) in enumerate(zip(levels, memory.stages, strict=True)):
            self._peaks[stage_index][level] = stage.peak
            self._measured_levels[self._stages[stage_index].key].add(level)
        return MeasuredDecisions(decisions, memory)

    def _next_level(self, stage_index: int) -> int:
        """Return the level of a stage to measure next, or the lowest that fits once it is known."""
        stage, peaks = self._stages[stage_index], self._peaks[stage_index]
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
            guess = stage.expected_level(self._other_bytes[stage_index], self._limit)
        # Levels measured for a stage with equal chunks come from the cache of dry runs.
        measured_levels = self._measured_levels[stage.key].intersection(between)
        return min(measured_levels or between, key=lambda level: (abs(level - guess), level))

    def _decisions_at(self, levels: Levels) -> Decisions:
        return with_recompute(self._decisions, self._stages, levels)
