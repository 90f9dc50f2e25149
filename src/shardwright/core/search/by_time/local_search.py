"""Improve the cuts of one operator at a time over all axes, with all other operators fixed.

A search that decides one axis at a time cannot change the cuts of an operator on two axes at once.
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

MAX_NEW_EDGE_COSTS = 250
"""Maximum number of redistributions whose cost one local search computes; nearly all of its time is
spent on searching for their steps."""

MIN_COMMUNICATION_SHARE = 1e-4
"""Operators are skipped if redistributing their inputs and outputs takes at most this fraction of
the objective."""


def local_search(
    objective: Objective,
    cuts: list[Cuts],
    total: Total,
    max_rounds: int,
    min_gain: float,
    on_share: OnShare = ignore_share,
) -> None:
    """Change `cuts` in place, operator by operator, as long as the objective decreases.

    Args:
        total: function from an `ObjectiveCost` to the seconds to minimize.
        max_rounds: maximum number of visits to each operator.
        min_gain: minimum decrease of the objective by a change, as a fraction of the objective.
        on_share: called with the completed fraction of the visits or of `MAX_NEW_EDGE_COSTS`,
            whichever is larger.
    """
    edges = objective.problem.edges_around()
    neighborhoods = [
        _OperatorWithEdges(objective, index, variable, edges[index])
        for index, variable in enumerate(objective.problem.variables)
        if variable.pinned is None and variable.op_type.factors
    ]
    total_cost = objective.cost(cuts)
    best_total = total(total_cost)
    # Counted from here: edge costs of earlier steps are cached.
    max_cached_edges = objective.num_cached_edges + MAX_NEW_EDGE_COSTS
    for round_index in range(max_rounds):
        previous_total = best_total
        # The largest possible gain first, since `MAX_NEW_EDGE_COSTS` may end the round. Operators
        # that represent many repeated blocks come early, too.
        order = sorted(neighborhoods, key=lambda each: -each.redistribution_seconds(cuts))
        for num_visited, neighborhood in enumerate(order):
            visit_share = (round_index + num_visited / len(order)) / max_rounds
            edge_cost_share = min(
                1.0, 1 - (max_cached_edges - objective.num_cached_edges) / MAX_NEW_EDGE_COSTS
            )
            on_share(max(visit_share, edge_cost_share))
            # Not before sorting: changes of neighbors earlier in the round may have removed
            # redistributions.
            if neighborhood.redistribution_seconds(cuts) <= MIN_COMMUNICATION_SHARE * best_total:
                continue
            if objective.num_cached_edges > max_cached_edges:
                return
            index = neighborhood.index
            # Without this operator, so that other cuts need only the costs of its own edges.
            other_cost = total_cost.plus(neighborhood.cost(cuts), -1)
            # A list, since `cuts` changes in the loop.
            for new_cuts in list(neighborhood.nearby_cuts(cuts)):
                previous_cuts, cuts[index] = cuts[index], new_cuts
                # Computed again for each of the cuts, as an accepted change lowers the total.
                bound = best_total * (1 - min_gain)
                new_cost = neighborhood.cost_added_to(other_cost, cuts, total, bound)
                if new_cost is not None:
                    total_cost, best_total = new_cost, total(new_cost)
                else:
                    cuts[index] = previous_cuts
        # Another round would start from the same cuts.
        if best_total >= previous_total * (1 - min_gain):
            return


@dataclass(frozen=True)
class _OperatorWithEdges:
    """One operator, with the edges of its inputs and outputs.

    Args:
        index: index of `variable` in the problem.
        edges: edges with an end at `variable`.
    """

    objective: Objective
    index: int
    variable: OpVariable
    edges: list[TensorEdge]

    def cost(self, cuts: list[Cuts]) -> ObjectiveCost:
        """Return the cost of the operator and its edges under `cuts`."""
        cost = self._add_cost_without_edges(cuts, ObjectiveCost())
        for edge in self.edges:
            cost = cost.plus(self.objective.edge(edge, cuts), edge.count)
        return cost

    def cost_added_to(
        self, base_cost: ObjectiveCost, cuts: list[Cuts], total: Total, bound: float
    ) -> ObjectiveCost | None:
        """Return `base_cost` plus the cost of the operator and its edges under `cuts`; None if the
        objective is not below `bound` seconds."""
        return self.objective.add_edges(
            self._add_cost_without_edges(cuts, base_cost), self.edges, cuts, total, bound
        )

    def _add_cost_without_edges(self, cuts: list[Cuts], cost: ObjectiveCost) -> ObjectiveCost:
        """Return `cost` plus the cost of the operator under `cuts`, its edges excluded."""
        op_cost = self.objective.operator(self.variable, cuts[self.index])
        return cost.plus(op_cost, self.variable.count)

    def redistribution_seconds(self, cuts: list[Cuts]) -> float:
        """Return the seconds of redistributing inputs and outputs: an upper bound on the gain from
        new cuts of the operator."""
        return sum(self.objective.edge(e, cuts).redistributions * e.count for e in self.edges)

    def nearby_cuts(self, cuts: list[Cuts]) -> Iterator[Cuts]:
        """Yield cuts of the operator that match the layout of a neighbor or change one axis.

        An axis is omitted from the cuts of a factor whose size it does not divide.
        """
        nearby, current_factors = (
            self._nearby_cuts_generator(cuts),
            factor_of_axis(cuts[self.index]),
        )
        # A list, as dicts cannot be hashed.
        yielded = [current_factors]
        for factors in chain(
            nearby.matching_neighbors(),
            nearby.with_one_axis_changed(current_factors, self._last_axis_of_each_group(cuts)),
        ):
            if factors not in yielded:
                yielded.append(factors)
                # Factors in the order of their axes, as everywhere in this search: caches are keyed
                # by the items of cuts in order.
                yield axes_of_factors(factor_of_axis(nearby.divisible(factors)))

    def _last_axis_of_each_group(self, cuts: list[Cuts]) -> list[int]:
        """Return the last axis of each group of interchangeable mesh axes.

        Axes are interchangeable if they have equal links and, in the operator and in each neighbor,
        cut the same factor.
        """
        model = self.objective.model
        variables = {end.variable for edge in self.edges for end in edge.ends()}
        links = dict(enumerate(model.links.levels))
        properties: list[Mapping[int, object]] = [links]
        properties += [factor_of_axis(cuts[variable]) for variable in sorted(variables)]
        return sorted(group[-1] for group in group_equal_axes(model.mesh, properties))

    def _nearby_cuts_generator(self, cuts: list[Cuts]) -> NearbyCuts:
        shared = [
            SharedTensor(self._dims_at_edge_end(own_end), self._layout_at_edge_end(other_end, cuts))
            for edge in self.edges
            for other_end in edge.ends()
            # Not between repeated blocks that share this variable: their cuts would change
            # together.
            if other_end.variable != self.index
            for own_end in edge.ends()
            if own_end.variable == self.index
        ]
        op_type, rule = self.variable.op_type, self.variable.rule
        limits = dict(zip(op_type.factors, op_type.limits, strict=True))
        joined = rule.joined if rule is not None else {}
        return NearbyCuts(self.objective.model.mesh, limits, shared, joined)

    def _dims_at_edge_end(self, end: EdgeEnd) -> Dims:
        rule = self.variable.rule
        assert rule is not None
        return (rule.inputs, rule.outputs)[end.is_output][end.tensor_index]

    def _layout_at_edge_end(self, end: EdgeEnd, cuts: list[Cuts]) -> TensorLayout:
        variable = self.objective.problem.variables[end.variable]
        layouts = self.objective.layouts(variable, cuts[end.variable])
        return layouts[end.is_output][end.tensor_index]
