"""Single operators decided again over all axes, with everything around them known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from shardwright.core.layout.layout import TensorLayout
from shardwright.core.rules.rule import Cuts, Dims
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost, Total
from shardwright.core.search.by_time.problem import EdgeEnd, OpVariable, TensorEdge
from shardwright.core.search.cut_moves import (
    CutMoves,
    SharedTensor,
    axes_of_factors,
    factor_of_axis,
    group_equal_axes,
)
from shardwright.progress import OnShare, ignore_share

MAX_NEW_PRICES = 250
"""So many values may be priced between layouts that were not met before: finding redistributions
takes nearly all of a sweep's time."""

MIN_COMMUNICATION_SHARE = 1e-4
"""An operator is tried where redistributions around it take at least this share of the step."""


def local_search(
    objective: Objective,
    cuts: list[Cuts],
    total: Total,
    rounds: int,
    gain: float,
    on_share: OnShare = ignore_share,
) -> None:
    """Changes `cuts` of one operator after the other as long as the total becomes less.

    Args:
        total: what counts.
        rounds: at most so many times all operators are visited.
        gain: relative; less is none.
        on_share: of the visits, or of the prices that may be found, of which there is less left.
    """
    edges = objective.problem.edges_around()
    neighborhoods = [
        _Neighborhood(objective, number, variable, edges[number])
        for number, variable in enumerate(objective.problem.variables)
        if variable.pinned is None and variable.op_type.factors
    ]
    whole = objective.cost(cuts)
    best = total(whole)
    most = objective.priced + MAX_NEW_PRICES
    for round_number in range(rounds):
        before = best
        # Those with most to gain first: of blocks that repeat, the one that stands for most.
        order = sorted(neighborhoods, key=lambda one: -one.redistributions(cuts))
        for visited, neighborhood in enumerate(order):
            visits = (round_number + visited / len(order)) / rounds
            prices = min(1.0, 1 - (most - objective.priced) / MAX_NEW_PRICES)
            on_share(max(visits, prices))
            if neighborhood.redistributions(cuts) <= MIN_COMMUNICATION_SHARE * best:
                continue
            if objective.priced > most:
                return
            number = neighborhood.number
            rest = whole.plus(neighborhood.cost(cuts), -1)
            for move in list(neighborhood.changes(cuts)):
                previous, cuts[number] = cuts[number], move
                changed = neighborhood.added(rest, cuts, total, best * (1 - gain))
                if changed is not None:
                    whole, best = changed, total(changed)
                else:
                    cuts[number] = previous
        if best >= before * (1 - gain):
            return


@dataclass(frozen=True)
class _Neighborhood:
    """One operator and the values that it makes and reads."""

    objective: Objective
    number: int
    variable: OpVariable
    edges: list[TensorEdge]

    def cost(self, cuts: list[Cuts]) -> ObjectiveCost:
        """All that depends on the cuts of this operator."""
        cost = self._alone(cuts, ObjectiveCost())
        for edge in self.edges:
            cost = cost.plus(self.objective.edge(edge, cuts), edge.count)
        return cost

    def added(
        self, rest: ObjectiveCost, cuts: list[Cuts], total: Total, bound: float
    ) -> ObjectiveCost | None:
        """`rest` and all that depends on the cuts of this operator; None if not below `bound`."""
        return self.objective.added(self._alone(cuts, rest), self.edges, cuts, total, bound)

    def _alone(self, cuts: list[Cuts], rest: ObjectiveCost) -> ObjectiveCost:
        """`rest` and the cost of the operator without its edges."""
        cost = self.objective.operator(self.variable, cuts[self.number])
        return rest.plus(cost, self.variable.count)

    def redistributions(self, cuts: list[Cuts]) -> float:
        """Seconds of redistributions around the operator: there is no more to gain here."""
        return sum(self.objective.edge(e, cuts).redistributions * e.count for e in self.edges)

    def changes(self, cuts: list[Cuts]) -> Iterator[Cuts]:
        """The cuts of neighbors as far as they can be taken over, and changes of one axis."""
        moves, current = self._moves(cuts), factor_of_axis(cuts[self.number])
        known = [current]
        for move in chain(moves.followed(), moves.changed(current, self._axes(cuts))):
            if move not in known:
                known.append(move)
                # Factors stand in the order of their axes, as in all cuts of this search.
                yield axes_of_factors(factor_of_axis(moves.divisible(move)))

    def _axes(self, cuts: list[Cuts]) -> list[int]:
        """The axes; of those that are alike for this operator and its neighbors the last."""
        model = self.objective.model
        numbers = {end.variable for edge in self.edges for end in edge.ends()}
        links = dict(enumerate(model.links.levels))
        uses: list[Mapping[int, object]] = [links]
        uses += [factor_of_axis(cuts[number]) for number in sorted(numbers)]
        return sorted(group[-1] for group in group_equal_axes(model.mesh, uses))

    def _moves(self, cuts: list[Cuts]) -> CutMoves:
        """The moves among the layouts that the cuts of all others give."""
        shared = [
            SharedTensor(self._dims(own), self._layout(other, cuts))
            for edge in self.edges
            for other in edge.ends()
            if other.variable != self.number
            for own in edge.ends()
            if own.variable == self.number
        ]
        op_type, rule = self.variable.op_type, self.variable.rule
        limits = dict(zip(op_type.factors, op_type.limits, strict=True))
        joined = rule.joined if rule is not None else {}
        return CutMoves(self.objective.model.mesh, limits, shared, joined)

    def _dims(self, end: EdgeEnd) -> Dims:
        rule = self.variable.rule
        assert rule is not None
        return (rule.inputs, rule.outputs)[end.side][end.tensor_index]

    def _layout(self, end: EdgeEnd, cuts: list[Cuts]) -> TensorLayout:
        variable = self.objective.problem.variables[end.variable]
        return self.objective.layouts(variable, cuts[end.variable])[end.side][end.tensor_index]
