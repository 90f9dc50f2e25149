"""Two axes change places for some of the operators: for those that gain by it together.

Queries, keys, values and all between them and attention may be cut along the sequence over one axis
and into heads over another, or the other way around. Neither an axis decided again nor a single
operator leads from one to the other: half of the change costs more than it saves. So each operator
gets two choices, to stay or to swap two axes, and the best combination is found by elimination. Its
tables begin with what redistributions take at least; only those of a combination that promises a
gain are looked for, until none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np

from shardwright.core.layout.axes import Axes
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.axis_tables import Weights
from shardwright.core.search.by_time.elimination import Elimination, Table, TooWideError
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost, Total
from shardwright.core.search.by_time.problem import TensorEdge
from shardwright.core.search.cut_moves import axes_of_factors, factor_of_axis
from shardwright.progress import OnShare, track

GAIN = 5e-4
"""Relative; less is none."""

MIN_COMMUNICATION_SHARE = 0.01
"""Axes are swapped where redistributions take at least this share of the step."""

MOST_ENDS = 4
"""Of the operators that make and read a value; where more of them may swap, that costs nothing
until a combination is priced."""

MOST_TRIES = 6
"""Combinations that are priced for two axes."""


def swap_axes(
    objective: Objective, cuts: list[Cuts], total: Total, weights: Weights, on_share: OnShare
) -> bool:
    """Changes `cuts` where operators gain by swapping two axes; whether they did.

    Args:
        total: what counts.
        weights: likewise, of each cost by itself.
        on_share: of the pairs of axes.
    """
    whole, gained = objective.cost(cuts), False
    most = weights.redistributions * whole.redistributions
    if most < MIN_COMMUNICATION_SHARE * total(whole):
        return False
    tried: set[object] = set()
    for first, second in track(list(_pairs(objective)), on_share):
        pair = _uses(objective, cuts, (first, second))
        if pair in tried:
            continue
        tried.add(pair)
        swap = _Swap(objective, cuts, _swapped(objective, cuts, first, second), whole, weights)
        found = swap.best(total, total(whole) * (1 - GAIN))
        if found is not None:
            cuts[:], whole = found
            gained, tried = True, set()
    return gained


def _pairs(objective: Objective) -> Iterator[tuple[int, int]]:
    sizes = objective.model.mesh.device_matrix
    for first, second in combinations(range(len(sizes)), 2):
        if sizes[first] == sizes[second] > 1:
            yield first, second


def _uses(objective: Objective, cuts: Sequence[Cuts], axes: Axes) -> object:
    """Of axes their links and the factor of each operator that they cut: of axes that are alike in
    all things it is enough to try one."""
    factors = [factor_of_axis(cut) for cut in cuts]
    links = objective.model.links.levels
    return tuple((links[axis], tuple(each.get(axis) for each in factors)) for axis in axes)


def _swapped(objective: Objective, cuts: Sequence[Cuts], first: int, second: int) -> list[Cuts]:
    """The cuts with two axes of one size in each other's place, but for pinned operators."""
    places = {first: second, second: first}
    swapped = []
    for variable, cut in zip(objective.problem.variables, cuts, strict=True):
        factors = {places.get(axis, axis): f for axis, f in factor_of_axis(cut).items()}
        swapped.append(cut if variable.pinned is not None else axes_of_factors(factors))
    return swapped


class _Swap:
    """The choice of each operator whose cuts differ: to stay, or to be cut otherwise.

    Args:
        whole: the cost of `cuts`.
    """

    def __init__(
        self,
        objective: Objective,
        cuts: Sequence[Cuts],
        others: Sequence[Cuts],
        whole: ObjectiveCost,
        weights: Weights,
    ) -> None:
        self.objective, self.ways, self.weights = objective, (cuts, others), weights
        both = zip(cuts, others, strict=True)
        self.changed = [number for number, (one, other) in enumerate(both) if one != other]
        self._mixed = list(cuts)
        changes = {*self.changed}
        self._ends = {
            edge: sorted({end.variable for end in edge.ends()} & changes)
            for edge in objective.problem.edges
            if any(end.variable in changes for end in edge.ends())
        }
        for number in self.changed:
            whole = self._plus_operator(whole, number, -1)
        for edge in self._ends:
            whole = whole.plus(objective.edge(edge, cuts), -edge.count)
        self._rest = whole

    def best(self, total: Total, bound: float) -> tuple[list[Cuts], ObjectiveCost] | None:
        """The cuts of the best combination and their cost; None if none is found below `bound`."""
        tabled = {edge: ends for edge, ends in self._ends.items() if len(ends) <= MOST_ENDS}
        if not self.changed:
            return None
        own = [self._alone(number) for number in self.changed]
        known = [self._table(edge, ends) for edge, ends in tabled.items()]
        place = {number: index for index, number in enumerate(self.changed)}
        scopes: list[tuple[int, ...]] = [(index,) for index in range(len(own))]
        scopes += [tuple(place[number] for number in ends) for ends in tabled.values()]
        tables = [*own, *known]
        staying = sum(float(table.flat[0]) for table in tables)
        try:
            elimination = Elimination([2] * len(own), scopes)
        except TooWideError:
            return None
        for _ in range(MOST_TRIES):
            found = elimination.minimum(tables)
            if found.cost >= staying - GAIN * bound:
                return None
            before = self.objective.priced
            self._choose(self.changed, found.choices)
            cost = self._cost(total, bound)
            if cost is not None:
                return list(self._mixed), cost
            if self.objective.priced == before:
                return None
            for (edge, ends), table in zip(tabled.items(), known, strict=True):
                table[tuple(found.choices[place[number]] for number in ends)] = self._least(edge)
        return None

    def _choose(self, numbers: Sequence[int], choices: Sequence[int]) -> None:
        for number, choice in zip(numbers, choices, strict=True):
            self._mixed[number] = self.ways[choice][number]

    def _cost(self, total: Total, bound: float) -> ObjectiveCost | None:
        """Of the chosen combination; None if its total is not below `bound`."""
        cost = self._rest
        for number in self.changed:
            cost = self._plus_operator(cost, number, 1)
        return self.objective.added(cost, self._ends, self._mixed, total, bound)

    def _plus_operator(self, cost: ObjectiveCost, number: int, sign: int) -> ObjectiveCost:
        variable = self.objective.problem.variables[number]
        own = self.objective.operator(variable, self._mixed[number])
        return cost.plus(own, sign * variable.count)

    def _alone(self, number: int) -> Table:
        variable = self.objective.problem.variables[number]
        costs = [self.objective.operator(variable, way[number]) for way in self.ways]
        return variable.count * np.array([self.weights.of(cost) for cost in costs])

    def _table(self, edge: TensorEdge, ends: Sequence[int]) -> Table:
        """What a value costs at least for each combination of its ends."""
        table = np.zeros((2,) * len(ends))
        for choices in product((0, 1), repeat=len(ends)):
            self._choose(ends, choices)
            table[choices] = self._least(edge)
        self._choose(ends, (0,) * len(ends))
        return table

    def _least(self, edge: TensorEdge) -> float:
        cost, _ = self.objective.at_least(edge, self._mixed)
        return edge.count * self.weights.of(cost)
