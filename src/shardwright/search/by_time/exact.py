"""The joint optimum over all operators and axes, or how far from it a plan can be at most.

The same elimination as on one axis, with one choice for each combination of cuts on all axes. What
readers of one value share is not known to tables of two operators; each of n readers is charged an
n-th of its conversion there, which is never more than they pay together. So the least sum is a
*lower bound* of every plan's cost, and where its plan costs as much, that is the optimum. It
serves to certify other searches on small models and few devices.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import ClassVar

import numpy as np

from shardwright.cost.step_time import TimeModel
from shardwright.errors import StrategyError
from shardwright.layout.layout import TensorLayout
from shardwright.layout.redistribution import redistribution_steps
from shardwright.rules.rule import Cuts
from shardwright.search.by_time.axis_tables import Weights
from shardwright.search.by_time.elimination import Factor, TooWideError, minimum
from shardwright.search.by_time.local_search import local_search
from shardwright.search.by_time.objective import Objective, ObjectiveCost
from shardwright.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.search.by_time.search import GAIN, ROUNDS, cuts_of_graph, timed_search
from shardwright.search.indexed_graph import NO_CUT
from shardwright.search.request import CutsOfGraph, SearchMode, SearchRequest

logger = logging.getLogger("shardwright.search")

MOST_CHOICES = 512
"""Combinations of cuts that one operator may have."""

MOST_CONVERSIONS = 1 << 18
"""Pairs of layouts between which conversions may be looked for."""

LARGEST_TABLE = 1 << 26


@dataclass(frozen=True)
class Certified:
    """A plan and how good it can be at most.

    Args:
        cost: of the plan, in seconds (with what kept bytes count).
        bound: no plan costs less.
    """

    cuts: CutsOfGraph
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """By what share the plan may be above the optimum."""
        return self.cost / self.bound - 1 if self.bound > 0 else 0.0


def search_exactly(request: SearchRequest) -> Certified:
    """The best plan of all that are tried, and a lower bound of every plan's cost.

    Raises:
        StrategyError: if operators have too many combinations of cuts, or are too connected, for
            all of them to be weighed; if the request has no pricing.
        ConfigError: if the cluster has fewer devices than the mesh and its pipeline stages.
    """
    search = timed_search(request)
    candidates, bound = [search.best()], 0.0
    tables = _Joint(search.problem, search.model, search.objective)
    for share in search.shares:
        cuts, least = tables.solve(search._weights(share))
        bound = max(bound, least)
        local_search(search.objective, cuts, search._total, ROUNDS, GAIN)
        candidates.append(cuts)
    costs = [search._total(search.objective.cost(cuts)) for cuts in candidates]
    best = costs.index(min(costs))
    plan = cuts_of_graph(request.graph, search.problem, candidates[best])
    return Certified(plan, costs[best], bound)


class ExactSearch(SearchMode):
    """The joint optimum over all operators and axes, for small models and few devices."""

    name: ClassVar[str] = "exact"
    takes_pricing: ClassVar[bool] = True
    requires_pricing: ClassVar[bool] = True

    def search(self, request: SearchRequest) -> CutsOfGraph:
        certified = search_exactly(request)
        logger.info("the plan is within %.3g%% of the optimum", 100 * certified.gap)
        return certified.cuts


class _Joint:
    """Tables whose choices are the cuts of an operator on all axes."""

    def __init__(self, found: SearchProblem, model: TimeModel, objective: Objective) -> None:
        self.network, self.model, self.objective = found, model, objective
        self.states = [self._states(node) for node in found.nodes]
        most = max(len(states) for states in self.states)
        if most > MOST_CHOICES:
            raise StrategyError(
                f"mode='exact': an operator has {most} combinations of cuts on {model.mesh}, and at"
                f" most {MOST_CHOICES} are weighed; take fewer devices, or"
                " mode='recursive_programming'"
            )
        self._conversions: dict[object, ObjectiveCost] = {}

    def solve(self, weights: Weights) -> tuple[list[Cuts], float]:
        """The choices with the least sum of the tables, and that sum.

        Raises:
            StrategyError: if tables would be too large.
        """
        sizes = [len(states) for states in self.states]
        factors: list[Factor] = [
            ((n,), np.array([self._operator(node, cuts, weights) for cuts in self.states[n]]))
            for n, node in enumerate(self.network.nodes)
        ]
        slack = 0.0
        for stream in self.network.streams:
            factors += self._stream(stream, weights)
        for n, node in enumerate(self.network.nodes):
            if not node.differentiable and node.pinned is None:
                # Made whole: then its readers convert nothing. The bound is lower by what it gains.
                table = factors[n][1]
                slack += float(table[-1] - table.min())
                factors.append(((n,), np.array([np.inf] * (sizes[n] - 1) + [0.0])))
        try:
            least = minimum(sizes, factors, limit=LARGEST_TABLE)
        except TooWideError as error:
            raise StrategyError(
                f"mode='exact': the operators of this model are too connected: {error}; take fewer"
                " devices, or mode='recursive_programming'"
            ) from None
        cuts = [states[c] for states, c in zip(self.states, least.choices, strict=True)]
        return cuts, least.cost - slack

    def _states(self, node: OpVariable) -> list[Cuts]:
        """All combinations of cuts; the last is none."""
        if node.pinned is not None:
            return [node.pinned]
        matrix = self.model.mesh.device_matrix
        axes = [axis for axis, size in enumerate(matrix) if size > 1]
        found: list[Cuts] = []
        for choice in product((*range(len(node.kind.factors)), NO_CUT), repeat=len(axes)):
            cuts: dict[str, tuple[int, ...]] = {}
            for axis, factor in zip(axes, choice, strict=True):
                if factor != NO_CUT:
                    name = node.kind.factors[factor]
                    cuts[name] = (*cuts.get(name, ()), axis)
            parts = {name: prod(matrix[axis] for axis in cut) for name, cut in cuts.items()}
            limits = dict(zip(node.kind.factors, node.kind.limits, strict=True))
            if all(limits[name] % count == 0 for name, count in parts.items()):
                found.append(cuts)
        return found

    def _operator(self, node: OpVariable, cuts: Cuts, weights: Weights) -> float:
        return node.count * _weighed(self.objective.operator(node, cuts), weights)

    def _stream(self, stream: TensorEdge, weights: Weights) -> list[Factor]:
        """A table for the maker and each reader, charged their share of the conversion."""
        if stream.stored:
            return []
        mesh, ndim = self.model.mesh, len(stream.value.shape)
        maker, made = self._making(stream)
        readers: list[tuple[int | None, list[TensorLayout]]] = [
            (n, [self.objective.layouts(self.network.nodes[n], cuts)[0][place] for cuts in states])
            for n, place in stream.readers
            for states in (self.states[n],)
        ]
        if stream.returned:
            readers.append((None, [mesh.replicated(ndim)]))
        share = stream.count / len(readers)
        factors = []
        for reader, read in readers:
            table = share * self._table(stream, made, read, weights)
            if table.any():
                factors.append(_factor(maker, reader, table))
        return factors

    def _making(self, stream: TensorEdge) -> tuple[int | None, list[TensorLayout]]:
        if stream.made is not None:
            return None, [TensorLayout(self.model.mesh, stream.made)]
        if stream.source is None:
            return None, [self.model.mesh.replicated(len(stream.value.shape))]
        n, slot = stream.source
        node, layouts = self.network.nodes[n], self.objective.layouts
        return n, [layouts(node, cuts)[1][slot] for cuts in self.states[n]]

    def _table(
        self,
        stream: TensorEdge,
        made: Sequence[TensorLayout],
        read: Sequence[TensorLayout],
        weights: Weights,
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        rows, columns = list(dict.fromkeys(made)), list(dict.fromkeys(read))
        if len(self._conversions) + len(rows) * len(columns) > MOST_CONVERSIONS:
            raise StrategyError(
                f"mode='exact': more than {MOST_CONVERSIONS:,} conversions would be looked for;"
                " take fewer devices, or mode='recursive_programming'"
            )
        costs = np.array(
            [[_weighed(self._conversion(stream, a, b), weights) for b in columns] for a in rows]
        )
        at_row = {layout: i for i, layout in enumerate(rows)}
        at_column = {layout: i for i, layout in enumerate(columns)}
        return costs[np.ix_([at_row[a] for a in made], [at_column[b] for b in read])]

    def _conversion(
        self, stream: TensorEdge, made: TensorLayout, read: TensorLayout
    ) -> ObjectiveCost:
        value = stream.value
        key = (made, read, value.shape, value.itemsize, stream.differentiable)
        if key not in self._conversions:
            path = redistribution_steps(made, read, value.shape, stream.differentiable)
            seconds = sum(sum(self.model.step(s, value, stream.differentiable)) for s in path)
            self._conversions[key] = ObjectiveCost(conversions=seconds)
        return self._conversions[key]


def _weighed(cost: ObjectiveCost, weights: Weights) -> float:
    return (
        weights.forward * cost.forward
        + weights.backward * cost.backward
        + weights.conversions * cost.conversions
        + weights.gradients * (cost.gathers + cost.gradients)
        + cost.update
        + weights.kept * cost.kept
    )


def _factor(
    row: int | None, column: int | None, table: np.ndarray[tuple[int, int], np.dtype[np.float64]]
) -> Factor:
    """A table whose rows are choices of one variable and columns those of another."""
    if row is None or column is None:
        scope = tuple(v for v in (row, column) if v is not None)
        return scope, table.reshape(-1) if scope else table.reshape(())
    if row == column:
        return (row,), np.diagonal(table)
    return ((row, column), table) if row < column else ((column, row), table.T)
