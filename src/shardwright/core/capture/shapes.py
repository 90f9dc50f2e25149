"""Captures of calls that differ only in sizes: first with fixed sizes, then with symbolic sizes."""

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
"""Number of captures with fixed sizes that precede a trace with symbolic sizes.

A trace with symbolic sizes takes twice as long, and must reproduce the graphs of the captures with
fixed sizes."""

MOST_TRACES = 3
"""Maximum number of traces with symbolic sizes.

A trace may be valid for some sizes only, if a model takes another branch for long sequences."""

MOST_KINDS = 16
"""Maximum number of call signatures whose captures are cached."""


class Captures:
    """Cached captures of one module.

    Args:
        graph: graph of the first captured call, from which later calls with other sizes are traced;
            not the graph of a micro-batch.
        state: hashable state of the module at that call; calls with equal state and arguments of
            equal sizes have equal graphs.
    """

    def __init__(self, graph: Graph, state: Hashable) -> None:
        captured = () if graph.is_term_of_batch else (graph,)
        self._by_signature = {
            _make_call_key(graph.inputs, graph.in_spec, state): _CapturesBySize(*captured)
        }

    def graph(
        self, call: CapturedCall, compute_dtype: torch.dtype | None, state: Hashable
    ) -> Graph:
        """Return the graph of a call, equal to the result of `capture`.

        Raises:
            CaptureError: if the call cannot be captured.
        """
        started = time.perf_counter()
        call_key = _make_call_key(*pytree.tree_flatten((call.args, call.kwargs)), state)
        # Taken out and put in at the end: the first entries are the least recently used.
        self._by_signature[call_key] = captures = (
            self._by_signature.pop(call_key, None) or _CapturesBySize()
        )
        for other in list(self._by_signature)[:-MOST_KINDS]:
            del self._by_signature[other]
        graph = captures.graph(call, compute_dtype)
        return replace(graph, capture_seconds=time.perf_counter() - started)


class _CapturesBySize:
    """Cached graphs of calls that differ only in the sizes of their arguments.

    Args:
        captured: graphs that are already captured with fixed sizes, latest first.
    """

    def __init__(self, *captured: Graph) -> None:
        self._captured = list(captured)
        self._traces: list[DynamicTrace] = []
        self._tries_left = MOST_TRACES

    def graph(self, call: CapturedCall, compute_dtype: torch.dtype | None) -> Graph:
        for trace in self._traces:
            if (graph := trace.graph(call)) is not None:
                return graph
        graph = self._trace_with_symbols(call, compute_dtype)
        if graph is None:
            graph = capture(
                *(call.module, call.args, call.kwargs, compute_dtype),
                autocast=call.autocast,
                original=call.original,
            )
            self._captured = [graph, *self._captured][:KNOWN]
        return graph

    def _trace_with_symbols(
        self, call: CapturedCall, compute_dtype: torch.dtype | None
    ) -> Graph | None:
        """Trace a call with symbolic sizes and return its graph.

        Return None if the trace does not reproduce the graphs with fixed sizes.
        """
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        sizes = _find_varying_sizes([leaves, *(each.inputs for each in self._captured)])
        # A size of 1 gets no symbol, since dimensions of size 1 are broadcast.
        has_symbols = min(sizes.values(), default=0) >= 2
        if len(self._captured) < KNOWN or not self._tries_left or not has_symbols:
            return None
        try:
            trace = DynamicTrace(call, compute_dtype, sizes)
        # Another try would cost as much as two captures, and most likely fail at other sizes, too.
        except CaptureError:
            self._tries_left = 0
            return None
        # None for a graph whose call violates a guard, as a trace stands for some sizes only.
        pairs = [(each, trace.graph(_rebuild_call(each, call))) for each in self._captured]
        same = {are_equal(each, graph) for each, graph in pairs if graph is not None}
        # A different graph shows a dependence on sizes that no guard expresses.
        self._tries_left = 0 if False in same else self._tries_left - 1
        if same != {True}:
            return None
        self._traces.append(trace)
        return trace.graph(call)


def are_equal(other: Graph, graph: Graph) -> bool:
    """Whether two graphs have equal fingerprints and constants."""
    pairs = zip(other.constants.values(), graph.constants.values(), strict=True)
    # A size may have become the value of a constant, as in `torch.tensor(x.shape[1])`.
    return other.fingerprint == graph.fingerprint and all(torch.equal(a, b) for a, b in pairs)


def _make_call_key(leaves: Sequence[Any], spec: pytree.TreeSpec, state: Hashable) -> Hashable:
    """Return a key that is equal for calls that differ only in sizes."""

    def without_sizes(leaf: Any) -> Hashable:
        if isinstance(leaf, Value):
            return len(leaf.shape), leaf.stored_dtype, leaf.differentiable
        if isinstance(leaf, Tensor):
            return leaf.ndim, leaf.dtype, leaf.requires_grad
        # With the type, because 1, 1.0 and True are equal.
        return type(leaf), leaf

    return state, spec, tuple(map(without_sizes, leaves))


def _find_varying_sizes(calls: Sequence[Sequence[Any]]) -> dict[tuple[int, int], int]:
    """Find the sizes that differ between calls.

    Args:
        calls: leaves of the arguments of each call.

    Returns:
        Size in the first call, by index of the leaf and dimension.
    """
    return {
        (number, dim): sizes[0]
        for number, leaves in enumerate(zip(*calls, strict=True))
        if isinstance(leaves[0], Tensor)
        for dim, sizes in enumerate(zip(*(leaf.shape for leaf in leaves), strict=True))
        if len(set(sizes)) > 1
    }


def _rebuild_call(graph: Graph, like: CapturedCall) -> CapturedCall:
    """Rebuild the call that was captured as `graph`, with tensors on the meta device."""
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
