"""Capture of `flex_attention` as the operators of its definition, which have sharding rules.

Score modifications and masks are functions of one score and its indices. Capture vectorizes them
over all scores and traces the result, so that batch, heads and queries can be sharded as in
attention composed of `matmul` and `softmax`. The scores of all pairs are materialized, as in
`flex_attention` without `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import log
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from shardwright.core.torch_internals.flex import flex_gradients_on_cpu, uncompiled_flex_attention

FLEX_ATTENTION = torch.ops.higher_order.flex_attention
"""The operator that `torch.nn.attention.flex_attention.flex_attention` calls."""


def static_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute flex attention from the full score matrix, with ordinary operators.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch or 1, key-value heads, keys, size]`.
        score_mod: function of a score and its batch, head, query and key index.
        block_mask: fields of a `BlockMask`; the last is the mask as a function of four indices.
        scale: factor of the scores.
        kernel_options: unused, options of compiled kernels.
        score_mod_other_buffers, mask_mod_other_buffers: further arguments of `score_mod` and of the
            mask function of `block_mask`.

    Returns:
        The output, and the log-sum-exp and maximum of each query's scores to base 2.
    """
    # Query heads per key-value head, as in grouped-query attention.
    groups = query.shape[1] // key.shape[1]
    # Scores in at least float32, as in PyTorch's uncompiled `flex_attention`.
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys, values = (
        x.expand(query.shape[0], -1, -1, -1).repeat_interleave(groups, 1)
        if groups > 1
        else x.expand(query.shape[0], -1, -1, -1)
        for x in (key, value)
    )
    scores = (query.to(dtype) @ keys.to(dtype).transpose(-2, -1)) * scale
    indices = [torch.arange(size, device=query.device) for size in scores.shape]
    score = _vectorize_over_scores(score_mod, (0,), len(score_mod_other_buffers))
    mask = _vectorize_over_scores(block_mask[-1], (), len(mask_mod_other_buffers))
    with _ScalarTensorIndexing():
        is_kept = mask(*indices, *mask_mod_other_buffers)
        scores = score(scores, *indices, *score_mod_other_buffers).to(dtype)
    scores = torch.where(is_kept, scores, -float("inf"))
    # A query without keys has the output 0.
    is_masked = (scores == -float("inf")).all(-1, keepdim=True)
    # A softmax over -inf alone is NaN, and so is its gradient, even if it is masked afterwards.
    finite = scores.masked_fill(is_masked, 0)
    probabilities = finite.softmax(-1).masked_fill(is_masked, 0)
    out = probabilities.to(query.dtype) @ values.to(query.dtype)
    sums = finite.logsumexp(-1).masked_fill(is_masked.squeeze(-1), -float("inf"))
    return out, sums / log(2), scores.amax(-1) / log(2)


@contextmanager
def traceable_flex_attention() -> Iterator[None]:
    """Return a context in which capture traces `flex_attention` and the creation of its masks."""
    with (
        patch.object(torch_flex, "create_mask", _create_mask),
        flex_gradients_on_cpu(),
        uncompiled_flex_attention(),
        # Models call `torch.compile(flex_attention)`, which cannot be traced.
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextmanager
def flex_attention_by_operators() -> Iterator[None]:
    """Return a context in which `flex_attention` runs as `static_flex_attention`."""
    with traceable_flex_attention(), _DecomposeFlexAttention():
        yield


class _DecomposeFlexAttention(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = static_flex_attention if func is FLEX_ATTENTION else func
        return function(*args, **(kwargs or {}))


def _create_mask(mod_fn: Callable[..., Tensor], *sizes: int | None, device: Any = None) -> Tensor:
    """Replace `create_mask`: return the boolean mask `[batch, heads, queries, keys]`."""
    # The device may be the fifth positional argument of `create_mask`.
    *counts, device = (*sizes, device)[:5]
    # None for batch or heads stands for one mask for all.
    indices = [torch.arange(count or 1, device=device) for count in counts]
    with _ScalarTensorIndexing():
        mask: Tensor = _vectorize_over_scores(mod_fn, (), 0)(*indices)
    return mask


def _vectorize_over_scores(
    function: Callable[..., Tensor], scores: tuple[int, ...], num_others: int
) -> Callable[..., Tensor]:
    """Vectorize a function of one attention score over `[batch, heads, queries, keys]`.

    Args:
        function: function of an optional score, its four indices, and other arguments.
        scores: `vmap` dimensions of the score: `(0,)`, or () for a function without a score.
        num_others: number of other arguments, which all scores share.
    """
    # The innermost `vmap` is over keys, so that the results are [batch, heads, queries, keys].
    for dim in (3, 2, 1, 0):
        indices = tuple(0 if i == dim else None for i in range(4))
        function = torch.vmap(function, in_dims=(*scores, *indices, *(None,) * num_others))
    return function


class _ScalarTensorIndexing(TorchFunctionMode):
    """Mode in which `x[i]` with a scalar tensor `i` calls `aten.index` instead of reading `i`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # PyTorch reads the value of a scalar tensor index, which `torch.vmap` does not allow.
        if func is Tensor.__getitem__:
            x, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(each, Tensor) and each.ndim == 0 for each in indices) and all(
                isinstance(each, Tensor | int) for each in indices
            ):
                tensors = [
                    each if isinstance(each, Tensor) else torch.tensor(each, device=x.device)
                    for each in indices
                ]
                return torch.ops.aten.index.Tensor(x, tensors)
        return func(*args, **(kwargs or {}))
