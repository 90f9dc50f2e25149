"""Improve the cuts of single operators over all axes, with all others fixed.

Deciding axis by axis cannot move an operator to cuts that differ on two axes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from shardwright.core.layout.layout import TensorLayout
from shardwright.core.rules.rule import Cuts, Dims
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost, Total
from shardwright.core.search.by_time.problem import EdgeEnd, OpVariable, TensorEdge
from shardwright.core.search.nearby_cuts import (
    NearbyCuts,
    SharedTensor,
    axes_of_factors,
    factor_of_axis,
    group_equal_axes,
)
from shardwright.progress import OnShare, ignore_share

MAX_NEW_PRICES = 250
"""The number of redistributions between new pairs of layouts that may be searched for: that takes
nearly all of a sweep's time."""

MIN_COMMUNICATION_SHARE = 1e-4
"""Operators are skipped if redistributions at their inputs and outputs take less of the step."""


def local_search(
    objective: Objective,
    cuts: list[Cuts],
    total: Total,
    rounds: int,
    gain: float,
    on_share: OnShare = ignore_share,
) -> None:
    """Change `cuts` in place, operator by operator, as long as the total decreases.

    Args:
        total: the number to minimize.
        rounds: how often all operators are visited at most.
        gain: relative decrease below which a change is rejected.
        on_share: called with the share of the visits or of `MAX_NEW_PRICES`, whichever is larger.
    """
    edges = objective.problem.edges_around()
    neighborhoods = [
        _Neighborhood(objective, number, variable, edges[number])
        for number, variable in enumerate(objective.problem.variables)
        if variable.pinned is None and variable.op_type.factors
    ]
    total_cost = objective.cost(cuts)
    best_total = total(total_cost)
    # Counted from here: prices of earlier steps are cached, and cost nothing more.
    max_priced = objective.num_priced + MAX_NEW_PRICES
    for round_number in range(rounds):
        before = best_total
        # The largest possible gain first, since `MAX_NEW_PRICES` may end the round. That is also
        # the block that stands for most repeated ones.
        order = sorted(neighborhoods, key=lambda each: -each.redistributions(cuts))
        for visited, neighborhood in enumerate(order):
            visit_share = (round_number + visited / len(order)) / rounds
            price_share = min(1.0, 1 - (max_priced - objective.num_priced) / MAX_NEW_PRICES)
            on_share(max(visit_share, price_share))
            if neighborhood.redistributions(cuts) <= MIN_COMMUNICATION_SHARE * best_total:
                continue
            if objective.num_priced > max_priced:
                return
            number = neighborhood.number
            base = total_cost.plus(neighborhood.cost(cuts), -1)
            # A list, since `cuts` changes in the loop.
            for changed_cuts in list(neighborhood.nearby_cuts(cuts)):
                previous, cuts[number] = cuts[number], changed_cuts
                new_cost = neighborhood.add_edges(base, cuts, total, best_total * (1 - gain))
                if new_cost is not None:
                    total_cost, best_total = new_cost, total(new_cost)
                else:
                    cuts[number] = previous
        if best_total >= before * (1 - gain):
            return


@dataclass(frozen=True)
class _Neighborhood:
    """One operator with the values that it computes and reads."""

    objective: Objective
    number: int
    variable: OpVariable
    edges: list[TensorEdge]

    def cost(self, cuts: list[Cuts]) -> ObjectiveCost:
        """The cost that depends on the cuts of this operator."""
        cost = self._with_operator(cuts, ObjectiveCost())
        for edge in self.edges:
            cost = cost.plus(self.objective.edge(edge, cuts), edge.count)
        return cost

    def add_edges(
        self, base: ObjectiveCost, cuts: list[Cuts], total: Total, bound: float
    ) -> ObjectiveCost | None:
        """`base` plus `cost(cuts)`, or None if the total is not below `bound`."""
        return self.objective.add_edges(
            self._with_operator(cuts, base), self.edges, cuts, total, bound
        )

    def _with_operator(self, cuts: list[Cuts], base: ObjectiveCost) -> ObjectiveCost:
        """`base` plus the cost of the operator without its edges."""
        op_cost = self.objective.operator(self.variable, cuts[self.number])
        return base.plus(op_cost, self.variable.count)

    def redistributions(self, cuts: list[Cuts]) -> float:
        """Seconds of redistributions at inputs and outputs: an upper bound of the gain."""
        return sum(self.objective.edge(e, cuts).redistributions * e.count for e in self.edges)

    def nearby_cuts(self, cuts: list[Cuts]) -> Iterator[Cuts]:
        """Cuts that match the layout of a neighbor, as far as sizes divide, or change one axis."""
        nearby, current = self._nearby(cuts), factor_of_axis(cuts[self.number])
        seen = [current]
        for factors in chain(
            nearby.matching_neighbors(),
            nearby.with_one_axis_changed(current, self._distinct_axes(cuts)),
        ):
            if factors not in seen:
                seen.append(factors)
                # Factors in the order of their axes, as everywhere in this search: caches are keyed
                # by the items of cuts in order.
                yield axes_of_factors(factor_of_axis(nearby.divisible(factors)))

    def _distinct_axes(self, cuts: list[Cuts]) -> list[int]:
        """One axis, the last, of each group that is equal for this operator and its neighbors."""
        model = self.objective.model
        numbers = {end.variable for edge in self.edges for end in edge.ends()}
        links = dict(enumerate(model.links.levels))
        uses: list[Mapping[int, object]] = [links]
        uses += [factor_of_axis(cuts[number]) for number in sorted(numbers)]
        return sorted(group[-1] for group in group_equal_axes(model.mesh, uses))

    def _nearby(self, cuts: list[Cuts]) -> NearbyCuts:
        """The moves among the layouts of its neighbors."""
        shared = [
            SharedTensor(self._dims(own_end), self._layout(other_end, cuts))
            for edge in self.edges
            for other_end in edge.ends()
            if other_end.variable != self.number
            for own_end in edge.ends()
            if own_end.variable == self.number
        ]
        op_type, rule = self.variable.op_type, self.variable.rule
        limits = dict(zip(op_type.factors, op_type.limits, strict=True))
        joined = rule.joined if rule is not None else {}
        return NearbyCuts(self.objective.model.mesh, limits, shared, joined)

    def _dims(self, end: EdgeEnd) -> Dims:
        rule = self.variable.rule
        assert rule is not None
        return (rule.inputs, rule.outputs)[end.side][end.tensor_index]

    def _layout(self, end: EdgeEnd, cuts: list[Cuts]) -> TensorLayout:
        variable = self.objective.problem.variables[end.variable]
        return self.objective.layouts(variable, cuts[end.variable])[end.side][end.tensor_index]
