"""A call traced once with symbols for some sizes, and the graphs of calls of other sizes from it.

What the Python of a model decides by a size is a guard of the trace, which stands only for calls
that fulfil all of them.
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
    """A call traced with symbols for sizes.

    Args:
        varying: leaves of the call's arguments, and the dimensions of theirs that get symbols.

    Raises:
        CaptureError: if it cannot be traced so.
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
        self._guards = ShapeGuards(_tensors(node.meta["val"] for node in self._inputs))

    def graph(self, call: CapturedCall) -> Graph | None:
        """The graph of a call; None if the trace does not stand for it."""
        leaves, mode = pytree.tree_leaves((call.args, call.kwargs)), self._guards.mode
        inputs = {
            node: _fake(mode, leaf, node.meta["val"]) if isinstance(leaf, Tensor) else leaf
            for node, leaf in zip(self._inputs, leaves, strict=True)
        }
        if not self._guards.hold(_tensors(inputs.values())):
            return None
        try:
            with isolate_capture():
                return canonical(_with_numbers(self._trace, inputs, mode), call)
        except Exception:  # A capture of the call itself says what is wrong.
            return None


def _tensors(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, Tensor)]


def _fake(mode: FakeTensorMode, tensor: Tensor, like: Tensor) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=like.dtype, device="cpu")


def _with_numbers(traced: Trace, inputs: Mapping[fx.Node, Any], mode: FakeTensorMode) -> Trace:
    """The trace with the sizes of `inputs` in place of symbols: what computes with them is done."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    with torch.no_grad(), mode:
        for node in traced.graph.nodes:
            value = inputs.get(node, node.meta.get("val"))
            if node.op == "call_function":
                value = _run(node, copies)
            if node.op == "call_function" and isinstance(value, (int, float)):
                copies[node] = value
            elif node.target is aten.slice.Tensor and value.shape == node_shape(
                source := copies[node.all_input_nodes[0]]
            ):
                copies[node] = source  # Python leaves it out where it knows the size.
            else:
                copy = copies[node] = graph.node_copy(node, copies.__getitem__)
                copy.name, copy.meta["val"] = node.name, value
    return replace(traced, graph=graph, signature=traced.signature.copy())


def _run(node: fx.Node, copies: Mapping[fx.Node, Any]) -> Any:
    """What an operator gives of tensors that hold no numbers."""

    def value(source: fx.Node) -> Any:
        copy = copies[source]
        if not isinstance(copy, fx.Node):
            return copy
        # What changes the shape of a tensor in place shall leave that of its node.
        return copy.meta["val"].detach() if changes else copy.meta["val"]

    target: Any = node.target
    changes = isinstance(target, OpOverload) and schema_of(target).is_mutable
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    return target(*args, **kwargs)
