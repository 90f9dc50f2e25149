"""Swap two mesh axes for the best subset of operators.

Queries, keys, values and the operators between them and attention may be cut along the sequence
over one axis and along heads over another, or vice versa. Neither deciding one axis again nor
changing one operator leads from one to the other, since half of the change costs more than it
saves. So each operator gets two choices, to keep its cuts or to swap two axes in them, and variable
elimination finds the best combination.

Its tables start with lower bounds of redistributions. The best combination is priced exactly and
its prices replace the bounds, until no combination promises a gain.
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
from shardwright.core.search.nearby_cuts import axes_of_factors, factor_of_axis
from shardwright.progress import OnShare, track

GAIN = 5e-4
"""Relative decrease of the total below which swaps are not applied."""

MIN_COMMUNICATION_SHARE = 0.01
"""No axes are swapped if redistributions take less of the step."""

MAX_OPS_PER_TABLE = 4
"""A value whose source and readers are more operators that may swap gets no table, as it would have
2 to that number of entries. It is free until a combination is priced."""

MAX_PRICED_COMBINATIONS = 6
"""The number of combinations that are priced for one pair of axes."""


def swap_axes(
    objective: Objective, cuts: list[Cuts], total: Total, weights: Weights, on_share: OnShare
) -> bool:
    """Change `cuts` in place where swapping two axes for some operators decreases the total.

    Args:
        total: the number to minimize.
        weights: a linear approximation of `total`, for the tables of the elimination.
        on_share: called with the share of the pairs of axes.

    Returns:
        Whether `cuts` changed.
    """
    total_cost, improved = objective.cost(cuts), False
    redistribution_cost = weights.redistributions * total_cost.redistributions
    if redistribution_cost < MIN_COMMUNICATION_SHARE * total(total_cost):
        return False
    priced_pairs: set[object] = set()
    for first, second in track(list(_equal_size_pairs(objective)), on_share):
        properties = _pair_properties(objective, cuts, (first, second))
        if properties in priced_pairs:
            continue
        # Pairs with equal links and equal uses give equal results, as the many axes of large meshes
        # do.
        priced_pairs.add(properties)
        swap = _Swap(
            objective, cuts, _with_axes_swapped(objective, cuts, first, second), total_cost, weights
        )
        improved_cuts = swap.best(total, total(total_cost) * (1 - GAIN))
        if improved_cuts is not None:
            cuts[:], total_cost = improved_cuts
            # Other cuts, other prices: pairs that brought nothing before may bring something now.
            improved, priced_pairs = True, set()
    return improved


def _equal_size_pairs(objective: Objective) -> Iterator[tuple[int, int]]:
    sizes = objective.model.mesh.device_matrix
    for first, second in combinations(range(len(sizes)), 2):
        if sizes[first] == sizes[second] > 1:
            yield first, second


def _pair_properties(objective: Objective, cuts: Sequence[Cuts], axes: Axes) -> object:
    """For each axis its links and the factors it cuts; of pairs that agree only one is tried."""
    factors_of_ops = [factor_of_axis(cut) for cut in cuts]
    links = objective.model.links.levels
    return tuple(
        (links[axis], tuple(op_factors.get(axis) for op_factors in factors_of_ops)) for axis in axes
    )


def _with_axes_swapped(
    objective: Objective, cuts: Sequence[Cuts], first: int, second: int
) -> list[Cuts]:
    """The cuts with two axes swapped in all operators that are not pinned."""
    swapped_axis = {first: second, second: first}
    swapped = []
    for variable, cut in zip(objective.problem.variables, cuts, strict=True):
        factors = {swapped_axis.get(axis, axis): f for axis, f in factor_of_axis(cut).items()}
        swapped.append(cut if variable.pinned is not None else axes_of_factors(factors))
    return swapped


class _Swap:
    """The choice of each operator between its cuts (0) and those with two axes swapped (1).

    Args:
        swapped_cuts: the cuts with the axes swapped in all operators.
        total_cost: the cost of `cuts`.

    Attributes:
        changed: the variables whose cuts differ.
    """

    def __init__(
        self,
        objective: Objective,
        cuts: Sequence[Cuts],
        swapped_cuts: Sequence[Cuts],
        total_cost: ObjectiveCost,
        weights: Weights,
    ) -> None:
        self.objective, self.cuts_of_choice, self.weights = objective, (cuts, swapped_cuts), weights
        pairs = zip(cuts, swapped_cuts, strict=True)
        self.changed = [
            number for number, (current, swapped) in enumerate(pairs) if current != swapped
        ]
        self._cuts = list(cuts)
        changed = {*self.changed}
        self._ops_of_edge = {
            edge: sorted({end.variable for end in edge.ends()} & changed)
            for edge in objective.problem.edges
            if any(end.variable in changed for end in edge.ends())
        }
        for number in self.changed:
            total_cost = self._plus_operator(total_cost, number, -1)
        for edge in self._ops_of_edge:
            total_cost = total_cost.plus(objective.edge(edge, cuts), -edge.count)
        self._unchanged_cost = total_cost

    def best(self, total: Total, bound: float) -> tuple[list[Cuts], ObjectiveCost] | None:
        """Return the cuts of the best combination and their cost; None if not below `bound`."""
        tabulated = {
            edge: ops for edge, ops in self._ops_of_edge.items() if len(ops) <= MAX_OPS_PER_TABLE
        }
        if not self.changed:
            return None
        op_tables = [self._op_table(number) for number in self.changed]
        edge_tables = [self._edge_table(edge, ops) for edge, ops in tabulated.items()]
        variable_of_op = {number: index for index, number in enumerate(self.changed)}
        scopes: list[tuple[int, ...]] = [(index,) for index in range(len(op_tables))]
        scopes += [tuple(variable_of_op[number] for number in ops) for ops in tabulated.values()]
        tables = [*op_tables, *edge_tables]
        cost_without_swap = sum(float(table.flat[0]) for table in tables)
        try:
            elimination = Elimination([2] * len(op_tables), scopes)
        except TooWideError:
            return None
        for _ in range(MAX_PRICED_COMBINATIONS):
            least = elimination.minimum(tables)
            # The tables are lower bounds, so that no combination is cheaper than this promises.
            if least.cost >= cost_without_swap - GAIN * bound:
                return None
            priced_before = self.objective.num_priced
            self._set_choices(self.changed, least.choices)
            cost = self._cost(total, bound)
            if cost is not None:
                return list(self._cuts), cost
            # All edges were cached, so their entries are exact already and would not change.
            if self.objective.num_priced == priced_before:
                return None
            for (edge, ops), table in zip(tabulated.items(), edge_tables, strict=True):
                table[tuple(least.choices[variable_of_op[number]] for number in ops)] = (
                    self._lower_bound(edge)
                )
        return None

    def _set_choices(self, numbers: Sequence[int], choices: Sequence[int]) -> None:
        for number, choice in zip(numbers, choices, strict=True):
            self._cuts[number] = self.cuts_of_choice[choice][number]

    def _cost(self, total: Total, bound: float) -> ObjectiveCost | None:
        """The cost of the current combination; None if its total is not below `bound`."""
        cost = self._unchanged_cost
        for number in self.changed:
            cost = self._plus_operator(cost, number, 1)
        return self.objective.add_edges(cost, self._ops_of_edge, self._cuts, total, bound)

    def _plus_operator(self, cost: ObjectiveCost, number: int, sign: int) -> ObjectiveCost:
        variable = self.objective.problem.variables[number]
        own = self.objective.operator(variable, self._cuts[number])
        return cost.plus(own, sign * variable.count)

    def _op_table(self, number: int) -> Table:
        variable = self.objective.problem.variables[number]
        costs = [self.objective.operator(variable, cuts[number]) for cuts in self.cuts_of_choice]
        return variable.count * np.array([self.weights.of(cost) for cost in costs])

    def _edge_table(self, edge: TensorEdge, ops: Sequence[int]) -> Table:
        """The lower bound of an edge for each combination of choices of its operators."""
        table = np.zeros((2,) * len(ops))
        for choices in product((0, 1), repeat=len(ops)):
            self._set_choices(ops, choices)
            table[choices] = self._lower_bound(edge)
        self._set_choices(ops, (0,) * len(ops))
        return table

    def _lower_bound(self, edge: TensorEdge) -> float:
        cost, _ = self.objective.lower_bound(edge, self._cuts)
        return edge.count * self.weights.of(cost)
