"""Attention without a mask of all pairs, as one opaque operator.

Queries are computed block by block, each with the keys that one of them may read, so that neither
scores nor a mask of all pairs are held; the backward pass computes each block again. In a sliding
window alone a flash kernel does all of it on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.core.torch_internals.dispatch import autograd_in_operators

aten = torch.ops.aten

LEAST_ROWS = 256
"""Of a block of queries; those of wide windows have a quarter of the window."""


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
    """Attention to the keys that a causal mask, a window before each query, and terms allow.

    Args:
        query: `[batch, heads, queries, size]`.
        key, value: `[batch, heads, keys, size]`, with as many heads or fewer.
        vectors: numbers of the queries, `[..., queries, 1]`, and of the keys, `[..., 1, keys]`.
        terms: what must hold of them, divided by commas: `"eq 0 1"` that vectors 0 and 1 are equal
            (or another comparison of torch), `"all 2"` that vector 2, of booleans, is true.
        window: how many positions a query looks back at most, its own included.
        start, first_key: the positions of the first query and key. Those of keys that are negative
            are not read; then there must be no vectors.

    Returns:
        `[batch, heads, queries, size]`, with the size of the values, and of flash kernels the
        log-sum-exp of the scores, `[batch, heads, queries]`.
    """
    tensors = _in_sequence((query, key, value), first_key)
    if _has_flash(tensors, causal, window, terms):
        out, lse, *_ = aten._flash_attention_forward(
            *_transposed(tensors), *_lengths(tensors), 0.0, False, False, **_flash(window, scale)
        )
        return out.transpose(1, 2), lse
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    mask = _Mask(tensors, vectors, terms, causal, window, start - max(0, first_key))
    for places, allowed in mask.blocks():
        out[..., places[0], :] = _block(_parts(tensors, places), allowed, scale)
    return out, query.new_zeros(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("shardwright::blockwise_attention_backward", mutates_args=())
def _backward(
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
    results = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    tensors, found = (_in_sequence(each, first_key) for each in ((query, key, value), results))
    if _has_flash(tensors, causal, window, terms):
        read = _transposed((gradient, *tensors, out))
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # Nothing was drawn.
        gradients = aten._flash_attention_backward(
            *read, lse, *_lengths(tensors), 0.0, False, state, state, **_flash(window, scale)
        )
        for result, each in zip(found, gradients, strict=True):
            result.copy_(each.transpose(1, 2))
        return results
    mask = _Mask(tensors, vectors, terms, causal, window, start - max(0, first_key))
    for places, allowed in mask.blocks():
        with autograd_in_operators():
            parts = [part.detach().requires_grad_() for part in _parts(tensors, places)]
            block = _block(parts, allowed, scale)
        of_parts = torch.autograd.grad(block, parts, gradient[..., places[0], :])
        for result, each in zip(_parts(found, places), of_parts, strict=True):
            result += each
    return results


Places = tuple[slice, slice, slice]
"""A part of the queries, and twice that of keys and values."""


class _Mask:
    """Which keys queries may read; the first query stands at key number `offset`."""

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

    def blocks(self) -> Iterator[tuple[Places, Tensor]]:
        """Blocks of queries with the keys that they may read, and the mask of these pairs."""
        rows = max((self.window or 0) // 4, LEAST_ROWS)
        for first in range(0, self.queries, rows):
            end = min(first + rows, self.queries)
            begin = 0 if self.window is None else max(0, self.offset + first - self.window + 1)
            read = slice(begin, self.offset + end if self.causal else self.keys)
            allowed = self._allowed(slice(first, end), read)
            if self.terms:
                read, allowed = _read(read, allowed)
            yield (slice(first, end), read, read), allowed

    def _allowed(self, rows: slice, keys: slice) -> Tensor:
        diagonal = self.offset + rows.start - keys.start
        count = (rows.stop - rows.start, keys.stop - keys.start)
        mask = self.query.new_ones(count, dtype=torch.bool)
        if self.causal:
            mask = mask.tril(diagonal)
        if self.window is not None:
            mask = mask.triu(diagonal - self.window + 1)
        for comparison, *numbers in self.terms:
            parts = [self._part(self.vectors[int(n)], rows, keys) for n in numbers]
            mask = mask & (parts[0] if comparison == "all" else getattr(torch, comparison)(*parts))
        return mask

    def _part(self, vector: Tensor, rows: slice, keys: slice) -> Tensor:
        if vector.shape[-2] > 1:
            return vector[..., rows, :]
        return vector[..., keys] if vector.shape[-1] > 1 else vector


def _read(keys: slice, allowed: Tensor) -> tuple[slice, Tensor]:
    """The keys from the first to the last that some query of a block reads, at least one."""
    places = allowed.flatten(0, -2).any(0).nonzero()
    first, last = (int(places[0]), int(places[-1])) if len(places) else (0, 0)
    return slice(keys.start + first, keys.start + last + 1), allowed[..., first : last + 1]


def _parts(tensors: Sequence[Tensor], places: Places) -> list[Tensor]:
    return [each[..., place, :] for each, place in zip(tensors, places, strict=True)]


def _block(tensors: Sequence[Tensor], mask: Tensor, scale: float | None) -> Tensor:
    query, key, value = tensors
    groups = query.shape[1] // key.shape[1]
    if not query.is_cpu and groups > 1:
        # Elsewhere kernels with masks take as many heads of keys as of queries.
        key, value, groups = *(each.repeat_interleave(groups, 1) for each in (key, value)), 1
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=groups > 1
    )


def _in_sequence(tensors: Sequence[Tensor], first_key: int) -> list[Tensor]:
    """Queries, keys and values without those that would lie before position 0."""
    query, *others = tensors
    return [query, *(each[..., max(0, -first_key) :, :] for each in others)]


def _has_flash(tensors: Sequence[Tensor], causal: bool, window: int | None, terms: str) -> bool:
    """Whether PyTorch's flash kernel, which knows windows, takes these."""
    query, _, value = tensors
    return has_flash(query, value) and causal and window is not None and not terms


def has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch has a flash kernel for such tensors that gives the log-sum-exp of scores."""
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and torch.version.hip is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and size == value.shape[-1] <= 256
        and size % 8 == 0
    )


def _flash(window: int | None, scale: float | None) -> dict[str, Any]:
    """How far back queries look besides their own position; the last stands at the last key."""
    assert window is not None
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}


def _transposed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As flash kernels take them: `[batch, positions, heads, size]`."""
    return [each.transpose(1, 2) for each in tensors]


def _lengths(tensors: Sequence[Tensor]) -> tuple[None, None, int, int]:
    """Of sequences that are not packed."""
    return None, None, tensors[0].shape[-2], tensors[1].shape[-2]


@blockwise_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


@_backward.register_fake
def _(gradient: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(each) for each in tensors[:3])
    return query, key, value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, vectors, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, *vectors)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    query, key, value, out, lse, *vectors = ctx.saved_tensors
    found = _backward(gradient, query, key, value, vectors, out, lse, *ctx.options)
    return (*found, [None] * len(vectors), *(None for _ in ctx.options))


blockwise_attention.register_autograd(_gradients, setup_context=_save)
