"""Interpret a graph on one device, as the reference for lowered programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError


def interpret(
    graph: Graph,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """Run a captured module on one device.

    Args:
        graph: the captured module.
        parameters, buffers: the values of parameters and buffers, by name in the graph.
        args, kwargs: arguments with the structure and shapes of the captured call. Operators
            without tensor inputs create tensors on the device of the first tensor.

    Returns:
        The result of the module, and the new values of its buffers by name.

    Raises:
        CaptureError: if the structure or the shapes of the call differ from the captured call.
    """
    leaves = check_call(graph, args, dict(kwargs or {}))
    tensors: dict[Value, Tensor] = {v: parameters[v.name] for v in graph.parameters}
    tensors |= {v: buffers[v.name] for v in graph.buffers}
    tensors |= {v: t for v, t in zip(graph.inputs, leaves, strict=True) if isinstance(v, Value)}
    # The operators of the graph start after the casts of parameters and inputs.
    tensors |= {v: t.to(v.dtype) for v, t in tensors.items() if v.outer_dtype is not None}
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    tensors |= {v: t.to(device) for v, t in graph.constants.items()}
    for op in graph.ops:
        for value, result in zip(op.outputs, run(op, tensors, device), strict=True):
            tensors[value] = result
    outputs = [tensors[v] if isinstance(v, Value) else v for v in graph.outputs]
    # Detached, as a buffer would keep the autograd graph of the call alive.
    updates = {buffer.name: tensors[new].detach() for buffer, new in graph.updates}
    return graph.result(outputs), updates


def run(op: Op, tensors: Mapping[Value, Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Run one operator and return its output tensors.

    Args:
        op: the operator.
        tensors: a tensor for each input of `op`.
        device: device on which operators without tensor inputs create their outputs.
    """
    args, kwargs = op.arguments(tensors.__getitem__)
    # The graph may have the device on which it was captured, such as meta.
    if op.takes_device:
        kwargs["device"] = device
    result = op.target(*args, **kwargs)
    if isinstance(result, Tensor):
        return (result,)
    # None and numbers among the results are no values of the graph.
    return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))


def check_call(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Flatten the arguments of a call that matches the captured call.

    Raises:
        CaptureError: if structure, shapes or constants differ from the captured call.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if spec != graph.in_spec:
        raise CaptureError(
            f"the model was captured for arguments of structure {graph.in_spec}, but called with"
            f" {spec}\npass arguments of the captured structure, or capture the model again"
        )
    for value, leaf in zip(graph.inputs, leaves, strict=True):
        if isinstance(value, Value):
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != value.shape:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
                raise CaptureError(
                    f"input {value.name!r}: the model was captured for shape {value.shape}, but"
                    f" called with {got}\npass a tensor of shape {value.shape}, or capture the"
                    " model again"
                )
        # A tensor would compare its elements.
        elif isinstance(leaf, Tensor) or leaf != value:
            raise CaptureError(
                f"the model was captured for the argument {value!r}, but called with {leaf!r}\n"
                f"pass {value!r}, or capture the model again"
            )
    return leaves
