"""Joint search over all operators and axes, with a lower bound on the objective.

Variables are eliminated as in `axis_tables`, but each choice is a combination of cuts on all axes.
A table of two operators cannot express that several consumers share a redistribution. So each of n
consumers is charged 1/n of its redistribution; the sum of these is at most the cost of the shared
redistributions. The least sum of all tables is hence a *lower bound* on the objective of all plans,
and cuts whose objective equals it are optimal.

The joint search is feasible for small models and few devices. Where tables would be too large, the
heuristic search provides the result, with the bound of `certificate`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

import numpy as np

from shardwright.core.cost.time_model import TimeModel
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.axis_tables import Weights
from shardwright.core.search.by_time.certificate import CertifiedCuts, certify
from shardwright.core.search.by_time.elimination import (
    Factor,
    Table,
    TooWideError,
    factor_between,
    minimum,
)
from shardwright.core.search.by_time.local_search import local_search
from shardwright.core.search.by_time.log_costs import log_costs
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost
from shardwright.core.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.core.search.by_time.search import (
    MAX_ROUNDS,
    MIN_GAIN,
    cuts_of_graph,
    timed_search,
)
from shardwright.core.search.indexed_graph import NO_CUT
from shardwright.core.search.nearby_cuts import axes_of_factors
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.progress import OnShare, subrange, track

logger = logging.getLogger("shardwright.search")

MAX_CUTS_PER_OPERATOR = 512
"""Maximum number of combinations of cuts of one operator."""

MAX_REDISTRIBUTIONS = 1 << 14
"""Maximum number of pairs of layouts whose redistribution steps are searched for."""

LARGEST_TABLE = 1 << 26
"""Maximum number of elements of a table of the elimination: 512 MB in double precision."""


class TablesTooLargeError(Exception):
    """Raised if the joint search exceeds a limit of cuts, redistributions or table elements."""


def search_exactly(request: SearchRequest) -> CertifiedCuts:
    """Return the cheapest cuts found by an exact search, with a lower bound on the objective of all
    cuts.

    Args:
        request: the search, with a cluster as cost model, and a device matrix whose axes have prime
            sizes.

    Raises:
        StrategyError: if the search has no cluster, so that its costs are not in seconds.
        ConfigError: if the cluster has fewer devices than the mesh and its pipeline stages.
    """
    search = timed_search(request)
    graph, bound = request.graph, 0.0
    search_part, joint_part, bound_part = (subrange(request.on_share, i, 3) for i in range(3))
    # The heuristic plan first: it is the result if the tables are too large.
    plans = [cuts_of_graph(graph, search.problem, search.best(search_part))]
    # Not folded: the optimum may cut repeated blocks differently.
    unfolded_search = timed_search(request, fold=False)
    try:
        tables = _JointTables(
            unfolded_search.problem, unfolded_search.model, unfolded_search.objective
        )
        for share_index, exposed_share in enumerate(unfolded_search.exposed_shares):
            weights = unfolded_search.weights(exposed_share)
            cuts, least_sum = tables.solve(
                weights, subrange(joint_part, share_index, len(unfolded_search.exposed_shares))
            )
            # Every λ proves a bound.
            bound = max(bound, least_sum)
            # The cuts minimize a lower bound; shared redistributions may make others cheaper.
            local_search(
                unfolded_search.objective, cuts, unfolded_search.total, MAX_ROUNDS, MIN_GAIN
            )
            plans.append(cuts_of_graph(graph, unfolded_search.problem, cuts))
    except TablesTooLargeError as reason:
        logger.info("mode='exact' stops early: %s", reason)
    # By the objective itself, as each plan minimizes another approximation of it.
    best = min(plans, key=lambda plan: unfolded_search.total(unfolded_search.cost(plan)))
    certified = certify(replace(request, on_share=bound_part), best)
    # Both bounds hold, and the larger says more. No bound may exceed the cost by rounding.
    return replace(certified, bound=max(certified.bound, min(bound, certified.cost)))


class ExactSearch(SearchMode):
    """Search mode that optimizes all operators and axes jointly; for small models."""

    name: ClassVar[str] = "exact"
    takes_cost_model: ClassVar[bool] = True
    requires_cluster: ClassVar[bool] = True

    def search(self, request: SearchRequest) -> CutsOfGraph:
        result = search_exactly(request)
        if request.log_costs:
            search = timed_search(request, fold=False)
            cuts = [result.cuts.get(v.op.name, {}) for v in search.problem.variables]
            log_costs(search.problem, search.objective, search.axes, cuts, search.weights(0.0))
        if result.gap is not None:
            logger.info("the plan is within %.3g%% of the optimum", 100 * result.gap)
        return result.cuts


class _JointTables:
    """Cost tables whose choices are the cuts of an operator over all axes.

    Attributes:
        all_cuts: for each variable all valid combinations of cuts.
    """

    def __init__(self, problem: SearchProblem, model: TimeModel, objective: Objective) -> None:
        self.problem, self.model, self.objective = problem, model, objective
        self.all_cuts = [self._enumerate_cuts(variable) for variable in problem.variables]
        max_cuts = max(len(all_cuts) for all_cuts in self.all_cuts)
        if max_cuts > MAX_CUTS_PER_OPERATOR:
            raise TablesTooLargeError(
                f"an operator has {max_cuts:,} possible shardings, above the limit of"
                f" {MAX_CUTS_PER_OPERATOR:,}\nuse fewer devices for a joint optimum"
            )
        self._redistributions: dict[object, ObjectiveCost] = {}

    def solve(self, weights: Weights, on_share: OnShare) -> tuple[list[Cuts], float]:
        """Return the cuts that minimize the sum of the tables, and a lower bound in seconds for all
        cuts.

        Raises:
            TablesTooLargeError: if tables would be too large.
        """
        sizes = [len(all_cuts) for all_cuts in self.all_cuts]
        factors: list[Factor] = [
            (
                (n,),
                np.array(
                    [
                        self._weighted_operator_cost(variable, cuts, weights)
                        for cuts in self.all_cuts[n]
                    ]
                ),
            )
            for n, variable in enumerate(self.problem.variables)
        ]
        slack = 0.0
        for edge in track(self.problem.edges, on_share):
            factors += self._edge_tables(edge, weights)
        for n, variable in enumerate(self.problem.variables):
            if not variable.differentiable and variable.pinned is None:
                # Replicate operators without gradients (masks, positions), so that their consumers
                # need no redistributions. Lower the bound by the saving of their best cuts.
                table = factors[n][1]
                slack += float(table[-1] - table.min())
                factors.append(((n,), np.array([np.inf] * (sizes[n] - 1) + [0.0])))
        try:
            solution = minimum(sizes, factors, limit=LARGEST_TABLE)
        except TooWideError as error:
            raise TablesTooLargeError(
                f"the tables of the exact search are too large: {error}\n"
                "use fewer devices for a joint optimum"
            ) from None
        cuts = [all_cuts[c] for all_cuts, c in zip(self.all_cuts, solution.choices, strict=True)]
        return cuts, solution.cost - slack

    def _enumerate_cuts(self, variable: OpVariable) -> list[Cuts]:
        """Return all valid cuts of an operator, ending with no cut; of a pinned operator the pinned
        cuts only."""
        if variable.pinned is not None:
            return [variable.pinned]
        matrix = self.model.mesh.device_matrix
        # Axes of one device would only repeat each combination.
        axes = [axis for axis, size in enumerate(matrix) if size > 1]
        names, limits = variable.op_type.factors, variable.op_type.limits
        all_cuts: list[Cuts] = []
        # `NO_CUT` comes last, so that the last combination cuts nothing.
        for choice in product((*range(len(names)), NO_CUT), repeat=len(axes)):
            cuts = axes_of_factors(
                {axis: names[f] for axis, f in zip(axes, choice, strict=True) if f != NO_CUT}
            )
            if any({names[n] for n in pair} <= {*cuts} for pair in variable.op_type.joined):
                continue
            if all(limits[names.index(f)] % self.model.mesh.size(a) == 0 for f, a in cuts.items()):
                all_cuts.append(cuts)
        return all_cuts

    def _weighted_operator_cost(self, variable: OpVariable, cuts: Cuts, weights: Weights) -> float:
        return variable.count * weights.weighted_seconds(self.objective.operator(variable, cuts))

    def _edge_tables(self, edge: TensorEdge, weights: Weights) -> list[Factor]:
        """Return for each consumer of the edge's value a table of redistribution costs, over the
        cuts of the producer (rows) and of the consumer (columns)."""
        # Its storage depends on all consumers; without its cost the sum stays a lower bound.
        if edge.is_shared_parameter:
            return []
        mesh, ndim = self.model.mesh, len(edge.value.shape)
        producer = edge.producer_variable
        sources = [
            self.objective.initial_layout(edge, cuts)
            for cuts in (self.all_cuts[producer] if producer is not None else [{}])
        ]
        consumers: list[tuple[int | None, list[TensorLayout]]] = []
        for n, input_index in edge.consumers:
            variable = self.problem.variables[n]
            layouts = [self.objective.layouts(variable, cuts) for cuts in self.all_cuts[n]]
            consumers.append((n, [inputs[input_index] for inputs, _ in layouts]))
        if edge.returned:
            consumers.append((None, [mesh.replicated(ndim)]))
        # A table for two operators cannot know what other consumers read: the sum of 1/n of each
        # redistribution is at most the cost of all.
        share = edge.count / len(consumers)
        factors = []
        for consumer, targets in consumers:
            table = share * self._redistribution_table(edge, sources, targets, weights)
            # A table of zeros would only connect variables in the elimination.
            if table.any():
                factors.append(factor_between(producer, consumer, table))
        return factors

    def _redistribution_table(
        self,
        edge: TensorEdge,
        sources: Sequence[TensorLayout],
        targets: Sequence[TensorLayout],
        weights: Weights,
    ) -> Table:
        rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        # An upper bound of the number of searches for steps, as some pairs may be cached.
        if len(self._redistributions) + len(rows) * len(columns) > MAX_REDISTRIBUTIONS:
            raise TablesTooLargeError(
                f"the exact search needs costs of more than {MAX_REDISTRIBUTIONS:,} "
                "redistributions\nuse fewer devices for a joint optimum"
            )
        costs = np.array(
            [
                [weights.weighted_seconds(self._redistribution_cost(edge, a, b)) for b in columns]
                for a in rows
            ]
        )
        # Many cuts give a tensor the same layout, so costs are computed for distinct layouts only.
        row_of = {layout: i for i, layout in enumerate(rows)}
        column_of = {layout: i for i, layout in enumerate(columns)}
        return costs[np.ix_([row_of[a] for a in sources], [column_of[b] for b in targets])]

    def _redistribution_cost(
        self, edge: TensorEdge, source: TensorLayout, target: TensorLayout
    ) -> ObjectiveCost:
        value = edge.value
        key = (source, target, value.shape, value.itemsize, edge.differentiable)
        if key not in self._redistributions:
            path = redistribution_steps(source, target, value.shape, edge.differentiable)
            seconds = sum(sum(self.model.step_seconds(s, value, edge.differentiable)) for s in path)
            self._redistributions[key] = ObjectiveCost(redistributions=seconds)
        return self._redistributions[key]
