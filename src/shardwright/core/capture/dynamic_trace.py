"""Trace of a call with symbolic sizes, from which graphs for other sizes are derived.

Each branch of Python on a size becomes a guard. The trace is valid for a call that satisfies all of
its guards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.fake_copy import isolate_capture
from shardwright.core.capture.fx_nodes import node_shape
from shardwright.core.capture.signature import placeholders
from shardwright.core.capture.trace import Trace, canonical, trace
from shardwright.core.graph.graph import Graph
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.shape_guards import ShapeGuards
from shardwright.core.torch_internals.tensors import FakeTensorMode

aten = torch.ops.aten


class DynamicTrace:
    """Trace of a call with symbolic sizes.

    Args:
        call: the module and example arguments.
        compute_dtype: dtype to which float32 parameters and inputs are cast; None for no cast.
        varying: (leaf index, dimension) of each symbolic size in the arguments of the call.

    Raises:
        CaptureError: if the call cannot be traced with symbolic sizes.
    """

    def __init__(
        self,
        call: CapturedCall,
        compute_dtype: torch.dtype | None,
        varying: Collection[tuple[int, int]],
    ) -> None:
        with isolate_capture():
            self._trace = trace(call, compute_dtype, varying)
        nodes = placeholders(self._trace.graph)
        self._inputs = [nodes[name] for name in self._trace.signature.inputs]
        self._guards = ShapeGuards(_filter_tensors(node.meta["val"] for node in self._inputs))

    def graph(self, call: CapturedCall) -> Graph | None:
        """Return the graph of a call with other sizes; None if the call violates a guard of the
        trace."""
        leaves, mode = pytree.tree_leaves((call.args, call.kwargs)), self._guards.mode
        inputs = {
            node: _make_fake_with_dtype_of(mode, leaf, node.meta["val"])
            if isinstance(leaf, Tensor)
            else leaf
            for node, leaf in zip(self._inputs, leaves, strict=True)
        }
        # Guards first: beyond them, the traced operators may be those of another branch of
        # `forward`.
        if not self._guards.hold(_filter_tensors(inputs.values())):
            return None
        try:
            with isolate_capture():
                return canonical(_substitute_sizes(self._trace, inputs, mode), call)
        except Exception:  # The caller captures the call itself, which reports the error.
            return None


def _filter_tensors(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, Tensor)]


def _make_fake_with_dtype_of(mode: FakeTensorMode, tensor: Tensor, like: Tensor) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=like.dtype, device="cpu")


def _substitute_sizes(traced: Trace, inputs: Mapping[fx.Node, Any], mode: FakeTensorMode) -> Trace:
    """Return the trace with numbers in place of symbols; arithmetic on sizes is evaluated.

    Args:
        traced: trace with symbolic sizes.
        inputs: fake tensors or plain values of the placeholders.
        mode: the `FakeTensorMode` of the fake tensors.
    """
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    with torch.no_grad(), mode:
        for node in traced.graph.nodes:
            # Parameters and buffers keep their fake tensors; only sizes of inputs differ.
            value = inputs.get(node, node.meta.get("val"))
            if node.op == "call_function":
                value = _run_on_fakes(node, copies)
            # Arithmetic on sizes becomes a number in the arguments of its readers.
            if node.op == "call_function" and isinstance(value, (int, float)):
                copies[node] = value
            elif node.target is aten.slice.Tensor and value.shape == node_shape(
                source := copies[node.all_input_nodes[0]]
            ):
                copies[node] = source  # With a known size, Python does not trace a full slice.
            else:
                copy = copies[node] = graph.node_copy(node, copies.__getitem__)
                # The signature refers to placeholders by name.
                copy.name, copy.meta["val"] = node.name, value
    return replace(traced, graph=graph, signature=traced.signature.copy())


def _run_on_fakes(node: fx.Node, copies: Mapping[fx.Node, Any]) -> Any:
    """Run an operator on the fake tensors of its arguments in the new graph."""

    def value(source: fx.Node) -> Any:
        copy = copies[source]
        if not isinstance(copy, fx.Node):
            return copy
        # An operator that changes the shape in place must not change the node's fake tensor.
        return copy.meta["val"].detach() if changes else copy.meta["val"]

    target: Any = node.target
    changes = isinstance(target, OpOverload) and schema_of(target).is_mutable
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    return target(*args, **kwargs)
