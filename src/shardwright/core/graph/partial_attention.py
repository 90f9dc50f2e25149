"""Attention over a part of the keys, as an opaque operator whose results can be merged.

The full result is the sum of the results for parts of the keys, each weighted by the exponential of
the log-sum-exp of its scores, divided by the sum of the weights (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Liu, Zaharia and Abbeel, "Ring Attention with Blockwise
Transformers", 2023). Gradients are also computed separately for each part, from the merged result
and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.core.graph.blockwise_attention import has_flash

aten = torch.ops.aten

QUERIES_PER_BLOCK = 256
"""Number of queries per block if no kernel of PyTorch returns the log-sum-exp of the scores."""


@torch.library.custom_op("shardwright::partial_attention", mutates_args=())
def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, diagonal: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention over a part of the keys, to be merged with other parts by log-sum-exp.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`; may have fewer heads, each shared by a group of
            adjacent query heads.
        diagonal: query i reads the keys up to index i + `diagonal`; None for all keys.
        scale: factor of the scores, by default `size ** -0.5`.

    Returns:
        The attention output, `[batch, heads, queries, size]` with the size of the values, 0 for
        queries that read no key; and the log-sum-exp of the scores, `[batch, heads, queries]`.
    """
    if _reads_no_key(query, diagonal):
        rows = query.shape[:-1]
        # Merged with other parts, a log-sum-exp of -inf has weight 0.
        empty_lse = query.new_full(rows, -torch.inf, dtype=_choose_compute_dtype(query.dtype))
        return query.new_zeros(*rows, value.shape[-1]), empty_lse
    key, value = _repeat_heads(query, key, value)
    causal = not _reads_all_keys(key, diagonal)
    if _can_use_flash(query, key, value, diagonal if causal else None):
        if query.is_cpu:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, scale=scale
            )
            # Contiguous, as `register_fake` declares the results; flash kernels return other
            # strides.
            return out.contiguous(), lse.contiguous()
        # No cumulative lengths, as sequences are not packed; no dropout, the causal mask, no debug
        # mask.
        out, lse, *_ = aten._flash_attention_forward(
            *(each.transpose(1, 2) for each in (query, key, value)),
            *(None, None, query.shape[-2], key.shape[-2]),
            *(0.0, causal, False),
            scale=scale,
        )
        return out.transpose(1, 2).contiguous(), lse.contiguous()
    outs, sums = [], []
    for _, scores in _iterate_score_blocks(query, key, diagonal if causal else None, scale):
        lse = scores.logsumexp(-1, keepdim=True)
        # A query that reads no key has a log-sum-exp of -inf, and -inf - -inf would be NaN.
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
    """Compute the gradients of query, key and value that are due to a part of the keys.

    Args:
        gradient: gradient of the attention output, merged over all parts.
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`; may have fewer heads, each shared by a group of
            adjacent query heads.
        out, lse: the attention output and its log-sum-exp, merged over all parts.
        diagonal: query i reads the keys up to index i + `diagonal`; None for all keys.
        scale: factor of the scores, by default `size ** -0.5`.
    """
    if _reads_no_key(query, diagonal):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    heads = key.shape[1]
    key, value = _repeat_heads(query, key, value)
    tensors = gradient, query, key, value, out, lse
    causal = not _reads_all_keys(key, diagonal)
    if _can_use_flash(query, key, value, diagonal if causal else None):
        gradients = _flash_backward(tensors, causal, scale)
    else:
        gradients = _blockwise_backward(tensors, diagonal if causal else None, scale)
    grad_query, grad_key, grad_value = gradients
    return (
        grad_query.contiguous(),
        _sum_over_head_groups(grad_key, heads),
        _sum_over_head_groups(grad_value, heads),
    )


def _flash_backward(
    tensors: Sequence[Tensor], causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, out, lse = tensors
    lse = lse.contiguous()  # The kernels ignore its strides.
    if query.is_cpu:
        gradients: tuple[Tensor, Tensor, Tensor]
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return gradients
    # The state of the random generator is only read if there is dropout.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grad_query, grad_key, grad_value = aten._flash_attention_backward(
        *(each.transpose(1, 2).contiguous() for each in (gradient, query, key, value, out)),
        lse,
        *(None, None, query.shape[-2], key.shape[-2]),
        *(0.0, causal, state, state),
        scale=scale,
    )
    return grad_query.transpose(1, 2), grad_key.transpose(1, 2), grad_value.transpose(1, 2)


