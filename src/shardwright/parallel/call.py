"""The arguments of a call of a parallel module: what its program depends on and was planned for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.errors import PlanError
from shardwright.graph.graph import Graph, Value
from shardwright.torch_internals import pytree


def key_of(leaf: Any) -> Any:
    """What the program depends on of one argument."""
    if isinstance(leaf, Value):
        return leaf.shape, leaf.stored_dtype, leaf.differentiable
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad and torch.is_grad_enabled()
    return type(leaf), leaf


def check_planned_call(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises:
    PlanError: if a call has other arguments than `graph`, or tensors of other dtypes.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if spec != graph.in_spec:
        raise PlanError(
            f"called with {_call(args, kwargs)}, but planned for other arguments: "
            f"{', '.join(str(leaf) for leaf in graph.inputs)}"
        )
    for wanted, leaf in zip(graph.inputs, leaves, strict=True):
        if not isinstance(wanted, Value):
            if type(leaf) is not type(wanted) or leaf != wanted:
                raise PlanError(f"an argument is {leaf!r}, planned for {wanted!r}")
        elif not isinstance(leaf, Tensor):
            raise PlanError(f"input {wanted.name!r} is {leaf!r}, planned for a tensor")
        elif leaf.dtype != wanted.stored_dtype:
            raise PlanError(
                f"input {wanted.name!r} has dtype {leaf.dtype}, planned for {wanted.stored_dtype}"
            )
        elif leaf.ndim != len(wanted.shape):
            raise PlanError(
                f"input {wanted.name!r} is {tuple(leaf.shape)}, planned for {wanted.shape}: every "
                "rank is given the whole batch"
            )


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    count = f"{len(args)} positional argument{'s' if len(args) != 1 else ''}"
    return f"{count} and keywords {sorted(kwargs)}" if kwargs else count
