"""The fastest plan of each kind that a search finds, and why other kinds have none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwright.core.plan.ranked import LeftOut, PlanKind, RankedPlans
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.options import PlanOptions
from shardwright.errors import StrategyError


def kind_of(candidate: Candidate) -> PlanKind:
    """Kind of a candidate's plan. Its sharding level is empty where every parameter is stored as
    it is used, whatever level was requested."""
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
    """Kind of plan that options with a fixed number of stages request."""
    assert isinstance(options.stages, int)
    schedule = options.schedule if options.stages > 1 else ""
    level = "" if options.sharding is None else options.sharding.level
    return PlanKind(options.num_micro_batches, options.stages, schedule, level)


@dataclass
class Ranking:
    """Results of the searches for one number of micro-batches after another.

    Args:
        top: number of kinds to return plans of.
        found: fastest candidate of each kind.
        left_out: reason why a kind has no plan.
    """

    top: int
    found: dict[PlanKind, Candidate] = field(default_factory=dict)
    left_out: dict[PlanKind, LeftOut] = field(default_factory=dict)

    def add(self, candidate: Candidate) -> None:
        """Record a candidate unless its kind has one."""
        # The search yields candidates in ascending order of step time.
        self.found.setdefault(kind_of(candidate), candidate)

    def wants(self, kinds: Iterable[PlanKind]) -> bool:
        """Whether a kind without a plan is among `kinds` and fewer than `top` have been found.

        Args:
            kinds: with the same number of micro-batches.
        """
        # A kind may be found with recomputation where only that without was queued.
        open_kinds = [kind for kind in kinds if not self._has(kind)]
        if not open_kinds:
            return False
        num_micro_batches = open_kinds[0].micro_batches
        return sum(kind.micro_batches == num_micro_batches for kind in self.found) < self.top

    def leave_out(self, kind: PlanKind, reason: LeftOut) -> None:
        """Record why a kind has no plan, unless a smaller reason is recorded: see `LeftOut`."""
        recorded = self.left_out.get(kind)
        if recorded is None or reason < recorded:
            self.left_out[kind] = reason

    def ranked(self) -> RankedPlans:
        """The `top` fastest plans, and why each other kind is not among them."""
        order = sorted(
            self.found.items(), key=lambda entry: (entry[1].seconds, entry[0].micro_batches)
        )
        left_out = {kind: reason for kind, reason in self.left_out.items() if not self._has(kind)}
        # Found, but slower than `top` others.
        left_out |= {
            kind: LeftOut.slower(candidate.seconds) for kind, candidate in order[self.top :]
        }
        plans = {kind: candidate.plan() for kind, candidate in order[: self.top]}
        return RankedPlans(plans, left_out)

    def _has(self, kind: PlanKind) -> bool:
        """Whether the kind has a candidate, with or without recomputation."""
        return any(found.requested == kind.requested for found in self.found)


def options_to_rank(options: PlanOptions) -> PlanOptions:
    """Options for ranking: the memory limit defaults to the memory of the cluster's devices, and
    all values of `mem_coeff="auto"` compete, while `plan` takes the smallest one that fits.

    Raises:
        StrategyError: without a cluster.
    """
    if options.cluster is None:
        raise StrategyError(
            "plans are ranked by predicted step time, which needs a cluster\n"
            "name a cluster, for example cluster='local' for this machine"
        )
    coefficient = options.mem_coeffs[0] if options.has_auto_mem_coeff else options.mem_coeff
    limit = options.device_memory if options.memory_limit is None else options.memory_limit
    return replace(options, memory_limit=limit, mem_coeff=coefficient)
