"""From which `mem_coeff` on the symbolic search cuts the batch of an operator."""

from __future__ import annotations

from shardwright.core.cost.symbolic import IMPOSSIBLE, break_even
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.search.indexed_graph import index_graph
from shardwright.core.search.recursive.search import operator_costs

# So small that the I cut, which alone it makes cheaper, is the least of the operator's costs.
SMALL = 1e-9


def break_evens(graph: Graph, mesh: DeviceMatrix) -> dict[str, float]:
    """For each main operator the `mem_coeff` above which cutting I costs less than not cutting, on
    the first axis of `mesh` and without redistribution.

    Formula: `cost_i · mem_coeff / cost_no_cut` (`shardwright.core.cost.symbolic.break_even`).

    Returns:
        By the operator's name; without those that have no weight or whose I does not divide.
    """
    axis_size = next((size for size in mesh.device_matrix if size > 1), None)
    if axis_size is None:
        return {}
    indexed, coefficients = index_graph(graph), {}
    for op in indexed.main:
        op_type = indexed.op_types[op]
        if op_type.weight is None:
            continue
        costs = operator_costs(op_type, (1,) * len(op_type.factors), axis_size, SMALL)
        of_i = [
            cost
            for cost, label in zip(costs.cuts, op_type.labels, strict=True)
            if label.startswith("I-") and cost < IMPOSSIBLE
        ]
        if of_i and costs.no_cut > 0:
            coefficients[indexed.names[op]] = break_even(min(of_i), SMALL, costs.no_cut)
    return coefficients


def main_operators(graph: Graph) -> tuple[str, ...]:
    """The operators that the search decides by cost, in the graph's order."""
    indexed = index_graph(graph)
    return tuple(indexed.names[op] for op in indexed.main)
