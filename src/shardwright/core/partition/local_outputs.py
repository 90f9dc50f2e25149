"""Local outputs: model outputs that each rank returns only for the samples of its local batch.

A dimension of an output is sharded like the dimension of an input with the same factor in the
sharding rules of all operators between them. Such an output is local: a loss outside the model
takes it with the labels of the rank's local batch, as under `DistributedDataParallel`. All other
outputs have the values of the global batch on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.axes import Axes
from shardwright.core.micro_batches.batch_dims import JoinedDims
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.rules import rule_of


def local_outputs(graph: Graph, arrivals: Mapping[str, CutAxes]) -> dict[str, CutAxes]:
    """Return the mesh axes that shard each dimension of each local output, by output name.

    An output with two dimensions that the same axes would shard is not local, such as a matrix over
    all pairs of samples.

    Args:
        graph: the graph of the model.
        arrivals: the mesh axes that shard each dimension of the inputs that ranks pass sharded, by
            input name; empty if ranks pass the global batch.
    """
    if not any(map(any, arrivals.values())):
        return {}
    joined = JoinedDims(graph)
    axes_of_group: dict[object, Axes] = {}
    # Behind an operator without a rule dimensions have no group, so that their size must do.
    axes_of_size: dict[int, Axes] = {}
    for value in graph.input_values:
        for dim, axes in enumerate(arrivals.get(value.name, ())):
            if axes:
                axes_of_group.setdefault(joined.root_of_group((value, dim)), axes)
                axes_of_size.setdefault(value.shape[dim], axes)
    result = {}
    for value in graph.output_values:
        groups = [joined.root_of_group((value, dim)) for dim in range(len(value.shape))]
        dims = [axes_of_group.get(group, ()) for group in groups]
        if not any(dims) and value.shape and _has_unknown_factors(graph, value):
            # By convention, dimension 0 is the batch.
            dims[0] = axes_of_size.get(value.shape[0], ())
        sharding_axes = [axes for axes in dims if axes]
        # In a matrix of all pairs of samples two dimensions would be sharded over the same axes.
        if sharding_axes and len(set(sharding_axes)) == len(sharding_axes):
            result[value.name] = tuple(dims)
    return result


def outputs_without_samples(graph: Graph, arrivals: Mapping[str, CutAxes]) -> frozenset[str]:
    """Return the names of outputs that depend on no input that ranks pass sharded.

    Empty if ranks pass the global batch.

    Args:
        graph: the graph of the model.
        arrivals: as for `local_outputs`.
    """
    sharded = {value for value in graph.input_values if any(arrivals.get(value.name, ()))}
    if not sharded:
        return frozenset()
    return frozenset(
        value.name for value in graph.output_values if not sharded & _find_ancestors(graph, value)
    )


def _find_ancestors(graph: Graph, value: Value) -> set[Value]:
    """Return all values that `value` is computed from, and `value` itself."""
    pending, visited = [value], {value}
    while pending:
        op = graph.producer.get(pending.pop())
        # Each value once: the number of paths doubles with each residual connection.
        new = [each for each in op.inputs if each not in visited] if op is not None else []
        pending += new
        visited.update(new)
    return visited


def _has_unknown_factors(graph: Graph, value: Value) -> bool:
    """Whether `value` depends on the result of an operator without a sharding rule."""
    producers = map(graph.producer.get, _find_ancestors(graph, value))
    return any(op is not None and rule_of(op) is None for op in producers)
