"""Queue entries for candidates in the search under a memory limit, and the recomputation levels
that candidates share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwright.core.planner.attempts import Attempt
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.candidate_bound import CandidateBound
from shardwright.core.search.recompute.blocks import (
    DEFAULT_COSTS,
    RecomputeBlocks,
    RecomputeCosts,
)
from shardwright.core.search.recompute.levels import RecomputeLevels
from shardwright.core.search.recompute.search import RecomputeSearch, max_peak_ratio


@dataclass(frozen=True)
class QueuedCandidate:
    """A candidate that may need recomputation to fit, with the memory bounds computed so far.

    Args:
        attempt: attempt whose search returned the candidate.
        min_memory: lower bound on memory of each stage with any recomputation, in bytes per device.
        is_aligned: whether the candidate is aligned (`Candidate.aligned`).
        must_recompute: whether an estimate or a dry run showed that the candidate does not fit
            without recomputation.
        recompute_search: search for the least recomputation that fits; None before it has begun.
        trust_estimate: whether an estimate may replace the dry run with all blocks recomputed.
        fits: whether dry runs showed that the candidate fits.
        block_depth: the only depth of the module tree at which blocks are recomputed; None for all
            depths. Set only in dropped entries whose estimate exceeded the limit.
        pending_bound: bound whose simulated pipeline is tighter than that with which the candidate
            was queued; None once it was simulated.
        min_recomputed_memory: lower bound on memory with all blocks at `block_depth` recomputed, in
            bytes per device.
    """

    attempt: Attempt
    candidate: Candidate
    min_memory: Sequence[int]
    is_aligned: bool = False
    must_recompute: bool = False
    recompute_search: RecomputeSearch | None = None
    trust_estimate: bool = True
    fits: bool = False
    block_depth: int | None = None
    pending_bound: CandidateBound | None = None
    min_recomputed_memory: int = 0

    @property
    def lower_bound(self) -> int:
        """Lower bound on the memory of the largest stage, in bytes per device."""
        return max(self.min_recomputed_memory, *self.min_memory)


@dataclass
class RecomputeCache:
    """Recomputation levels shared by candidates, and ratios of measured to estimated memory.

    Args:
        levels_by_cuts: recomputation levels, by device matrix, cuts, numbers of micro-batches and
            stages, and schedule.
        blocks_by_cuts: blocks that may be recomputed, by device matrix, cuts and number of
            micro-batches.
        depths_by_chunks: groups of depths of the module tree (`RecomputeBlocks.depths`), by numbers
            of micro-batches and chunks.
        measured_ratios: largest ratio of measured to estimated peak memory with full recomputation
            so far, by numbers of micro-batches and stages, schedule and ZeRO level.
        fitted_ratios: smallest ratio so far with the least recomputation that fits
            (`RecomputeSearch.measured_peak_ratio`), by the same key.
    """

    levels_by_cuts: dict[object, RecomputeLevels] = field(default_factory=dict)
    blocks_by_cuts: dict[object, RecomputeBlocks] = field(default_factory=dict)
    depths_by_chunks: dict[tuple[int, int], Sequence[Sequence[int]]] = field(default_factory=dict)
    measured_ratios: dict[object, float] = field(default_factory=dict)
    fitted_ratios: dict[object, float] = field(default_factory=dict)

    def blocks(self, candidate: Candidate) -> RecomputeBlocks:
        """Return the blocks of a candidate that may be recomputed, for any division into stages."""
        key = candidate.mesh, candidate.cuts, candidate.pipeline.micro_batches
        if key not in self.blocks_by_cuts:
            options, graph, costs = candidate.options, candidate.model.graph, DEFAULT_COSTS
            if options.cluster is not None:
                # The rate of matrix products depends on the dtype.
                dtype = graph.compute_dtype or torch.float32
                costs = RecomputeCosts.of_cluster(options.resolved_cluster, dtype)
            self.blocks_by_cuts[key] = RecomputeBlocks(
                graph, candidate.mesh, candidate.decisions, costs
            )
        return self.blocks_by_cuts[key]

    def recompute_levels(self, candidate: Candidate) -> RecomputeLevels:
        """Return the recomputation levels of a candidate, which do not depend on the ZeRO level."""
        pipeline = candidate.pipeline
        key = candidate.mesh, candidate.cuts, _make_pipeline_key(candidate)
        if key not in self.levels_by_cuts:
            chunks_key = pipeline.micro_batches, pipeline.num_chunks
            # All cuts with as many chunks share depths, as each depth takes an estimate to find.
            recompute_levels = RecomputeLevels(
                self.blocks(candidate), pipeline, self.depths_by_chunks.get(chunks_key)
            )
            self.depths_by_chunks[chunks_key] = recompute_levels.depths
            self.levels_by_cuts[key] = recompute_levels
        return self.levels_by_cuts[key]

    def search(self, queued: QueuedCandidate, depth: int, limit: int) -> RecomputeSearch:
        """Return a search for the least recomputation with which a candidate fits.

        Args:
            depth: depth of the module tree at which modules are recomputed as blocks.
            limit: memory limit in bytes per device.
        """
        candidate, ratio_key = queued.candidate, _make_ratio_key(queued.candidate)
        ratio = self.measured_ratios.get(ratio_key)
        stages = self.recompute_levels(candidate).at_depth(depth)
        recompute_search = RecomputeSearch(
            stages,
            candidate.decisions,
            candidate.memory,
            limit,
            queued.min_memory,
            max_peak_ratio(ratio) if queued.trust_estimate else None,
        )
        # The largest ratio so far: with a smaller ratio, estimates could accept plans that do not
        # fit.
        if not recompute_search.estimate_fits:
            self.measured_ratios[ratio_key] = max(ratio or 0.0, recompute_search.measured_ratio)
        return recompute_search

    def expects_more_recompute(self, candidate: Candidate, search: RecomputeSearch) -> bool:
        """Whether searches of similar plans have found estimates to be too low since `search` was
        made; if so, `search.peak_ratio` is raised."""
        ratio = self.fitted_ratios.get(_make_ratio_key(candidate), 0.0)
        if ratio <= search.peak_ratio:
            return False
        search.peak_ratio = ratio
        return True

    def record_fitted(self, candidate: Candidate, search: RecomputeSearch) -> None:
        """Record how far estimates were from what `search` has measured."""
        if search.measured_peak_ratio is not None:
            key = _make_ratio_key(candidate)
            smallest = self.fitted_ratios.get(key, search.measured_peak_ratio)
            self.fitted_ratios[key] = min(smallest, search.measured_peak_ratio)


def memory_and_time_key(candidate: Candidate, attempt: Attempt) -> object:
    """Return a hashable key that is equal for candidates with equal memory and equal step time."""
    decisions = candidate.decisions
    # A ZeRO level that shards no parameter, as on one device, makes no difference.
    level = decisions.sharding if candidate.shards_storage else None
    # The level and the cuts decide the storage.
    # An attempt that may recompute can fit where an equal candidate of another attempt does not.
    return level, candidate.cuts, _make_pipeline_key(candidate), attempt.recompute


def _make_pipeline_key(candidate: Candidate) -> object:
    pipeline = candidate.pipeline
    return pipeline.micro_batches, pipeline.stages, pipeline.schedule


def _make_ratio_key(candidate: Candidate) -> object:
    """Return the key of plans whose memory estimates are taken to err alike, whatever the cuts."""
    sharding = candidate.decisions.sharding
    return _make_pipeline_key(candidate), None if sharding is None else sharding.level
