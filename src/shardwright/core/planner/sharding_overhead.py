"""How much sharding lengthens the passes of a micro-batch and its activations.

A step divides the batch into as many parts as micro-batches times devices of a stage. With more
parts than samples, other dimensions are sharded too, which communicates and replicates some
activations. With equal numbers of parts a device computes equally much of a micro-batch, in groups
of devices of equal size. So one search on the fewest devices tells the overhead of all options with
as many parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardwright.core.planner.candidate import Candidate, FindCandidates
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.queued_candidate import RecomputeCache
from shardwright.core.planner.step_bound import ShardingOverhead, StepBounds
from shardwright.core.search.recompute.levels import stage_saved_bytes
from shardwright.errors import PlanError, StrategyError


class ShardingOverheads:
    """Assumed minimum overheads of sharding, by the number of parts of the batch.

    Args:
        all_options: options to search without a memory limit, with numbers of stages and of
            micro-batches; none if there is no limit, as a search for an overhead takes as long then
            as the search itself.
        find_candidates: function that searches with given options and returns candidates.
        bounds: lower bounds on seconds and activations without overhead.
    """

    def __init__(
        self,
        all_options: Iterable[PlanOptions],
        find_candidates: FindCandidates,
        bounds: StepBounds,
    ) -> None:
        self._find_candidates, self._bounds = find_candidates, bounds
        self._recompute_cache = RecomputeCache()
        self._cached: dict[int, ShardingOverhead] = {}
        # One schedule: the search does not depend on it.
        options_by_pipeline = {
            (options.num_micro_batches, options.stages): options for options in all_options
        }
        self._options_by_num_parts: dict[int, list[PlanOptions]] = defaultdict(list)
        for options in options_by_pipeline.values():
            self._options_by_num_parts[_num_parts(options)].append(options)

    def of(self, options: PlanOptions) -> ShardingOverhead:
        """Return the assumed minimum overhead of plans with `options`; ratios of 1 if it is
        unknown."""
        num_parts = _num_parts(options)
        if num_parts not in self._cached:
            self._cached[num_parts] = self._search(self._options_by_num_parts[num_parts])
        return self._cached[num_parts]

    def of_candidate(self, candidate: Candidate) -> ShardingOverhead:
        """Return the overhead of a candidate."""
        options, pipeline = candidate.options, candidate.pipeline
        saved_bytes = stage_saved_bytes(self._recompute_cache.blocks(candidate), pipeline)
        seconds, least_bytes = self._bounds.micro_batch(options)
        return ShardingOverhead(
            max(1.0, candidate.micro_batch_seconds / seconds),
            max(1.0, sum(saved_bytes) * _num_devices_of_stage(options) / max(1.0, least_bytes)),
        )

    def _search(self, options_with_equal_parts: Sequence[PlanOptions]) -> ShardingOverhead:
        # Of a single one the search itself gives a tighter bound.
        if len(options_with_equal_parts) <= 1:
            return ShardingOverhead()
        # The most stages have the fewest devices, whose search takes the least time.
        for options in sorted(options_with_equal_parts, key=_num_devices_of_stage):
            try:
                overheads = list(map(self.of_candidate, self._find_candidates(options)))
            except (PlanError, StrategyError):
                # Such as too few operators for the stages; recorded when `options` are searched.
                continue
            return ShardingOverhead(
                min(each.seconds for each in overheads),
                min(each.saved_bytes for each in overheads),
            )
        return ShardingOverhead()


def _num_devices_of_stage(options: PlanOptions) -> int:
    assert isinstance(options.stages, int)
    return options.devices // options.stages


def _num_parts(options: PlanOptions) -> int:
    """Return the number of parts into which the devices of a stage divide the batch of a step."""
    return options.num_micro_batches * _num_devices_of_stage(options)
