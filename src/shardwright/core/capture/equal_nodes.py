"""Nodes of a graph that compute equal values, found by their operators and arguments."""

from __future__ import annotations

import torch
from torch import fx

from shardwright.core.torch_internals.operators import OpOverload


class EqualNodes:
    """Finder of common subexpressions: nodes with equal operators and arguments.

    Args:
        graph: a graph without in-place operators.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._first: dict[fx.Node, fx.Node] = {}
        self._by_text: dict[str, fx.Node] = {}
        for node in graph.nodes:
            self.first(node)

    def first(self, node: fx.Node) -> fx.Node:
        """Return the first node seen that computes the same value as `node`."""
        if node not in self._first:
            target = node.target
            # Two draws differ, even with equal arguments.
            random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
            equal = node
            if isinstance(target, OpOverload) and not random:
                inputs = fx.map_arg((node.args, node.kwargs), self.first)
                # Text as the key, since lists are not hashable; nodes are printed by unique names.
                equal = self._by_text.setdefault(f"{target} {inputs}", node)
            self._first[node] = equal
        return self._first[node]
