"""Swap two mesh axes for the best subset of operators.

Attention and the operators that compute its queries, keys and values may be cut along the sequence
over one axis and along heads over another, or vice versa. Deciding one axis again, or changing one
operator, does not lead from the first to the second, since half of the change costs more than it
saves. So each operator gets two choices: its cuts, or its cuts with the two axes swapped. Variable
elimination finds the best combination.

The tables of the elimination start with lower bounds on the seconds of redistributions. The exact
costs of the best combination then replace its bounds. This repeats until no combination has a lower
bound below the current total.
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

MIN_GAIN = 5e-4
"""Minimum relative decrease of the objective for a swap of axes to be applied."""

MIN_COMMUNICATION_SHARE = 0.01
"""No axes are swapped if redistributions take less than this fraction of the objective."""

MAX_OPS_PER_TABLE = 4
"""Maximum number of operators at one value (its producer and consumers) whose cuts a swap changes.

A value with n of them has a table of 2ⁿ lower bounds. A value with more has no table, and costs 0
until the exact cost of a combination is computed.
"""

MAX_EVALUATED_COMBINATIONS = 6
"""Maximum number of combinations of current and swapped cuts to evaluate exactly for one pair of
axes."""


def swap_axes(
    objective: Objective, cuts: list[Cuts], total: Total, weights: Weights, on_share: OnShare
) -> bool:
    """Change `cuts` in place where swapping two axes for some operators decreases the objective.

    Args:
        total: function from an `ObjectiveCost` to the seconds to minimize.
        weights: linear approximation of `total`, for the cost tables.
        on_share: called with the fraction of the pairs of axes that have been tried.

    Returns:
        Whether `cuts` changed.
    """
    total_cost, improved = objective.cost(cuts), False
    # Swaps keep the numbers of shards and so the seconds of computation: they gain at most the
    # seconds of redistributions.
    redistribution_cost = weights.redistributions * total_cost.redistributions
    if redistribution_cost < MIN_COMMUNICATION_SHARE * total(total_cost):
        return False
    tried_pairs: set[object] = set()
    for first, second in track(list(_axis_pairs_of_equal_size(objective)), on_share):
        properties = _axis_pair_properties(objective, cuts, (first, second))
        if properties in tried_pairs:
            continue
        # Pairs of axes with equal links and equal cuts give equal results; large meshes have many.
        tried_pairs.add(properties)
        swap = _AxisSwap(
            objective,
            cuts,
            _cuts_with_axes_swapped(objective, cuts, first, second),
            total_cost,
            weights,
        )
        improved_cuts = swap.best(total, total(total_cost) * (1 - MIN_GAIN))
        if improved_cuts is not None:
            cuts[:], total_cost = improved_cuts
            # With other cuts, pairs that did not gain before may gain now.
            improved, tried_pairs = True, set()
    return improved


def _axis_pairs_of_equal_size(objective: Objective) -> Iterator[tuple[int, int]]:
    sizes = objective.model.mesh.device_matrix
    for first, second in combinations(range(len(sizes)), 2):
        # Axes of different sizes would change the numbers of shards, which may not be divisible.
        if sizes[first] == sizes[second] > 1:
            yield first, second


def _axis_pair_properties(objective: Objective, cuts: Sequence[Cuts], axes: Axes) -> object:
    """Return for each axis its links and the factor that it cuts in each variable.

    Swaps of axis pairs with equal properties give equal results.
    """
    factors_of_ops = [factor_of_axis(cut) for cut in cuts]
    links = objective.model.links.levels
    return tuple(
        (links[axis], tuple(op_factors.get(axis) for op_factors in factors_of_ops)) for axis in axes
    )


def _cuts_with_axes_swapped(
    objective: Objective, cuts: Sequence[Cuts], first: int, second: int
) -> list[Cuts]:
    """Return `cuts` with two axes swapped in all operators that are not pinned."""
    swapped_axis = {first: second, second: first}
    swapped = []
    for variable, cut in zip(objective.problem.variables, cuts, strict=True):
        factors = {swapped_axis.get(axis, axis): f for axis, f in factor_of_axis(cut).items()}
        swapped.append(cut if variable.pinned is not None else axes_of_factors(factors))
    return swapped


class _AxisSwap:
    """Binary choice for each operator: its current cuts (0), or its cuts with two mesh axes swapped
    (1).

    Args:
        cuts: current cuts of each variable.
        swapped_cuts: cuts of each variable after the swap.
        total_cost: cost of the full model with `cuts`.
        weights: linear approximation of the function to minimize.

    Attributes:
        changed: indices of the variables whose cuts the swap changes.
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
        self.changed_variables = [
            index for index, (current, swapped) in enumerate(pairs) if current != swapped
        ]
        # The combination at hand, which `_set_combination` changes in place.
        self._cuts = list(cuts)
        changed = {*self.changed_variables}
        self._ops_of_edge = {
            edge: sorted({end.variable for end in edge.ends()} & changed)
            for edge in objective.problem.edges
            if any(end.variable in changed for end in edge.ends())
        }
        # Less all that the swap may change, so that a combination only adds its own costs.
        for variable in self.changed_variables:
            total_cost = self._add_operator_cost(total_cost, variable, -1)
        for edge in self._ops_of_edge:
            total_cost = total_cost.plus(objective.edge(edge, cuts), -edge.count)
        self._unchanged_cost = total_cost

    def best(self, total: Total, bound: float) -> tuple[list[Cuts], ObjectiveCost] | None:
        """Return the (cuts, cost) of the first combination of swaps with a total below `bound`.

        Combinations are tried in the order of their lower bounds.

        Args:
            total: function from an `ObjectiveCost` to the seconds to minimize.

        Returns:
            None if no combination that was tried has a total below `bound` seconds.
        """
        tabulated = {
            edge: ops for edge, ops in self._ops_of_edge.items() if len(ops) <= MAX_OPS_PER_TABLE
        }
        # Every operator has both axes at one factor, or neither.
        if not self.changed_variables:
            return None
        op_tables = [self._operator_table(op) for op in self.changed_variables]
        edge_tables = [self._edge_table(edge, ops) for edge, ops in tabulated.items()]
        # The variables of the elimination are numbered within `changed`.
        number_of_op = {op: number for number, op in enumerate(self.changed_variables)}
        scopes: list[tuple[int, ...]] = [(number,) for number in range(len(op_tables))]
        scopes += [tuple(number_of_op[op] for op in ops) for ops in tabulated.values()]
        tables = [*op_tables, *edge_tables]
        # Entry 0 of a table is the choice to keep all cuts.
        cost_without_swap = sum(float(table.flat[0]) for table in tables)
        try:
            elimination = Elimination([2] * len(op_tables), scopes)
        # Too many connected operators for an exact minimum: this pair of axes stays as it is.
        except TooWideError:
            return None
        for _ in range(MAX_EVALUATED_COMBINATIONS):
            minimum = elimination.minimum(tables)
            # The tables are lower bounds, so no combination costs less than their minimum.
            if minimum.cost >= cost_without_swap - MIN_GAIN * bound:
                return None
            num_cached_edges = self.objective.num_cached_edges
            self._set_combination(self.changed_variables, minimum.choices)
            cost = self._compute_combination_cost(total, bound)
            if cost is not None:
                return list(self._cuts), cost
            # All edges were cached, so their entries are exact already and would not change.
            if self.objective.num_cached_edges == num_cached_edges:
                return None
            for (edge, ops), table in zip(tabulated.items(), edge_tables, strict=True):
                # Costs that were computed on the way are cached by now, and replace their bounds.
                table[tuple(minimum.choices[number_of_op[op]] for op in ops)] = (
                    self._lower_bound_of_edge(edge)
                )
        return None

    def _set_combination(self, variables: Sequence[int], choices: Sequence[int]) -> None:
        for variable, choice in zip(variables, choices, strict=True):
            self._cuts[variable] = self.cuts_of_choice[choice][variable]

    def _compute_combination_cost(self, total: Total, bound: float) -> ObjectiveCost | None:
        """Return the cost of the selected combination of current and swapped cuts; None if its
        objective is at least `bound` seconds."""
        cost = self._unchanged_cost
        for op in self.changed_variables:
            cost = self._add_operator_cost(cost, op, 1)
        return self.objective.add_edges(cost, self._ops_of_edge, self._cuts, total, bound)

    def _add_operator_cost(self, cost: ObjectiveCost, index: int, sign: int) -> ObjectiveCost:
        variable = self.objective.problem.variables[index]
        op_cost = self.objective.operator(variable, self._cuts[index])
        return cost.plus(op_cost, sign * variable.count)

    def _operator_table(self, index: int) -> Table:
        variable = self.objective.problem.variables[index]
        costs = [self.objective.operator(variable, cuts[index]) for cuts in self.cuts_of_choice]
        return variable.count * np.array([self.weights.weighted_seconds(cost) for cost in costs])

    def _edge_table(self, edge: TensorEdge, ops: Sequence[int]) -> Table:
        """Return lower bounds on an edge's seconds, weighted by `self.weights`, with one dim per
        variable in `ops`: index 0 for its current cuts, 1 for its swapped cuts."""
        table = np.zeros((2,) * len(ops))
        for choices in product((0, 1), repeat=len(ops)):
            self._set_combination(ops, choices)
            table[choices] = self._lower_bound_of_edge(edge)
        # The next table starts from the present cuts too.
        self._set_combination(ops, (0,) * len(ops))
        return table

    def _lower_bound_of_edge(self, edge: TensorEdge) -> float:
        cost, _ = self.objective.lower_bound(edge, self._cuts)
        return edge.count * self.weights.weighted_seconds(cost)
