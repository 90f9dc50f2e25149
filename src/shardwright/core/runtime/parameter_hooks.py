"""Move hooks of parameters to the DTensors that replace them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals.hooks import accumulation_hooks, gradient_hooks

Shard = Callable[[Tensor], Tensor]
"""Function that shards a full tensor as a DTensor."""

Hook = Callable[[Any], Any]


def has_hooks(parameter: Tensor) -> bool:
    """Whether `parameter` has gradient or post-accumulation hooks."""
    return bool(gradient_hooks(parameter) or accumulation_hooks(parameter))


def move_hooks(stored: Tensor, parameter: Tensor, shard: Shard) -> None:
    """Register the hooks of the user's `parameter` on the sharded parameter that replaces it.

    Gradient hooks receive the full gradient, and their result is sharded; post-accumulation hooks
    receive the sharded parameter. A hook that is removed from `parameter` no longer runs.

    Args:
        stored: the sharded parameter of the planned model.
        parameter: the user's parameter.
        shard: shards a full gradient like `stored`.
    """
    # PyTorch registers no hooks on tensors that require no gradient.
    if not stored.requires_grad:
        return
    for hooks, register in (
        (gradient_hooks(parameter), stored.register_hook),
        (accumulation_hooks(parameter), stored.register_post_accumulate_grad_hook),
    ):
        for number in hooks:
            register(_adapt_hook_to_sharded_gradient(hooks, number, shard))  # type: ignore[no-untyped-call]


def _adapt_hook_to_sharded_gradient(hooks: Mapping[int, Hook], hook_id: int, shard: Shard) -> Hook:
    def converted(tensor: Tensor) -> Tensor | None:
        # The user has removed the hook through its handle, which refers to the original parameter.
        if hook_id not in hooks:
            return None
        # Post-accumulation hooks get the parameter, a leaf; gradient hooks get the gradient.
        if tensor.is_leaf or not isinstance(tensor, DTensor):
            result: Tensor | None = hooks[hook_id](tensor)
            return result
        result = hooks[hook_id](tensor.full_tensor())
        return None if result is None else shard(result)

    return converted
