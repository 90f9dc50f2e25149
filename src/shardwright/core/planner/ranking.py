"""The fastest plans of different kinds that a search comes by, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwright.core.plan.ranked import LeftOut, PlanKind, RankedPlans
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.options import PlanOptions
from shardwright.errors import StrategyError


def found_kind(candidate: Candidate) -> PlanKind:
    """The level of sharding is none where nothing is stored otherwise than it is used."""
    pipeline, decisions = candidate.pipeline, candidate.decisions
    sharding = decisions.sharding if candidate.shards_storage else None
    return PlanKind(
        pipeline.micro_batches,
        pipeline.stages,
        pipeline.schedule if pipeline.stages > 1 else "",
        "" if sharding is None else sharding.level,
        bool(decisions.recompute),
    )


def requested_kind(options: PlanOptions) -> PlanKind:
    """The kind of the plans that options with a number of stages request."""
    assert isinstance(options.stages, int)
    schedule = options.schedule if options.stages > 1 else ""
    level = "" if options.sharding is None else options.sharding.level
    return PlanKind(options.num_micro_batches, options.stages, schedule, level)


@dataclass
class Ranking:
    """What searches have found, each for a number of micro-batches.

    Args:
        top: of so many kinds the fastest plans are wanted.
    """

    top: int
    found: dict[PlanKind, Candidate] = field(default_factory=dict)
    left_out: dict[PlanKind, LeftOut] = field(default_factory=dict)

    def add(self, candidate: Candidate) -> None:
        """Candidates come in the order of their seconds: of each kind the first stays."""
        self.found.setdefault(found_kind(candidate), candidate)

    def wants(self, kinds: Iterable[PlanKind]) -> bool:
        """Whether one of these kinds, all of one number of micro-batches, may take a place."""
        open_kinds = [kind for kind in kinds if not self._has(kind)]
        if not open_kinds:
            return False
        number = open_kinds[0].micro_batches
        return sum(kind.micro_batches == number for kind in self.found) < self.top

    def leave_out(self, kind: PlanKind, reason: LeftOut) -> None:
        """Of several reasons for one kind, the nearest to a plan that is found is kept."""
        known = self.left_out.get(kind)
        if known is None or reason < known:
            self.left_out[kind] = reason

    def ranked(self) -> RankedPlans:
        """The plans of the kinds that are fastest, and why each other kind is not among them."""
        order = sorted(self.found.items(), key=lambda one: (one[1].seconds, one[0].micro_batches))
        left = {kind: reason for kind, reason in self.left_out.items() if not self._has(kind)}
        left |= {kind: LeftOut.slower(one.seconds) for kind, one in order[self.top :]}
        plans = {kind: candidate.plan() for kind, candidate in order[: self.top]}
        return RankedPlans(plans, left)

    def _has(self, kind: PlanKind) -> bool:
        """Whether a plan of this kind is found, whether it recomputes or not."""
        return any(each.requested == kind.requested for each in self.found)


def options_to_rank(options: PlanOptions) -> PlanOptions:
    """The options with the memory of the cluster's devices as limit, if there is no other. All of
    `mem_coeff="auto"` compete, where `plan` takes the smallest that fits unchanged.

    Raises:
        StrategyError: without a cluster.
    """
    if options.cluster is None:
        raise StrategyError(
            "plans are ranked by the seconds of a step: name a cluster, `local` is this machine"
        )
    coefficient = options.mem_coeffs[0] if options.has_auto_mem_coeff else options.mem_coeff
    limit = options.device_memory if options.memory_limit is None else options.memory_limit
    return replace(options, memory_limit=limit, mem_coeff=coefficient)
