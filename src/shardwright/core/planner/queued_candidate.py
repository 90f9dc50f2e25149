"""Candidates in the queue of the memory search, and what they can recompute in order to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.core.planner.attempts import Attempt
from shardwright.core.planner.candidate import Candidate
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.recompute.candidates import DEFAULT_PRICES, RecomputePrices
from shardwright.core.search.recompute.fit import RecomputeFit, RecomputeLadders, surely


@dataclass(frozen=True)
class QueuedCandidate:
    """A candidate that may have to recompute in order to fit, and what is known of its memory.

    Args:
        min_memory: lower bound per stage, in bytes per device, whatever is recomputed.
        must_recompute: whether it does not fit as it is, by an estimate or a dry run.
        fit: search for the least recomputation that fits; None before it has begun.
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
    fit: RecomputeFit | None = None
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
        ladders_by_cuts: recomputation options, by cuts and stages.
        depths_by_chunks: depths in the module tree of the blocks that compete, by number of chunks.
        measured_excess: largest ratio of measured to estimated memory, by stages, schedule and
            sharding level.
    """

    ladders_by_cuts: dict[object, RecomputeLadders] = field(default_factory=dict)
    depths_by_chunks: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    measured_excess: dict[object, float] = field(default_factory=dict)

    def ladders(self, candidate: Candidate) -> RecomputeLadders:
        """Recomputation options of a candidate; they do not depend on the sharding level."""
        graph, pipeline, cuts = candidate.model.graph, candidate.pipeline, candidate.decisions.cuts
        key = candidate.mesh, _hashable(cuts), pipeline.stages, pipeline.schedule
        if key not in self.ladders_by_cuts:
            options, prices = candidate.options, DEFAULT_PRICES
            if options.cluster is not None:
                dtype = graph.compute_dtype or torch.float32
                prices = RecomputePrices.on(options.resolved_cluster, dtype)
            parts = graph, candidate.mesh, candidate.decisions, pipeline
            ladders = RecomputeLadders(
                *parts, prices, self.depths_by_chunks.get(pipeline.num_chunks)
            )
            self.depths_by_chunks[pipeline.num_chunks] = ladders.depths
            self.ladders_by_cuts[key] = ladders
        return self.ladders_by_cuts[key]

    def fit(self, queued: QueuedCandidate, depth: int, limit: int) -> RecomputeFit:
        """Begins the search for the least recomputation that fits into `limit` bytes, of blocks at
        a depth in the module tree."""
        candidate = queued.candidate
        pipeline, sharding = candidate.pipeline, candidate.decisions.sharding
        level = None if sharding is None else sharding.level
        excess_key = pipeline.stages, pipeline.schedule, level
        excess = self.measured_excess.get(excess_key)
        stages = self.ladders(candidate).at(depth)
        parts = candidate.decisions, candidate.memory, limit, queued.min_memory
        fit = RecomputeFit(stages, *parts, surely(excess) if queued.trust_estimate else None)
        if not fit.is_sure:
            self.measured_excess[excess_key] = max(excess or 0.0, fit.excess)
        return fit


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
