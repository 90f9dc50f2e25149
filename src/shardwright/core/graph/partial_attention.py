"""Attention to a part of the keys, which others can be merged with: an opaque operator.

What queries get from parts of the keys adds up if each part is weighed by the exponential of the
log-sum-exp of its scores (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023). The gradient of
each part is found by itself too, from the merged result and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.core.graph.blockwise_attention import has_flash

aten = torch.ops.aten

ROWS = 256
"""Of a block of queries where no kernel of PyTorch gives the log-sum-exp of scores."""


@torch.library.custom_op("shardwright::partial_attention", mutates_args=())
def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, diagonal: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What queries get from some of the keys.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`, with as many heads or fewer.
        diagonal: query i reads the keys up to number i + `diagonal`; None: all.

    Returns:
        `[batch, heads, queries, size]` with the size of the values, 0 for queries that read no key;
        and the log-sum-exp of the scores, `[batch, heads, queries]`.
    """
    if _reads_none(query, diagonal):
        rows = query.shape[:-1]
        none = query.new_full(rows, -torch.inf, dtype=_precise(query.dtype))
        return query.new_zeros(*rows, value.shape[-1]), none
    key, value = _for_each_head(query, key, value)
    causal = not _reads_all(key, diagonal)
    if _is_fused(query, key, value, diagonal if causal else None):
        if query.is_cpu:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, scale=scale
            )
            return out.contiguous(), lse.contiguous()
        out, lse, *_ = aten._flash_attention_forward(
            *(each.transpose(1, 2) for each in (query, key, value)),
            *(None, None, query.shape[-2], key.shape[-2]),
            *(0.0, causal, False),
            scale=scale,
        )
        return out.transpose(1, 2).contiguous(), lse.contiguous()
    outs, sums = [], []
    for _, scores in _scores(query, key, diagonal if causal else None, scale):
        lse = scores.logsumexp(-1, keepdim=True)
        # Minus infinity from itself, where no key is read, would be no number.
        weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)).exp()
        outs.append((weights @ value.to(weights.dtype)).to(query.dtype))
        sums.append(lse.squeeze(-1))
    return torch.cat(outs, -2), torch.cat(sums, -1)


@torch.library.custom_op("shardwright::partial_attention_backward", mutates_args=())
def partial_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    diagonal: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the keys of a part give to the gradients of queries, keys and values.

    Args:
        gradient: of the merged result.
        out, lse: the merged result and its log-sum-exp.
        diagonal, scale: as in `partial_attention`.
    """
    if _reads_none(query, diagonal):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    heads = key.shape[1]
    key, value = _for_each_head(query, key, value)
    tensors = gradient, query, key, value, out, lse
    causal = not _reads_all(key, diagonal)
    if _is_fused(query, key, value, diagonal if causal else None):
        found = _fused_backward(tensors, causal, scale)
    else:
        found = _blocks_backward(tensors, diagonal if causal else None, scale)
    of_query, of_key, of_value = found
    return of_query.contiguous(), _of_groups(of_key, heads), _of_groups(of_value, heads)


def _fused_backward(
    tensors: Sequence[Tensor], causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, out, lse = tensors
    lse = lse.contiguous()  # The kernels take the strides of a whole tensor for granted.
    if query.is_cpu:
        found: tuple[Tensor, Tensor, Tensor]
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return found
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # Nothing was drawn.
    of_query, of_key, of_value = aten._flash_attention_backward(
        *(each.transpose(1, 2).contiguous() for each in (gradient, query, key, value, out)),
        lse,
        *(None, None, query.shape[-2], key.shape[-2]),
        *(0.0, causal, state, state),
        scale=scale,
    )
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)


def _blocks_backward(
    tensors: Sequence[Tensor], diagonal: int | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, out, lse = tensors
    precise = _precise(query.dtype)
    keys, values = key.to(precise), value.to(precise)
    of_query, of_key, of_value = [], torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in _scores(query, key, diagonal, scale):
        mine, queries = (each[..., rows, :].to(precise) for each in (gradient, query))
        weights = (scores - lse[..., rows, None]).exp()
        of_value += weights.mT @ mine
        mean = (mine * out[..., rows, :].to(precise)).sum(-1, keepdim=True)
        of_scores = weights * (mine @ values.mT - mean) * _scale(query, scale)
        of_query.append((of_scores @ keys).to(query.dtype))
        of_key += of_scores.mT @ queries
    return torch.cat(of_query, -2), of_key.to(key.dtype), of_value.to(value.dtype)


def _scores(
    query: Tensor, key: Tensor, diagonal: int | None, scale: float | None
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of queries with their scores, minus infinity where a key is not read."""
    precise, (queries, keys) = _precise(query.dtype), (query.shape[-2], key.shape[-2])
    for first in range(0, queries, ROWS):
        rows = slice(first, min(first + ROWS, queries))
        scores = query[..., rows, :].to(precise) @ key.to(precise).mT * _scale(query, scale)
        if diagonal is not None:
            pairs = query.new_ones(rows.stop - rows.start, keys, dtype=torch.bool)
            scores.masked_fill_(~pairs.tril(diagonal + first), -torch.inf)
        yield rows, scores


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _reads_none(query: Tensor, diagonal: int | None) -> bool:
    return diagonal is not None and diagonal <= -query.shape[-2]


def _reads_all(key: Tensor, diagonal: int | None) -> bool:
    return diagonal is None or diagonal >= key.shape[-2] - 1


def _is_fused(query: Tensor, key: Tensor, value: Tensor, diagonal: int | None) -> bool:
    """Whether a flash kernel takes these: all pairs, or a square whose upper half is not read."""
    if diagonal is not None and (diagonal or query.shape[-2] != key.shape[-2]):
        return False
    if query.is_cpu:
        return value.shape[-1] == query.shape[-1]
    return has_flash(query, value)


def _for_each_head(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Keys and values once for each head of queries."""
    groups = query.shape[1] // tensors[0].shape[1]
    return [each.repeat_interleave(groups, 1) if groups > 1 else each for each in tensors]


def _of_groups(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of keys or values that several heads of queries read."""
    groups = gradient.shape[1] // heads
    if groups == 1:
        return gradient.contiguous()
    batch, _, *rest = gradient.shape
    return gradient.reshape(batch, heads, groups, *rest).sum(2)


@partial_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, diagonal: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    out = query.new_empty(*rows, value.shape[-1])
    return out, query.new_empty(rows, dtype=_precise(query.dtype))


@partial_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
