"""The joint optimum over all operators and axes, or how far from it a plan can be at most.

The same elimination as on one axis, with one choice for each combination of cuts on all axes. What
readers of one value share is not known to tables of two operators; each of n readers is charged an
n-th of its redistribution there, which is never more than they pay together. So the least sum is a
*lower bound* of every plan's cost, and where its plan costs as much, that is the optimum. It
serves to certify other searches on small models and few devices. Where tables become too large it
stops, with the best plan so far and the bound of `certificate`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

import numpy as np

from shardwright.core.cost.step_time import TimeModel
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.axis_tables import Weights
from shardwright.core.search.by_time.certificate import Certified, certified
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
from shardwright.core.search.by_time.search import GAIN, ROUNDS, cuts_of_graph, timed_search
from shardwright.core.search.indexed_graph import NO_CUT
from shardwright.core.search.nearby_cuts import axes_of_factors
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.progress import OnShare, subrange, track

logger = logging.getLogger("shardwright.search")

MOST_CHOICES = 512
"""Combinations of cuts that one operator may have."""

MOST_CONVERSIONS = 1 << 14
"""Pairs of layouts between which redistributions may be looked for."""

LARGEST_TABLE = 1 << 26


class TooLargeError(Exception):
    """There is no room for tables of all operators together."""


def search_exactly(request: SearchRequest) -> Certified:
    """The best plan of all that are tried, and a lower bound of every plan's cost: that of all
    operators together where there is room for their tables, else that of `certificate`.

    Raises:
        StrategyError: if the request has no pricing.
        ConfigError: if the cluster has fewer devices than the mesh and its pipeline stages.
    """
    search = timed_search(request)
    graph, bound = request.graph, 0.0
    first, jointly, last = (subrange(request.on_share, number, 3) for number in range(3))
    plans = [cuts_of_graph(graph, search.problem, search.best(first))]
    every = timed_search(request, fold=False)
    try:
        tables = _Joint(every.problem, every.model, every.objective)
        for number, share in enumerate(every.exposed_shares):
            weights = every.weights(share)
            cuts, least = tables.solve(
                weights, subrange(jointly, number, len(every.exposed_shares))
            )
            bound = max(bound, least)
            local_search(every.objective, cuts, every.total, ROUNDS, GAIN)
            plans.append(cuts_of_graph(graph, every.problem, cuts))
    except TooLargeError as reason:
        logger.info("mode='exact' stops early: %s", reason)
    best = min(plans, key=lambda plan: every.total(every.cost(plan)))
    known = certified(replace(request, on_share=last), best)
    return replace(known, bound=max(known.bound, min(bound, known.cost)))


class ExactSearch(SearchMode):
    """The joint optimum over all operators and axes, for small models and few devices."""

    name: ClassVar[str] = "exact"
    takes_pricing: ClassVar[bool] = True
    requires_pricing: ClassVar[bool] = True

    def search(self, request: SearchRequest) -> CutsOfGraph:
        found = search_exactly(request)
        if request.log_costs:
            search = timed_search(request, fold=False)
            cuts = [found.cuts.get(v.op.name, {}) for v in search.problem.variables]
            log_costs(search.problem, search.objective, search.axes, cuts, search.weights(0.0))
        if found.gap is not None:
            logger.info("the plan is within %.3g%% of the optimum", 100 * found.gap)
        return found.cuts


class _Joint:
    """Tables whose choices are the cuts of an operator on all axes."""

    def __init__(self, problem: SearchProblem, model: TimeModel, objective: Objective) -> None:
        self.problem, self.model, self.objective = problem, model, objective
        self.states = [self._states(variable) for variable in problem.variables]
        most = max(len(states) for states in self.states)
        if most > MOST_CHOICES:
            raise TooLargeError(f"an operator has {most:,} combinations of cuts")
        self._redistributions: dict[object, ObjectiveCost] = {}

    def solve(self, weights: Weights, on_share: OnShare) -> tuple[list[Cuts], float]:
        """The choices with the least sum of the tables, and that sum.

        Raises:
            TooLargeError: if tables would be too large.
        """
        sizes = [len(states) for states in self.states]
        factors: list[Factor] = [
            ((n,), np.array([self._operator(variable, cuts, weights) for cuts in self.states[n]]))
            for n, variable in enumerate(self.problem.variables)
        ]
        slack = 0.0
        for edge in track(self.problem.edges, on_share):
            factors += self._edge(edge, weights)
        for n, variable in enumerate(self.problem.variables):
            if not variable.differentiable and variable.pinned is None:
                # Made whole: then its readers convert nothing. The bound is lower by what it gains.
                table = factors[n][1]
                slack += float(table[-1] - table.min())
                factors.append(((n,), np.array([np.inf] * (sizes[n] - 1) + [0.0])))
        try:
            least = minimum(sizes, factors, limit=LARGEST_TABLE)
        except TooWideError as error:
            raise TooLargeError(f"the operators are too densely connected: {error}") from None
        cuts = [states[c] for states, c in zip(self.states, least.choices, strict=True)]
        return cuts, least.cost - slack

    def _states(self, variable: OpVariable) -> list[Cuts]:
        """All combinations of cuts; the last is none."""
        if variable.pinned is not None:
            return [variable.pinned]
        matrix = self.model.mesh.device_matrix
        axes = [axis for axis, size in enumerate(matrix) if size > 1]
        names, limits = variable.op_type.factors, variable.op_type.limits
        states: list[Cuts] = []
        for choice in product((*range(len(names)), NO_CUT), repeat=len(axes)):
            cuts = axes_of_factors(
                {axis: names[f] for axis, f in zip(axes, choice, strict=True) if f != NO_CUT}
            )
            if any({names[n] for n in pair} <= {*cuts} for pair in variable.op_type.joined):
                continue
            if all(limits[names.index(f)] % self.model.mesh.size(a) == 0 for f, a in cuts.items()):
                states.append(cuts)
        return states

    def _operator(self, variable: OpVariable, cuts: Cuts, weights: Weights) -> float:
        return variable.count * weights.of(self.objective.operator(variable, cuts))

    def _edge(self, edge: TensorEdge, weights: Weights) -> list[Factor]:
        """A table for the maker and each reader, charged their share of the redistribution."""
        if edge.is_shared_parameter:
            return []
        mesh, ndim = self.model.mesh, len(edge.value.shape)
        maker = edge.source_variable
        sources = [
            self.objective.source_layout(edge, cuts)
            for cuts in (self.states[maker] if maker is not None else [{}])
        ]
        readers: list[tuple[int | None, list[TensorLayout]]] = []
        for n, place in edge.readers:
            variable = self.problem.variables[n]
            layouts = [self.objective.layouts(variable, cuts) for cuts in self.states[n]]
            readers.append((n, [inputs[place] for inputs, _ in layouts]))
        if edge.returned:
            readers.append((None, [mesh.replicated(ndim)]))
        share = edge.count / len(readers)
        factors = []
        for reader, targets in readers:
            table = share * self._table(edge, sources, targets, weights)
            if table.any():
                factors.append(factor_between(maker, reader, table))
        return factors

    def _table(
        self,
        edge: TensorEdge,
        sources: Sequence[TensorLayout],
        targets: Sequence[TensorLayout],
        weights: Weights,
    ) -> Table:
        rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        if len(self._redistributions) + len(rows) * len(columns) > MOST_CONVERSIONS:
            raise TooLargeError(f"more than {MOST_CONVERSIONS:,} redistributions to search for")
        costs = np.array(
            [[weights.of(self._redistribution(edge, a, b)) for b in columns] for a in rows]
        )
        at_row = {layout: i for i, layout in enumerate(rows)}
        at_column = {layout: i for i, layout in enumerate(columns)}
        return costs[np.ix_([at_row[a] for a in sources], [at_column[b] for b in targets])]

    def _redistribution(
        self, edge: TensorEdge, source: TensorLayout, target: TensorLayout
    ) -> ObjectiveCost:
        value = edge.value
        key = (source, target, value.shape, value.itemsize, edge.differentiable)
        if key not in self._redistributions:
            path = redistribution_steps(source, target, value.shape, edge.differentiable)
            seconds = sum(sum(self.model.step(s, value, edge.differentiable)) for s in path)
            self._redistributions[key] = ObjectiveCost(redistributions=seconds)
        return self._redistributions[key]
