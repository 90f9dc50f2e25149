"""Calls that differ only in sizes: each is captured by itself, until one trace stands for many."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.capture import capture
from shardwright.core.capture.dynamic_trace import DynamicTrace
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError

KNOWN = 2
"""So many calls are captured by themselves before one is traced with symbols for the sizes in which
they differ, which takes twice as long. It must give the graphs that are known."""

MOST_TRACES = 3
"""So often is tried to trace with symbols: a trace may stand for some sizes only, as where a model
takes another branch for long sequences."""

MOST_KINDS = 16
"""Of so many kinds of calls traces are kept."""


class Captures:
    """The captures of one module.

    Args:
        graph: of a call that was captured; that of a micro-batch within its batch is no example.
        state: of the module then: equal for calls that differ in nothing else.
    """

    def __init__(self, graph: Graph, state: Hashable) -> None:
        known = () if graph.is_term_of_batch else (graph,)
        self._kinds = {_kind(graph.inputs, graph.in_spec, state): _Kind(*known)}

    def graph(
        self, call: CapturedCall, compute_dtype: torch.dtype | None, state: Hashable
    ) -> Graph:
        """The graph of a call, as `capture` gives it.

        Raises:
            CaptureError: if it cannot be captured.
        """
        started = time.perf_counter()
        kind = _kind(*pytree.tree_flatten((call.args, call.kwargs)), state)
        self._kinds[kind] = captures = self._kinds.pop(kind, None) or _Kind()
        for other in list(self._kinds)[:-MOST_KINDS]:
            del self._kinds[other]
        graph = captures.graph(call, compute_dtype)
        return replace(graph, capture_seconds=time.perf_counter() - started)


class _Kind:
    """The graphs of calls that differ only in sizes.

    Args:
        known: of calls that were captured by themselves, the last first.
    """

    def __init__(self, *known: Graph) -> None:
        self._known = list(known)
        self._traces: list[DynamicTrace] = []
        self._tries_left = MOST_TRACES

    def graph(self, call: CapturedCall, compute_dtype: torch.dtype | None) -> Graph:
        for trace in self._traces:
            if (graph := trace.graph(call)) is not None:
                return graph
        graph = self._of_new_trace(call, compute_dtype)
        if graph is None:
            graph = capture(
                call.module, call.args, call.kwargs, compute_dtype, autocast=call.autocast
            )
            self._known = [graph, *self._known][:KNOWN]
        return graph

    def _of_new_trace(self, call: CapturedCall, compute_dtype: torch.dtype | None) -> Graph | None:
        """None if there is no trace that gives the known graphs."""
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        sizes = _varying([leaves, *(known.inputs for known in self._known)])
        # A size of 1 gets no symbol, as tensors of that size are repeated.
        if len(self._known) < KNOWN or not self._tries_left or min(sizes.values(), default=0) < 2:
            return None
        try:
            trace = DynamicTrace(call, compute_dtype, sizes)
        except CaptureError:
            self._tries_left = 0
            return None
        found = [(known, trace.graph(_call_of(known, call))) for known in self._known]
        same = {are_equal(known, graph) for known, graph in found if graph is not None}
        self._tries_left = 0 if False in same else self._tries_left - 1
        if same != {True}:
            return None
        self._traces.append(trace)
        return trace.graph(call)


def are_equal(known: Graph, graph: Graph) -> bool:
    pairs = zip(known.constants.values(), graph.constants.values(), strict=True)
    return known.fingerprint == graph.fingerprint and all(torch.equal(a, b) for a, b in pairs)


def _kind(leaves: Sequence[Any], spec: pytree.TreeSpec, state: Hashable) -> Hashable:
    """What calls have in common that differ only in sizes."""

    def without_sizes(leaf: Any) -> Hashable:
        if isinstance(leaf, Value):
            return len(leaf.shape), leaf.stored_dtype, leaf.differentiable
        if isinstance(leaf, Tensor):
            return leaf.ndim, leaf.dtype, leaf.requires_grad
        return type(leaf), leaf

    return state, spec, tuple(map(without_sizes, leaves))


def _varying(calls: Sequence[Sequence[Any]]) -> dict[tuple[int, int], int]:
    """The sizes that the leaves of the first call have and not those of all others, by the number
    of the leaf and its dimension."""
    return {
        (number, dim): sizes[0]
        for number, leaves in enumerate(zip(*calls, strict=True))
        if isinstance(leaves[0], Tensor)
        for dim, sizes in enumerate(zip(*(leaf.shape for leaf in leaves), strict=True))
        if len(set(sizes)) > 1
    }


def _call_of(graph: Graph, like: CapturedCall) -> CapturedCall:
    """The call that was captured as `graph`, on tensors without values."""
    leaves = [
        torch.empty(
            leaf.shape, dtype=leaf.stored_dtype, device="meta", requires_grad=leaf.differentiable
        )
        if isinstance(leaf, Value)
        else leaf
        for leaf in graph.inputs
    ]
    args, kwargs = pytree.tree_unflatten(leaves, graph.in_spec)
    return replace(like, args=args, kwargs=kwargs)