def _blockwise_backward(
    tensors: Sequence[Tensor], diagonal: int | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward pass of FlashAttention (Dao et al., 2022, algorithm 4), block by block.

    With P = exp(S - lse): dV = P' dO, dS = P * (dO V' - rowsum(dO * O)), dQ = dS K, dK = dS' Q.
    """
    gradient, query, key, value, out, lse = tensors
    compute_dtype = _choose_compute_dtype(query.dtype)
    keys, values = key.to(compute_dtype), value.to(compute_dtype)
    # A key gets a gradient from every block of queries, which are summed in the compute dtype.
    grad_query, grad_key, grad_value = [], torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in _iterate_score_blocks(query, key, diagonal, scale):
        grad_out, queries = (tensor[..., rows, :].to(compute_dtype) for tensor in (gradient, query))
        weights = (scores - lse[..., rows, None]).exp()
        grad_value += weights.mT @ grad_out
        # rowsum(dO * O) with the merged O equals rowsum(dP * P) over all keys, which a part of the
        # keys cannot compute.
        row_sums = (grad_out * out[..., rows, :].to(compute_dtype)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_out @ values.mT - row_sums) * _get_score_scale(query, scale)
        grad_query.append((grad_scores @ keys).to(query.dtype))
        grad_key += grad_scores.mT @ queries
    return torch.cat(grad_query, -2), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _iterate_score_blocks(
    query: Tensor, key: Tensor, diagonal: int | None, scale: float | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (query rows, attention scores) for each block of queries.

    The scores are -inf where a query does not read the key.
    """
    compute_dtype, (queries, keys) = (
        _choose_compute_dtype(query.dtype),
        (query.shape[-2], key.shape[-2]),
    )
    for first in range(0, queries, QUERIES_PER_BLOCK):
        rows = slice(first, min(first + QUERIES_PER_BLOCK, queries))
        scores = (
            query[..., rows, :].to(compute_dtype)
            @ key.to(compute_dtype).mT
            * _get_score_scale(query, scale)
        )
        if diagonal is not None:
            pairs = query.new_ones(rows.stop - rows.start, keys, dtype=torch.bool)
            # Row r of the block is query `first` + r.
            scores.masked_fill_(~pairs.tril(diagonal + first), -torch.inf)
        yield rows, scores


def _get_score_scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _choose_compute_dtype(dtype: torch.dtype) -> torch.dtype:
    # Scores and sums in at least float32, in which flash kernels accumulate too.
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _reads_no_key(query: Tensor, diagonal: int | None) -> bool:
    # The last query, of index n − 1, reads up to index n − 1 + `diagonal`.
    return diagonal is not None and diagonal <= -query.shape[-2]


def _reads_all_keys(key: Tensor, diagonal: int | None) -> bool:
    # Query 0 reads the fewest keys, up to index `diagonal`.
    return diagonal is None or diagonal >= key.shape[-2] - 1


def _can_use_flash(query: Tensor, key: Tensor, value: Tensor, diagonal: int | None) -> bool:
    """Whether a flash kernel supports this attention: no mask, or a square causal mask."""
    if diagonal is not None and (diagonal or query.shape[-2] != key.shape[-2]):
        return False
    if query.is_cpu:
        # PyTorch's CPU kernel needs values of the size of the queries.
        return value.shape[-1] == query.shape[-1]
    return has_flash(query, value)


def _repeat_heads(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return keys and values with each head repeated for the query heads that share it."""
    groups = query.shape[1] // tensors[0].shape[1]
    return [each.repeat_interleave(groups, 1) if groups > 1 else each for each in tensors]


def _sum_over_head_groups(gradient: Tensor, heads: int) -> Tensor:
    """Sum the gradients of repeated key-value heads to the gradient of the shared heads.

    Args:
        gradient: `[batch, query heads, keys, size]`.
        heads: number of key-value heads.
    """
    groups = gradient.shape[1] // heads
    if groups == 1:
        return gradient.contiguous()
    batch, _, *key_dims = gradient.shape
    return gradient.reshape(batch, heads, groups, *key_dims).sum(2)


@partial_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, diagonal: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    out = query.new_empty(*rows, value.shape[-1])
    return out, query.new_empty(rows, dtype=_choose_compute_dtype(query.dtype))


@partial_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
