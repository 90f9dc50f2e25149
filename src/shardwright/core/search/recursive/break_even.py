"""The `mem_coeff` above which the symbolic search cuts the batch of an operator."""

from __future__ import annotations

from shardwright.core.cost.symbolic import IMPOSSIBLE, break_even
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.search.indexed_graph import index_graph
from shardwright.core.search.recursive.search import operator_costs

# So small that cutting I, the only choice whose cost is proportional to `mem_coeff`, is the
# cheapest choice: the formula is valid only then.
SMALL_MEM_COEFF = 1e-9


def break_even_mem_coeffs(graph: Graph, mesh: DeviceMatrix) -> dict[str, float]:
    """Return for each main operator the `mem_coeff` above which cutting the batch beats no cut.

    Costs are taken on the first axis of `mesh`, without redistributions. The formula is explained
    in `shardwright.core.cost.symbolic.break_even`.

    Returns:
        The values by operator name, without operators that have no weight or whose batch (factor I
        of MindSpore's notation) is not divisible.
    """
    # The first axis to be decided, on which all tensors are still unsharded.
    axis_size = next((size for size in mesh.device_matrix if size > 1), None)
    if axis_size is None:
        return {}
    indexed, coefficients = index_graph(graph), {}
    for op in indexed.main:
        op_type = indexed.op_types[op]
        # `mem_coeff` multiplies the elements of the weight only.
        if op_type.weight is None:
            continue
        costs = operator_costs(op_type, (1,) * len(op_type.factors), axis_size, SMALL_MEM_COEFF)
        costs_of_i = [
            cost
            for cost, label in zip(costs.cuts, op_type.labels, strict=True)
            if label.startswith("I-") and cost < IMPOSSIBLE
        ]
        if costs_of_i and costs.no_cut > 0:
            coefficients[indexed.names[op]] = break_even(
                min(costs_of_i), SMALL_MEM_COEFF, costs.no_cut
            )
    return coefficients


def main_operators(graph: Graph) -> tuple[str, ...]:
    """Return the names of the operators that the symbolic search decides by cost, in graph
    order."""
    indexed = index_graph(graph)
    return tuple(indexed.names[op] for op in indexed.main)
