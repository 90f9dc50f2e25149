"""Candidates on their way to a plan that fits, and what they can recompute for that."""

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
class Draft:
    """A candidate that may have to recompute in order to fit.

    Args:
        needed: bytes of a device of each stage, at least, whatever is recomputed.
        recomputes: whether it has to, by an estimate or because that was measured.
        fit: what finds out how much; None as long as that is only estimated.
        sure: whether an estimate is enough to say that it can fit.
        fits: whether it is known how much.
        depth: of the module tree, at which its blocks cannot be enough, by an estimate or because
            that was measured.
        least: bytes that a device needs then, at least.
    """

    attempt: Attempt
    candidate: Candidate
    needed: Sequence[int]
    recomputes: bool = False
    fit: RecomputeFit | None = None
    sure: bool = True
    fits: bool = False
    depth: int | None = None
    least: int = 0

    @property
    def floor(self) -> int:
        """Bytes that a device needs at least."""
        return max(self.least, *self.needed)


@dataclass
class KnownRecomputation:
    """What drafts can recompute, and what was learned of those that were measured.

    Args:
        found: what candidates can recompute, by their cuts and stages.
        depths: of the module tree, at which that is, by the number of chunks.
        excess: by stages, schedule and level how many times its estimate a stage has needed most.
    """

    found: dict[object, RecomputeLadders] = field(default_factory=dict)
    depths: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    excess: dict[object, float] = field(default_factory=dict)

    def ladders(self, candidate: Candidate) -> RecomputeLadders:
        """What a candidate can recompute, which is estimated for all levels of sharding at once."""
        graph, pipeline, cuts = candidate.model.graph, candidate.pipeline, candidate.decisions.cuts
        key = candidate.mesh, _hashable(cuts), pipeline.stages, pipeline.schedule
        if key not in self.found:
            options, prices = candidate.options, DEFAULT_PRICES
            if options.cluster is not None:
                dtype = graph.compute_dtype or torch.float32
                prices = RecomputePrices.on(options.known_cluster, dtype)
            parts = graph, candidate.mesh, candidate.decisions, pipeline
            ladders = RecomputeLadders(*parts, prices, self.depths.get(pipeline.num_chunks))
            self.depths[pipeline.num_chunks] = ladders.depths
            self.found[key] = ladders
        return self.found[key]

    def fit(self, draft: Draft, depth: int, limit: int) -> RecomputeFit:
        """What finds out how much is recomputed of blocks at a depth of the module tree."""
        candidate = draft.candidate
        pipeline, sharding = candidate.pipeline, candidate.decisions.sharding
        level = None if sharding is None else sharding.level
        kind = pipeline.stages, pipeline.schedule, level
        known = self.excess.get(kind)
        stages = self.ladders(candidate).at(depth)
        parts = candidate.decisions, candidate.memory, limit, draft.needed
        fit = RecomputeFit(stages, *parts, surely(known) if draft.sure else None)
        if not fit.is_sure:
            self.excess[kind] = max(known or 0.0, fit.excess)
        return fit


def needed_by(candidate: Candidate, attempt: Attempt) -> object:
    """What memory and time depend on; the level only where it shards anything."""
    decisions = candidate.decisions
    level = decisions.sharding if candidate.shards_storage else None
    kept = tuple(sorted(decisions.storage.items())), level
    pipeline = candidate.pipeline.stages, candidate.pipeline.schedule
    return kept, _hashable(decisions.cuts), pipeline, attempt.recompute


def _hashable(cuts: Mapping[str, Cuts]) -> object:
    return tuple((name, tuple(cut.items())) for name, cut in cuts.items())
