"""Blockwise attention under a computed mask, as one opaque operator.

Each block of queries attends to the range of keys that its mask allows, so that neither the scores
nor the mask of all pairs are materialized; the backward pass recomputes each block. A pure sliding
window uses a flash kernel on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.core.torch_internals.dispatch import autograd_in_operators

aten = torch.ops.aten

MIN_ROWS = 256
"""Minimum number of queries per block; with a wide window, a block is a quarter of the window."""


@torch.library.custom_op("shardwright::blockwise_attention", mutates_args=())
def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vectors: Sequence[Tensor],
    terms: str,
    causal: bool,
    window: int | None,
    scale: float | None,
    start: int,
    first_key: int,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that a causal mask, a sliding window and conditions on vectors allow.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`; may have fewer heads, each shared by a group of
            adjacent query heads.
        vectors: inputs of the mask, one element per query, `[..., queries, 1]`, or per key,
            `[..., 1, keys]`.
        terms: conditions for reading a key, separated by commas: `"eq 0 1"` if vectors 0 and 1 must
            be equal (or another comparison of torch), `"all 2"` if the boolean vector 2 must be
            true.
        causal: whether each query reads only keys up to its own position.
        window: largest number of positions that a query reads, including its own; None for no
            limit.
        scale: factor of the scores, by default `size ** -0.5`.
        start: position of the first query.
        first_key: position of the first key. Keys at negative positions are not read; `vectors`
            must then be empty.

    Returns:
        The attention output, `[batch, heads, queries, size]` with the size of the values, and the
        log-sum-exp of the scores, `[batch, heads, queries]`, which only flash kernels compute; 0
        from other kernels.
    """
    tensors = _drop_negative_positions((query, key, value), first_key)
    if _can_use_flash(tensors, causal, window, terms):
        out, lse, *_ = aten._flash_attention_forward(
            *_to_flash_layout(tensors),
            *_make_unpacked_length_arguments(tensors),
            0.0,
            False,
            False,
            **_make_flash_window_arguments(window, scale),
        )
        # Contiguous, as `register_fake` declares the results.
        return out.transpose(1, 2).contiguous(), lse
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    # Index of the key at the position of query 0, once the keys at negative positions are dropped.
    mask = _BlockMask(tensors, vectors, terms, causal, window, start - max(0, first_key))
    for slices, allowed in mask.blocks():
        out[..., slices[0], :] = _attend_block(
            _slice_block_tensors(tensors, slices), allowed, scale
        )
    return out, query.new_zeros(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("shardwright::blockwise_attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vectors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    terms: str,
    causal: bool,
    window: int | None,
    scale: float | None,
    start: int,
    first_key: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # Keys at negative positions keep gradients of zero; `nonnegative_gradients` are views of the
    # others.
    gradients = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    tensors, nonnegative_gradients = (
        _drop_negative_positions(each, first_key) for each in ((query, key, value), gradients)
    )
    if _can_use_flash(tensors, causal, window, terms):
        transposed = _to_flash_layout((gradient, *tensors, out))
        # The state of the random generator is only read if there is dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        results = aten._flash_attention_backward(
            *transposed,
            lse,
            *_make_unpacked_length_arguments(tensors),
            0.0,
            False,
            state,
            state,
            **_make_flash_window_arguments(window, scale),
        )
        for total, result in zip(nonnegative_gradients, results, strict=True):
            total.copy_(result.transpose(1, 2))
        return gradients
    mask = _BlockMask(tensors, vectors, terms, causal, window, start - max(0, first_key))
    for slices, allowed in mask.blocks():
        # Autograd is off inside operators; here it recomputes and differentiates one block.
        with autograd_in_operators():
            blocks = [
                tensor.detach().requires_grad_() for tensor in _slice_block_tensors(tensors, slices)
            ]
            block = _attend_block(blocks, allowed, scale)
        part_gradients = torch.autograd.grad(block, blocks, gradient[..., slices[0], :])
        # Several blocks of queries read a key, so its gradients add up.
        for total, part_gradient in zip(
            _slice_block_tensors(nonnegative_gradients, slices), part_gradients, strict=True
        ):
            total += part_gradient
    return gradients


Slices = tuple[slice, slice, slice]
"""(Query, key, value) positions that one block of attention reads, as slices."""


class _BlockMask:
    """Attention mask, computed block by block.

    Args:
        tensors: query, key and value.
        vectors: inputs of the conditions, one element per query or per key.
        terms: conditions on `vectors` for reading a key, such as `"eq 0 1, all 2"`.
        causal: whether each query reads only keys up to its own position.
        window: largest number of positions that a query reads; None for no limit.
        offset: index of the key at the position of query 0.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        vectors: Sequence[Tensor],
        terms: str,
        causal: bool,
        window: int | None,
        offset: int,
    ) -> None:
        self.query, (self.queries, self.keys) = tensors[0], [t.shape[-2] for t in tensors[:2]]
        self.vectors, self.terms = vectors, [term.split() for term in terms.split(",") if term]
        self.causal, self.window, self.offset = causal, window, offset

    def blocks(self) -> Iterator[tuple[Slices, Tensor]]:
        """Yield each block of queries, with the range of keys that the block reads and the boolean
        mask of queries and keys, `[..., queries, keys]`."""
        # Each block also reads the window before its first query: with a quarter of a wide window
        # per block, 20 % of the computed scores are masked.
        rows = max((self.window or 0) // 4, MIN_ROWS)
        for first in range(0, self.queries, rows):
            end = min(first + rows, self.queries)
            # The first query of the block reads `window` keys, of which its own is the last.
            begin = 0 if self.window is None else max(0, self.offset + first - self.window + 1)
            key_range = slice(begin, self.offset + end if self.causal else self.keys)
            allowed = self._compute_block_mask(slice(first, end), key_range)
            if self.terms:
                # Conditions may exclude long ranges of keys, such as other documents. Trimming
                # waits for the device to compute the mask, so it is done only then.
                key_range, allowed = _trim_to_allowed_keys(key_range, allowed)
            yield (slice(first, end), key_range, key_range), allowed

    def _compute_block_mask(self, rows: slice, keys: slice) -> Tensor:
        # The mask is a band of the full mask: shift its diagonals to the block's first query and
        # key.
        diagonal = self.offset + rows.start - keys.start
        count = (rows.stop - rows.start, keys.stop - keys.start)
        mask = self.query.new_ones(count, dtype=torch.bool)
        if self.causal:
            mask = mask.tril(diagonal)
        if self.window is not None:
            mask = mask.triu(diagonal - self.window + 1)
        for comparison, *indices in self.terms:
            vectors = [self._slice_vector(self.vectors[int(i)], rows, keys) for i in indices]
            mask = mask & (
                vectors[0] if comparison == "all" else getattr(torch, comparison)(*vectors)
            )
        return mask

    def _slice_vector(self, vector: Tensor, rows: slice, keys: slice) -> Tensor:
        # One element per query, per key, or one for all pairs, which broadcasts.
        if vector.shape[-2] > 1:
            return vector[..., rows, :]
        return vector[..., keys] if vector.shape[-1] > 1 else vector


def _trim_to_allowed_keys(keys: slice, allowed: Tensor) -> tuple[slice, Tensor]:
    """Narrow `keys` to the range from the first to the last key that the mask of the block allows;
    return the range and its mask.

    The range has at least one key, even if no query reads any.
    """
    read_keys = allowed.flatten(0, -2).any(0).nonzero()
    first, last = (int(read_keys[0]), int(read_keys[-1])) if len(read_keys) else (0, 0)
    return slice(keys.start + first, keys.start + last + 1), allowed[..., first : last + 1]


def _slice_block_tensors(tensors: Sequence[Tensor], slices: Slices) -> list[Tensor]:
    return [tensor[..., rows, :] for tensor, rows in zip(tensors, slices, strict=True)]


def _attend_block(tensors: Sequence[Tensor], mask: Tensor, scale: float | None) -> Tensor:
    query, key, value = tensors
    groups = query.shape[1] // key.shape[1]
    if not query.is_cpu and groups > 1:
        # On GPUs the kernels that support a mask do not support grouped-query attention.
        key, value, groups = *(each.repeat_interleave(groups, 1) for each in (key, value)), 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=groups > 1
    )


def _drop_negative_positions(tensors: Sequence[Tensor], first_key: int) -> list[Tensor]:
    """Return query, key and value without the keys and values before position 0."""
    query, *keys_and_values = tensors
    return [query, *(each[..., max(0, -first_key) :, :] for each in keys_and_values)]


def _can_use_flash(tensors: Sequence[Tensor], causal: bool, window: int | None, terms: str) -> bool:
    """Whether PyTorch's flash kernel, which supports sliding windows but no other mask, can compute
    this attention."""
    query, _, value = tensors
    # Only `windowed_attention` has a window and no terms. Its last key is that of the last query,
    # where flash kernels align their window too.
    return has_flash(query, value) and causal and window is not None and not terms


def has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch has a flash kernel for these tensors that returns the log-sum-exp."""
    size = query.shape[-1]
    # FlashAttention-2 runs on Ampere and newer, with head sizes up to 256 that are multiples of 8.
    return (
        query.device.type == "cuda"
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and size == value.shape[-1] <= 256
        and size % 8 == 0
    )


def _make_flash_window_arguments(window: int | None, scale: float | None) -> dict[str, Any]:
    """Return the keyword arguments of a flash kernel for a sliding window. The kernel's window
    excludes the query's own position."""
    assert window is not None
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}


def _to_flash_layout(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the layout of flash kernels: `[batch, positions, heads, size]`."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _make_unpacked_length_arguments(tensors: Sequence[Tensor]) -> tuple[None, None, int, int]:
    """Return the `cum_seq_q`, `cum_seq_k`, `max_q` and `max_k` of a flash kernel for unpacked
    sequences."""
    return None, None, tensors[0].shape[-2], tensors[1].shape[-2]


@blockwise_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


@_attention_backward.register_fake
def _(gradient: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(each) for each in tensors[:3])
    return query, key, value


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, vectors, *ctx.options = inputs
    # The flash kernel's backward pass reads output and log-sum-exp; the blocks are recomputed.
    ctx.save_for_backward(query, key, value, *output, *vectors)


def _compute_attention_gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, out, lse, *vectors = ctx.saved_tensors
    gradients = _attention_backward(gradient, query, key, value, vectors, out, lse, *ctx.options)
    return (*gradients, [None] * len(vectors), *(None for _ in ctx.options))


blockwise_attention.register_autograd(
    _compute_attention_gradients, setup_context=_save_for_backward
)
