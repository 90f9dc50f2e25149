"""A graph in float64, so that a sharded program and one device agree to the last digits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.graph.graph import Graph, Op, Value
from shardwright.torch_internals import pytree


def graph_in_float64(graph: Graph) -> Graph:
    """`graph` with every floating-point value, constant and dtype argument converted to float64.

    Explicit casts of the model (`x.to(torch.float32)` in a norm) become casts to float64.
    """
    new = {
        value: replace(value, dtype=_double_dtype(value.dtype), outer_dtype=None)
        for value in graph.values()
    }

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return new[leaf]
        return _double_dtype(leaf) if isinstance(leaf, torch.dtype) else leaf

    def convert_op(op: Op) -> Op:
        args, kwargs = pytree.tree_map(convert, (op.args, op.kwargs))
        return replace(op, args=args, kwargs=kwargs, outputs=tuple(new[v] for v in op.outputs))

    return replace(
        graph,
        ops=tuple(convert_op(op) for op in graph.ops),
        inputs=tuple(convert(leaf) for leaf in graph.inputs),
        outputs=tuple(convert(leaf) for leaf in graph.outputs),
        parameters=tuple(new[v] for v in graph.parameters),
        buffers=tuple(new[v] for v in graph.buffers),
        constants={new[v]: in_float64(tensor) for v, tensor in graph.constants.items()},
        updates=tuple((new[a], new[b]) for a, b in graph.updates),
        loss=None if graph.loss is None else new[graph.loss],
        other_losses=tuple(new[v] for v in graph.other_losses),
    )


def in_float64(tensor: Tensor) -> Tensor:
    """A detached copy, in float64 if it is floating-point."""
    copied = tensor.detach().clone()
    return copied.double() if copied.is_floating_point() else copied


def _double_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype
