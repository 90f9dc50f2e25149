"""Finds the dimension of the samples in each input of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.rules import rule_of
from shardwright.errors import StrategyError

Dim = tuple[Value, int]

MOST_CANDIDATES = 6
"""Candidates beyond dimension 0 of all inputs; each is captured for one micro-batch."""


class JoinedDims:
    """Groups dimensions of tensors that the rules of the operators between them join.

    Args:
        graph: of the whole batch.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._parent: dict[object, object] = {}
        for op in graph.ops:
            rule = rule_of(op)
            if rule is None:
                continue
            tensors = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
            for value, names in tensors:
                for dim, name in enumerate(names):
                    if name is not None and value.shape[dim] > 1:
                        self._join((value, dim), (op, name))

    def candidates(self, count: int) -> Iterator[tuple[int | None, ...]]:
        """Dimensions of all leaves of a call that may be those of the samples.

        One is that of dimension 0 of some input, as others may be features, and of no parameter.

        Args:
            count: number of micro-batches, which divides the number of samples.
        """
        inputs = [value for value in self._graph.input_values if value.shape]
        found: dict[tuple[int | None, ...], None] = {}
        for first in inputs:
            size = first.shape[0]
            if size == 1 or size % count or self._is_of_parameter((first, 0)):
                continue
            # Inputs that meet only in the loss have samples too.
            others = {v: 0 for v in inputs if v.shape[0] == size}
            joined = self.of_inputs({first: 0})
            all_joined = self.of_inputs({v: 0 for v in others if not self._is_of_parameter((v, 0))})
            found |= dict.fromkeys(map(self._of_leaves, (all_joined, joined)))
        yield from list(found)[:MOST_CANDIDATES]

    def named(self, batch_dims: Mapping[str, int | None]) -> tuple[int | None, ...]:
        """The dimensions that the user names, and those of other inputs that are joined with them.

        Raises:
            StrategyError: if there is no such input, or no such dimension of it.
        """
        by_name = {value.name: value for value in self._graph.input_values}
        given: dict[Value, int] = {}
        for name, dim in batch_dims.items():
            if name not in by_name:
                near = get_close_matches(name, by_name, 1)
                raise StrategyError(
                    f"batch_dims names {name!r}, but the model has no such tensor input\n"
                    f"valid are {', '.join(by_name)}{f'; nearest is {near[0]}' if near else ''}"
                )
            rank = len(by_name[name].shape)
            if dim is not None and not -rank <= dim < rank:
                raise StrategyError(
                    f"batch_dims[{name!r}]={dim}: the input has {rank} dimensions\n"
                    f"give a number from {-rank} to {rank - 1}, or None to pass it in full"
                )
            if dim is not None:
                given[by_name[name]] = dim % rank
        dims = {**self.of_inputs(given), **given}
        in_full = {name for name, dim in batch_dims.items() if dim is None}
        return self._of_leaves({v: dim for v, dim in dims.items() if v.name not in in_full})

    def of_inputs(self, dims: Mapping[Value, int]) -> dict[Value, int]:
        """The dimensions of all inputs that are joined with these."""
        roots = {self._root(dim) for dim in dims.items()}
        return {
            value: dim
            for value in self._graph.input_values
            for dim in reversed(range(len(value.shape)))
            if self._root((value, dim)) in roots
        }

    def _of_leaves(self, dims: Mapping[Value, int]) -> tuple[int | None, ...]:
        leaves = self._graph.inputs
        return tuple(dims.get(leaf) if isinstance(leaf, Value) else None for leaf in leaves)

    def _is_of_parameter(self, dim: Dim) -> bool:
        parameters = ((v, d) for v in self._graph.parameters for d in range(len(v.shape)))
        return self._root(dim) in {self._root(each) for each in parameters}

    def _root(self, node: object) -> object:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, one: object, other: object) -> None:
        one, other = self._root(one), self._root(other)
        if one != other:
            self._parent[one] = other
