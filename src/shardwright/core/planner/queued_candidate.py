"""Candidates in the queue of the memory search, and what they can recompute in order to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.core.planner.attempts import Attempt
from shardwright.core.planner.candidate import Candidate
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.recompute.blocks import DEFAULT_PRICES, RecomputePrices
from shardwright.core.search.recompute.levels import RecomputeLevels
from shardwright.core.search.recompute.search import RecomputeSearch, max_peak_ratio


@dataclass(frozen=True)
class QueuedCandidate:
    """A candidate that may have to recompute in order to fit, and what is known of its memory.

    Args:
        min_memory: lower bound per stage, in bytes per device, whatever is recomputed.
        must_recompute: whether it does not fit as it is, by an estimate or a dry run.
        recompute_search: search for the least recomputation that fits; None before it has begun.
        trust_estimate: whether an estimate may replace the dry run with all recomputed.
        fits: whether `candidate` recomputes enough, as dry runs have shown.
        block_depth: depth in the module tree whose blocks do not free enough; None if that is not
            known of any.
        min_recomputed_memory: lower bound with all blocks at `block_depth` recomputed, in bytes per
            device.
    """

    attempt: Attempt
    candidate: Candidate
    min_memory: Sequence[int]
    must_recompute: bool = False
    recompute_search: RecomputeSearch | None = None
    trust_estimate: bool = True
    fits: bool = False
    block_depth: int | None = None
    min_recomputed_memory: int = 0

    @property
    def lower_bound(self) -> int:
        """Bytes that a device needs at least, on any stage."""
        return max(self.min_recomputed_memory, *self.min_memory)


@dataclass
class RecomputeCache:
    """Recomputation options shared by candidates, and how far dry runs exceeded estimates.

    Args:
        levels_by_cuts: recomputation options, by cuts and stages.
        depths_by_chunks: depths in the module tree of the blocks that compete, by number of chunks.
        measured_ratios: largest ratio of measured to estimated memory, by stages, schedule and
            sharding level.
    """

    levels_by_cuts: dict[object, RecomputeLevels] = field(default_factory=dict)
    depths_by_chunks: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    measured_ratios: dict[object, float] = field(default_factory=dict)

    def recompute_levels(self, candidate: Candidate) -> RecomputeLevels:
        """Recomputation options of a candidate; they do not depend on the sharding level."""
        graph, pipeline, cuts = candidate.model.graph, candidate.pipeline, candidate.decisions.cuts
        key = candidate.mesh, _hashable(cuts), pipeline.stages, pipeline.schedule
        if key not in self.levels_by_cuts:
            options, prices = candidate.options, DEFAULT_PRICES
            if options.cluster is not None:
                dtype = graph.compute_dtype or torch.float32
                prices = RecomputePrices.on(options.resolved_cluster, dtype)
            arguments = graph, candidate.mesh, candidate.decisions, pipeline
            recompute_levels = RecomputeLevels(
                *arguments, prices, self.depths_by_chunks.get(pipeline.num_chunks)
            )
            # Estimated once, as the depths that compete hardly depend on the cuts.
            self.depths_by_chunks[pipeline.num_chunks] = recompute_levels.depths
            self.levels_by_cuts[key] = recompute_levels
        return self.levels_by_cuts[key]

    def search(self, queued: QueuedCandidate, depth: int, limit: int) -> RecomputeSearch:
        """Begin the search for the least recomputation that fits into `limit` bytes, of blocks at
        a depth in the module tree."""
        candidate = queued.candidate
        pipeline, sharding = candidate.pipeline, candidate.decisions.sharding
        level = None if sharding is None else sharding.level
        ratio_key = pipeline.stages, pipeline.schedule, level
        ratio = self.measured_ratios.get(ratio_key)
        stages = self.recompute_levels(candidate).at_depth(depth)
        arguments = candidate.decisions, candidate.memory, limit, queued.min_memory
        recompute_search = RecomputeSearch(
            stages, *arguments, max_peak_ratio(ratio) if queued.trust_estimate else None
        )
        if not recompute_search.estimate_fits:
            self.measured_ratios[ratio_key] = max(ratio or 0.0, recompute_search.measured_ratio)
        return recompute_search


def memory_and_time_key(candidate: Candidate, attempt: Attempt) -> object:
    """Hashable key that is equal for candidates with equal memory and step time."""
    decisions = candidate.decisions
    # A sharding level that shards nothing, as on one device, makes no difference.
    level = decisions.sharding if candidate.shards_storage else None
    storage = tuple(sorted(decisions.storage.items())), level
    pipeline = candidate.pipeline.stages, candidate.pipeline.schedule
    return storage, _hashable(decisions.cuts), pipeline, attempt.recompute


def _hashable(cuts: Mapping[str, Cuts]) -> object:
    return tuple((name, tuple(cut.items())) for name, cut in cuts.items())
