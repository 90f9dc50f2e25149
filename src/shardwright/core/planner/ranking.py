"""Rank the fastest plans that a search finds, one for each combination of micro-batches, stages,
schedule, ZeRO level and recomputation (`PlanKind`), with reasons why the others have no plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardwright.core.plan.ranked import LeftOut, PlanKind, RankedPlans
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.captured_model import CapturedModel
from shardwright.core.planner.options import PlanOptions
from shardwright.errors import StrategyError


def kind_of_candidate(candidate: Candidate) -> PlanKind:
    """Return the `PlanKind` of a candidate.

    Its ZeRO level is empty if every parameter is stored in the layout in which operators read it,
    even if the options requested a level.
    """
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
    """Return the `PlanKind` that options with a fixed number of stages request."""
    assert isinstance(options.stages, int)
    schedule = options.schedule if options.stages > 1 else ""
    level = "" if options.sharding is None else options.sharding.level
    return PlanKind(options.num_micro_batches, options.stages, schedule, level)


@dataclass
class Ranking:
    """The fastest candidate of each `PlanKind`, over searches with different numbers of
    micro-batches.

    Args:
        top: number of plans to return.
        fastest: fastest candidate of each kind of plan.
        left_out: reason why a kind of plan has no candidate, by kind.
    """

    top: int
    fastest: dict[PlanKind, Candidate] = field(default_factory=dict)
    left_out: dict[PlanKind, LeftOut] = field(default_factory=dict)

    def add(self, candidate: Candidate) -> None:
        """Record `candidate` unless its kind of plan has a candidate already."""
        # The search yields candidates in ascending order of step time.
        self.fastest.setdefault(kind_of_candidate(candidate), candidate)

    def needs_more(self, plan_kinds: Iterable[PlanKind]) -> bool:
        """Whether a search must continue: some of its `plan_kinds` have no candidate, and there are
        fewer than `top` candidates with its numbers of micro-batches.

        Args:
            plan_kinds: kinds of plans that the search could still return.
        """
        plan_kinds = list(plan_kinds)
        # A candidate may have been found with recomputation although its kind was queued without.
        open_kinds = [plan_kind for plan_kind in plan_kinds if not self._has_candidate(plan_kind)]
        if not open_kinds:
            return False
        # Of the numbers of micro-batches of one search: searches are independent, and the fastest
        # kinds of one may be slower than all kinds of another.
        counts = {each.micro_batches for each in plan_kinds}
        return sum(each.micro_batches in counts for each in self.fastest) < self.top

    def leave_out(self, plan_kind: PlanKind, reason: LeftOut) -> None:
        """Record why a kind of plan has no candidate; the reason that sorts first wins."""
        recorded = self.left_out.get(plan_kind)
        if recorded is None or reason < recorded:
            self.left_out[plan_kind] = reason

    def best(self) -> list[Candidate]:
        """Return the `top` fastest candidates, at most one of each `PlanKind`."""
        return [candidate for _, candidate in self._sorted_candidates()[: self.top]]

    def clear(self) -> None:
        """Remove all recorded candidates, for a search that is repeated."""
        self.fastest.clear()
        self.left_out.clear()

    def replace_models(self, models: Mapping[int, CapturedModel]) -> None:
        """Replace the derived models of candidates by captured ones, with equal graphs.

        Args:
            models: captured models by number of micro-batches.
        """
        for plan_kind, candidate in self.fastest.items():
            model = models.get(plan_kind.micro_batches, candidate.model)
            self.fastest[plan_kind] = replace(candidate, model=model)

    def _sorted_candidates(self) -> list[tuple[PlanKind, Candidate]]:
        # Ties go to the fewest micro-batches, as in a search for one plan.
        return sorted(
            self.fastest.items(), key=lambda entry: (entry[1].seconds, entry[0].micro_batches)
        )

    def ranked(self) -> RankedPlans:
        """Return the `top` fastest plans, and for every other `PlanKind` why it is left out."""
        order = self._sorted_candidates()
        left_out = {
            key: reason for key, reason in self.left_out.items() if not self._has_candidate(key)
        }
        # These kinds have a plan too, but are not among the `top` fastest.
        left_out |= {key: LeftOut.slower(each.seconds) for key, each in order[self.top :]}
        # Candidates have no rows; only those that are returned become plans.
        plans = {plan_kind: candidate.plan() for plan_kind, candidate in order[: self.top]}
        return RankedPlans(plans, left_out)

    def _has_candidate(self, plan_kind: PlanKind) -> bool:
        """Whether a candidate of `plan_kind` was recorded, with or without recomputation."""
        return any(ranked.requested == plan_kind.requested for ranked in self.fastest)


def options_to_rank(options: PlanOptions) -> PlanOptions:
    """Return `options` for a search that ranks plans.

    The memory limit defaults to the device memory of the cluster. All values of `mem_coeff="auto"`
    compete, while `plan` takes the smallest value that fits.

    Raises:
        StrategyError: if there is no cluster.
    """
    if options.cluster is None:
        raise StrategyError(
            "plans are ranked by predicted step time, which needs a cluster\n"
            "name a cluster, for example cluster='local' for this machine"
        )
    # The smallest value: under a limit the search tries larger ones itself.
    coefficient = options.mem_coeffs[0] if options.has_auto_mem_coeff else options.mem_coeff
    limit = options.recorded_limit if options.memory_limit is None else options.memory_limit
    return replace(options, memory_limit=limit, mem_coeff=coefficient)
