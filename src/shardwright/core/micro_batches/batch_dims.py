"""Find the batch dimension of each input of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.rules import rule_of
from shardwright.errors import StrategyError

Dim = tuple[Value, int]

MAX_CANDIDATES = 6
"""Maximum number of candidates besides dimension 0 of all inputs. The model is captured once per
candidate."""


def sample_dims(graph: Graph) -> dict[Value, int]:
    """Return the batch dimension of each input that has one.

    By default, inputs whose dimension 0 is as large as that of the first input have batch dimension
    0. If only the first input qualifies, as for sequence-first inputs of `nn.LSTM`, labels or
    lengths determine the batch size: the batch dimensions are those that share a sharding factor
    with dimension 0 of the labels.

    Args:
        graph: the graph of a batch or micro-batch.
    """
    inputs = [value for value in graph.input_values if value.shape]
    dims = {value: 0 for value in inputs if value.shape[0] == inputs[0].shape[0]}
    sizes = inputs[0].shape[1:] if len(dims) == 1 else ()
    # A floating-point input may be of features instead.
    labels = [v for v in inputs[1:] if v.shape[0] in sizes and not v.dtype.is_floating_point]
    if labels:
        joined_dims = JoinedDims(graph)
        # By way of the loss, which reads labels and predictions.
        for joined in (joined_dims.of_inputs({value: 0}) for value in labels):
            if joined.get(inputs[0], 0) > 0:
                return joined
    return dims


def other_sample_dims(graph: Graph) -> tuple[int | None, ...]:
    """Return the batch dimension of each leaf of a call's arguments; () if it is 0 for all inputs.

    None stands for a leaf without a batch dimension.
    """
    dims = sample_dims(graph)
    if not any(dims.values()):
        return ()
    return tuple(dims.get(leaf) if isinstance(leaf, Value) else None for leaf in graph.inputs)


class JoinedDims:
    """Groups of tensor dimensions that share a factor in the sharding rules of operators.

    Args:
        graph: the graph of the global batch.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._parent: dict[object, object] = {}
        for op in graph.ops:
            rule = rule_of(op)
            if rule is None:
                continue
            moved = rule.factors_of_moved_rows(op)
            tensors = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
            for value, names in tensors:
                for dim, name in enumerate(names):
                    # Dimensions of size 1 are broadcast, so they say nothing about other
                    # dimensions. Rows that move are those of other samples.
                    if name is not None and name not in moved and value.shape[dim] > 1:
                        # A node is a dimension of a value or a factor of an operator; an edge is an
                        # entry of a rule.
                        self._merge_dim_groups((value, dim), (op, name))

    def candidates(self, count: int) -> Iterator[tuple[int | None, ...]]:
        """Yield candidates for the batch dimensions of all leaves of a call's arguments.

        Each candidate contains dimension 0 of some input, as other dimensions may be features.
        Groups that contain a dimension of a parameter yield no candidate.

        Args:
            count: number of micro-batches, which must divide the batch size.
        """
        inputs = [value for value in self._graph.input_values if value.shape]
        candidates: dict[tuple[int | None, ...], None] = {}
        for first in inputs:
            size = first.shape[0]
            if size == 1 or size % count or self.shares_factor_with_parameter((first, 0)):
                continue
            # Inputs that operators combine only in the loss have a batch dimension too.
            others = {v: 0 for v in inputs if v.shape[0] == size}
            joined = self.of_inputs({first: 0})
            all_joined = self.of_inputs(
                {v: 0 for v in others if not self.shares_factor_with_parameter((v, 0))}
            )
            # A dict, as joined inputs lead to equal candidates.
            candidates |= dict.fromkeys(map(self._list_leaf_batch_dims, (all_joined, joined)))
        yield from list(candidates)[:MAX_CANDIDATES]

    def named(self, batch_dims: Mapping[str, int | None]) -> tuple[int | None, ...]:
        """Return the batch dimension of every leaf of a call's arguments, given those of some
        inputs.

        Args:
            batch_dims: batch dimensions by input name; None for an input that each micro-batch
                reads in full. For an input without an entry the dimension is derived from the given
                ones, by shared factors.

        Raises:
            StrategyError: if a name is not the name of a tensor input, or a dimension is out of
                range.
        """
        by_name = {value.name: value for value in self._graph.input_values}
        given: dict[Value, int] = {}
        for name, dim in batch_dims.items():
            if name not in by_name:
                near = get_close_matches(name, by_name, 1)
                raise StrategyError(
                    f"batch_dims: the model has no tensor input {name!r}\n"
                    f"use one of {', '.join(map(repr, by_name))}"
                    f"{f' (did you mean {near[0]!r}?)' if near else ''}"
                )
            rank = len(by_name[name].shape)
            if dim is not None and not -rank <= dim < rank:
                raise StrategyError(
                    f"batch_dims[{name!r}]={dim}, but the input has {rank} dimensions\n"
                    f"use a dimension from {-rank} to {rank - 1}, or None to pass the input in full"
                )
            if dim is not None:
                given[by_name[name]] = dim % rank
        # Given dimensions win over derived ones.
        dims = {**self.of_inputs(given), **given}
        in_full = {name for name, dim in batch_dims.items() if dim is None}
        return self._list_leaf_batch_dims(
            {v: dim for v, dim in dims.items() if v.name not in in_full}
        )

    def of_inputs(self, dims: Mapping[Value, int]) -> dict[Value, int]:
        """Return the first dimension of each input that shares a factor with one of `dims`.

        Inputs without such a dimension are omitted.
        """
        roots = {self.root_of_group(dim) for dim in dims.items()}
        return {
            value: dim
            for value in self._graph.input_values
            # Reversed, so that the first of several dimensions is the one that stays.
            for dim in reversed(range(len(value.shape)))
            if self.root_of_group((value, dim)) in roots
        }

    def _list_leaf_batch_dims(self, dims: Mapping[Value, int]) -> tuple[int | None, ...]:
        leaves = self._graph.inputs
        return tuple(dims.get(leaf) if isinstance(leaf, Value) else None for leaf in leaves)

    def shares_factor_with_parameter(self, dim: Dim) -> bool:
        parameters = ((v, d) for v in self._graph.parameters for d in range(len(v.shape)))
        return self.root_of_group(dim) in {self.root_of_group(each) for each in parameters}

    def root_of_group(self, node: object) -> object:
        """Return the representative of the group of a tensor dimension."""
        root = node
        while root in self._parent:
            root = self._parent[root]
        # Later look-ups of these nodes take one step.
        while node != root:
            following = self._parent[node]
            self._parent[node] = root
            node = following
        return root

    def _merge_dim_groups(self, first: object, second: object) -> None:
        first, second = self.root_of_group(first), self.root_of_group(second)
        if first != second:
            self._parent[first] = second
