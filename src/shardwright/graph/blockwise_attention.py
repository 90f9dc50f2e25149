"""Attention in a sliding window as one opaque operator.

Queries are computed block by block, each with the keys that its window reaches, so that neither
scores nor a mask of all pairs are held; the backward pass computes each block again. On GPUs one
flash kernel does all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.torch_internals.dispatch import autograd_in_operators

aten = torch.ops.aten

LEAST_ROWS = 256
"""Of a block of queries; those of wide windows have a quarter of the window."""


@torch.library.custom_op("shardwright::windowed_attention", mutates_args=())
def attention_in_window(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, start: int
) -> tuple[Tensor, Tensor]:
    """See `custom_ops.windowed_attention`; with the log-sum-exp of the scores of flash kernels,
    `[batch, heads, queries]`."""
    tensors = _in_sequence((query, key, value), start)
    if _has_flash(query, value):
        out, lse, *_ = aten._flash_attention_forward(
            *_transposed(tensors), *_lengths(tensors), 0.0, False, False, **_flash(window, scale)
        )
        return out.transpose(1, 2), lse
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for places in blocks(query.shape[-2], tensors[1].shape[-2], window):
        out[..., places[0], :] = _block(_parts(tensors, places), window, scale)
    return out, query.new_zeros(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("shardwright::windowed_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int,
    scale: float | None,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    results = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    tensors, found = (_in_sequence(each, start) for each in ((query, key, value), results))
    if _has_flash(query, value):
        read = _transposed((gradient, *tensors, out))
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # Nothing was drawn.
        gradients = aten._flash_attention_backward(
            *read, lse, *_lengths(tensors), 0.0, False, state, state, **_flash(window, scale)
        )
        for result, each in zip(found, gradients, strict=True):
            result.copy_(each.transpose(1, 2))
        return results
    for places in blocks(query.shape[-2], tensors[1].shape[-2], window):
        with autograd_in_operators():
            parts = [part.detach().requires_grad_() for part in _parts(tensors, places)]
            block = _block(parts, window, scale)
        terms = torch.autograd.grad(block, parts, gradient[..., places[0], :])
        for result, term in zip(_parts(found, places), terms, strict=True):
            result += term
    return results


Places = tuple[slice, slice, slice]
"""A part of the queries, and twice that of keys and values."""


def blocks(queries: int, keys: int, window: int) -> Iterator[Places]:
    """Blocks of queries, the last of which stands at the last key, and the keys that each reads."""
    before, rows = keys - queries, max(window // 4, LEAST_ROWS)
    for first in range(0, queries, rows):
        end = min(first + rows, queries)
        read = slice(max(0, before + first - window + 1), before + end)
        yield slice(first, end), read, read


def _parts(tensors: Sequence[Tensor], places: Places) -> list[Tensor]:
    return [each[..., place, :] for each, place in zip(tensors, places, strict=True)]


def _block(tensors: Sequence[Tensor], window: int, scale: float | None) -> Tensor:
    """Attention of queries that end with the last key."""
    query, key, value = tensors
    rows, columns = query.shape[-2], key.shape[-2]
    mask = query.new_ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    mask = mask.triu(columns - rows - window + 1)
    groups = query.shape[1] // key.shape[1]
    if not query.is_cpu and groups > 1:
        # Elsewhere kernels with masks take as many heads of keys as of queries.
        key, value, groups = *(each.repeat_interleave(groups, 1) for each in (key, value)), 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=groups > 1
    )


def _in_sequence(tensors: Sequence[Tensor], start: int) -> list[Tensor]:
    """Queries, keys and values without those that would lie before the first position."""
    query, *others = tensors
    absent = max(0, others[0].shape[-2] - query.shape[-2] - start)
    return [query, *(each[..., absent:, :] for each in others)]


def _has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's flash kernel, which knows windows, takes these."""
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and size == value.shape[-1] <= 256
        and size % 8 == 0
    )


def _flash(window: int, scale: float | None) -> dict[str, Any]:
    """How far back queries look besides their own position, which stands at the last key's."""
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}


def _transposed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As flash kernels take them: `[batch, positions, heads, size]`."""
    return [each.transpose(1, 2) for each in tensors]


def _lengths(tensors: Sequence[Tensor]) -> tuple[None, None, int, int]:
    """Of sequences that are not packed."""
    return None, None, tensors[0].shape[-2], tensors[1].shape[-2]


@attention_in_window.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, start: int
) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


@_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int,
    scale: float | None,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale, ctx.start = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    options = ctx.window, ctx.scale, ctx.start
    return (*_backward(gradient, *ctx.saved_tensors, *options), None, None, None)


attention_in_window.register_autograd(_gradients, setup_context=_save)
