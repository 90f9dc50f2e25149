"""Find the cheapest recomputation with which a plan fits into the memory of its devices.

Estimates suggest the lowest recomputation level (`levels`) at which each pipeline stage fits, and
dry runs confirm or correct this level.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.cost.memory import Memory, StageMemory
from shardwright.core.partition.decisions import Decisions
from shardwright.core.search.recompute.levels import StageLevels, with_recompute

MAX_PEAK_RATIO = 1.4
"""Maximum expected ratio of the peak memory in a dry run to its estimate. Plans reach it that
reduce the gradients of full parameters at the end of a step."""

RATIO_SPREAD = 1.05
"""Maximum expected factor between the ratios of measured to estimated peak memory of two plans with
equal stages, schedule and ZeRO level."""


def max_peak_ratio(measured_ratio: float | None) -> float:
    """Return the maximum expected ratio of the peak memory in a dry run to its estimate.

    Args:
        measured_ratio: ratio that was measured for another plan with equal stages, schedule and
            ZeRO level; None if no other plan was measured.
    """
    return (
        MAX_PEAK_RATIO
        if measured_ratio is None
        else min(MAX_PEAK_RATIO, RATIO_SPREAD * measured_ratio)
    )


MeasureMemory = Callable[[Decisions, Container[int] | None], Memory]
"""Function that measures memory by a dry run, given decisions and stage indices (None for all)."""

Levels = tuple[int, ...]
"""The index of the recomputation level of each stage."""


@dataclass(frozen=True)
class MeasuredDecisions:
    """Decisions with the memory per device that a dry run of the decisions measures."""

    decisions: Decisions
    memory: Memory


class RecomputeSearch:
    """Search, by dry runs, for the lowest recomputation level of each stage at which a plan fits.

    Args:
        stages: recomputation levels of each stage.
        decisions: decisions to which the search adds recomputation.
        measure: function that measures the memory of decisions by a dry run.
        limit: memory limit in bytes per device.
        other_bytes: bytes per device of each stage without activations.
        max_ratio: maximum expected ratio of measured to estimated peak memory, with which
            `estimate_fits` is computed; None to always run the dry run at the last levels.

    Attributes:
        peak_ratio: expected ratio of the measured to the estimated peak memory of each stage
            (`StageLevels.peak_ratio`); by default 1, to be replaced by that of a similar plan.
        estimate_fits: whether the estimated peak at the last levels, times `max_ratio`, is within
            the limit, so that the dry run at these levels is skipped.
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
        self.peak_ratio = 1.0
        self._estimates = [
            stage.fully_recomputed_bytes(size)
            for stage, size in zip(stages, other_bytes, strict=True)
        ]
        self.estimate_fits = max_ratio is not None and max_ratio * max(self._estimates) <= limit
        # The measured peak of each level, for each stage.
        self._peaks: list[dict[int, int]] = [{} for _ in stages]
        self._measured_levels: dict[object, set[int]] = {stage.key: set() for stage in stages}
        self._fully_recomputed: MeasuredDecisions | None = None
        self._fitted: tuple[Levels, Memory] | None = None

    @property
    def fully_recomputed(self) -> MeasuredDecisions:
        """Decisions with all stages at their highest recomputation levels, and their memory in a
        dry run."""
        if self._fully_recomputed is None:
            self._fully_recomputed = self._measure_levels(self._last_levels)
        return self._fully_recomputed

    @property
    def _last_levels(self) -> Levels:
        return tuple(stage.last_level for stage in self._stages)

    @cached_property
    def largest_stage(self) -> StageMemory:
        """Memory of the stage with the largest estimate, by a dry run at its highest recomputation
        level."""
        sizes = [
            stage.fully_recomputed_bytes(size)
            for stage, size in zip(self._stages, self._other_bytes, strict=True)
        ]
        # The largest by estimate is the most likely one not to fit.
        stage_index = sizes.index(max(sizes))
        (stage,) = self._measure(self._decisions_at_levels(self._last_levels), {stage_index}).stages
        return stage

    @property
    def can_fit(self) -> bool:
        """Whether the plan fits into memory at the highest recomputation levels.

        No dry run is made if `estimate_fits`. If the largest stage does not fit, only this stage
        has a dry run.
        """
        # A dry run of one stage takes a fraction of the time of all stages, and the largest stage
        # mostly decides.
        fits = self.estimate_fits or self.largest_stage.peak <= self._limit
        return fits and (self.estimate_fits or self.fully_recomputed.memory.peak <= self._limit)

    @property
    def is_measured(self) -> bool:
        """Whether all stages were measured at their highest recomputation levels."""
        return self._fully_recomputed is not None

    @property
    def measured_ratio(self) -> float:
        """Ratio of measured to estimated peak memory of the largest stage at its highest
        recomputation level."""
        return self.largest_stage.peak / max(self._estimates)

    @property
    def measured_peak_ratio(self) -> float | None:
        """`StageLevels.peak_ratio` at the levels that `run` has found, the smallest of all stages
        whose peak is inside of a pass; None before, and if there is no such stage."""
        if self._fitted is None:
            return None
        levels, memory = self._fitted
        stages = zip(self._stages, self._other_bytes, levels, memory.stages, strict=True)
        ratios = (
            stage.peak_ratio(other_bytes, level, measured.peak)
            for stage, other_bytes, level, measured in stages
            if measured.in_a_pass
        )
        return min(ratios, default=None)

    @property
    def peak_outside_passes(self) -> int:
        """Largest measured peak outside of forward and backward passes at the highest recomputation
        levels, in bytes; 0 if all peaks are inside of passes.

        A peak outside, for example in the optimizer's step, is a lower bound on the peak with
        blocks at any depth.
        """
        stages = self.fully_recomputed.memory.stages if self.is_measured else (self.largest_stage,)
        return max((stage.peak for stage in stages if not stage.in_a_pass), default=0)

    def expected_decisions(self) -> Decisions:
        """Return decisions with the lowest recomputation level at which each stage is expected to
        fit into memory."""
        return self._decisions_at_levels(
            tuple(map(self._next_level_to_measure, range(len(self._stages))))
        )

    def run(self) -> MeasuredDecisions:
        """Return decisions with their memory, at the lowest recomputation level at which each stage
        fits, or at the last levels if the plan does not fit."""
        while True:
            measured = zip(self._last_levels, self._peaks, strict=True)
            # A stage that does not fit at its last level fits at no level.
            if any(peaks.get(last_level, 0) > self._limit for last_level, peaks in measured):
                return self.fully_recomputed
            levels = tuple(map(self._next_level_to_measure, range(len(self._stages))))
            # One dry run measures all stages, but the level of each stage is searched separately.
            # The dry run of the final combination comes from the cache.
            if all(level in peaks for level, peaks in zip(levels, self._peaks, strict=True)):
                decisions = self._decisions_at_levels(levels)
                memory = self._measure(decisions, None)
                self._fitted = levels, memory
                return MeasuredDecisions(decisions, memory)
            self._measure_levels(levels)

    def _measure_levels(self, levels: Levels) -> MeasuredDecisions:
        decisions = self._decisions_at_levels(levels)
        memory = self._measure(decisions, None)
        for stage_index, (level, stage) in enumerate(zip(levels, memory.stages, strict=True)):
            self._peaks[stage_index][level] = stage.peak
            self._measured_levels[self._stages[stage_index].key].add(level)
        return MeasuredDecisions(decisions, memory)

    def _next_level_to_measure(self, stage_index: int) -> int:
        """Return the recomputation level of a stage to measure next; once the search of the stage
        is complete, the lowest level that fits, or the last."""
        stage, peaks = self._stages[stage_index], self._peaks[stage_index]
        lowest_fitting = min(
            (n for n, size in peaks.items() if size <= self._limit), default=stage.last_level
        )
        # Invariant: levels up to this one do not fit, and `lowest_fitting` does or is the last.
        highest_exceeding = max((level for level in peaks if level < lowest_fitting), default=-1)
        between = range(highest_exceeding + 1, lowest_fitting)
        if not between:
            return lowest_fitting
        # A peak measured at the last level may be outside of passes; such a peak does not predict
        # those of lower levels.
        if highest_exceeding >= 0 or lowest_fitting < stage.last_level:
            # The shorter the way from a measured level, the smaller the error of the estimate.
            nearest = min(peaks, key=lambda level: abs(peaks[level] - self._limit))
            guess = stage.level_freeing_more(nearest, peaks[nearest] - self._limit)
        else:
            guess = stage.expected_level(
                self._other_bytes[stage_index], self._limit, self.peak_ratio
            )
        # Levels measured for a stage with equal chunks come from the cache of dry runs.
        measured_levels = self._measured_levels[stage.key].intersection(between)
        return min(measured_levels or between, key=lambda level: (abs(level - guess), level))

    def _decisions_at_levels(self, levels: Levels) -> Decisions:
        return with_recompute(self._decisions, self._stages, levels)
