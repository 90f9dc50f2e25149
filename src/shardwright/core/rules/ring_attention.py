"""Attention whose keys and values go round a ring of devices, each of which keeps its queries.

Each device has a block of positions. It computes what its queries get from its own keys and values
while these are on their way to the next device, then what they get from those that came, until all
have been everywhere; the results are merged. In the backward pass keys and values go round again,
and the gradient of each block follows it home. So a device holds a few blocks, however many there
are (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context", 2023).

A causal query reads the keys before it, so blocks would be unequal work: devices exchange the
second half of their block with the one whose block is as far from the last as their own is from the
first (the order of blocks of Megatron-LM's context parallelism). Then the queries of each have as
much to do with the keys of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.core.graph.graph import Op
from shardwright.core.graph.partial_attention import partial_attention, partial_attention_backward
from shardwright.core.rules.notation import binder, call_arguments
from shardwright.core.rules.rule import MIRROR, RING, Local, Reduce, Reduction

BlockIndex = int | torch.SymInt
"""A number that differs between devices: a symbol where many are simulated at once."""


def has_ring(arguments: Mapping[str, Any]) -> bool:
    """Whether keys and values of this attention may go round a ring: without a mask or dropout, and
    if it is causal, with as many queries as keys."""
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    return (
        len(query) == len(key) == len(value) == 4
        and (query[0], query[1] % key[1]) == (key[0], 0)
        and key[:3] == value[:3]
        and arguments["attn_mask"] is None
        and arguments["dropout_p"] == 0
        and (query[2] == key[2] if arguments["is_causal"] else True)
    )


def positions(arguments: Mapping[str, Any]) -> int:
    """What the number of devices in a ring must divide."""
    return gcd(arguments["query"].shape[-2], arguments["key"].shape[-2])


def ring_reductions(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """The ring; causal queries, keys and values are exchanged before it, and results after it."""
    arguments = call_arguments(op)
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    devices, pair = shard_counts["ring"], key[3] + value[3]

    def of(kind: str, heads: int, rows: int, size: int) -> Reduction:
        shape = query[0] // shard_counts.get("b", 1), heads, rows, size
        return Reduction(("ring",), kind, shape, op.output.dtype, varying=True)

    heads = [n // shard_counts.get("h", 1) if n > 1 else 1 for n in (query[1], key[1])]
    ring = of(RING, heads[1], key[2] // devices, pair)
    late = _late(arguments, devices, shard_counts.get("s", 1))
    if late == (0, 0):
        return (ring,)
    return (
        of(MIRROR, heads[0], late[0], query[3]),
        of(MIRROR, heads[1], late[1], pair),
        ring,
        of(MIRROR, heads[0], late[0], value[3]),
    )


def _late(arguments: Mapping[str, Any], devices: int, parts: int) -> tuple[int, int]:
    """How many queries and keys are exchanged with the mirrored block.

    Args:
        parts: into how many the queries of a block are cut further.
    """
    queries, keys = (arguments[name].shape[-2] // devices for name in ("query", "key"))
    exchanged = arguments["is_causal"] and queries // parts > 1
    return (queries // parts // 2, keys // 2) if exchanged else (0, 0)


def ring_kernel(op: Op, local: Local) -> Callable[..., Any]:
    """Attention of a block of queries to all keys, of which this device has a block."""
    bind, of_call = binder(op), call_arguments(op)
    devices, parts = local.shard_counts["ring"], local.shard_counts.get("s", 1)
    late = _late(of_call, devices, parts)
    ring = _Ring(
        devices=devices,
        index=local.index("ring"),
        parts=parts,
        part=local.index("s") if parts > 1 else 0,
        late=late,
        causal=of_call["is_causal"],
        size=of_call["key"].shape[-1],
        scale=of_call["scale"],
        send=local.reduce[2 if any(late) else 0],
    )

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        query, pairs = arguments["query"], torch.cat((arguments["key"], arguments["value"]), -1)
        if any(late):
            query = _exchanged(query, late[0], local.reduce[0])
            pairs = _exchanged(pairs, late[1], local.reduce[1])
        out: Tensor = _RingAttention.apply(query, pairs, ring)  # type: ignore[no-untyped-call]
        return _exchanged(out, late[0], local.reduce[3]) if any(late) else out

    return run


def _exchanged(block: Tensor, late: int, exchange: Reduce) -> Tensor:
    """A block with the last rows of another device in place of its own."""
    mine, others = torch.split(block, [block.shape[-2] - late, late], -2)
    return torch.cat((mine, exchange(others)), -2)


Part = tuple[slice, slice, BlockIndex | None]
"""Rows of the queries, rows of the keys, and the diagonal between the two if there is one."""


@dataclass(frozen=True)
class _Ring:
    """The way of keys and values.

    Args:
        devices: how many there are.
        index: of this one.
        parts: into how many the queries of a block are cut.
        part: that of this device.
        late: how many of the last queries and of the last keys are those of the mirrored block.
        size: of keys; what follows in the same tensor are values.
        send: to the next device, from the one before.
    """

    devices: int
    index: BlockIndex
    parts: int
    part: BlockIndex
    late: tuple[int, int]
    causal: bool
    size: int
    scale: float | None
    send: Reduce

    def computed(self, step: int, queries: int, keys: int) -> Iterator[Part]:
        """What is computed with the keys that came after so many steps."""
        own = self.index, self.devices - 1 - self.index
        holder = (self.index - step) % self.devices
        held = holder, self.devices - 1 - holder
        for rows, start in _runs([self.parts * n + self.part for n in own], queries, self.late[0]):
            for read, first in _runs(held, keys, self.late[1]):
                diagonal = start - first if self.causal else None
                if isinstance(diagonal, int) and diagonal <= rows.start - rows.stop:
                    continue  # No query reads one of these keys.
                yield rows, read, diagonal

    def sent(self, x: Tensor) -> Callable[[], Tensor]:
        """Sends `x` on; the result waits for what comes instead."""
        pending = self.send.start(x)
        return lambda: self.send.end(pending).view(x.shape)

    def split(self, pairs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Keys and values in some rows."""
        part = pairs[..., rows, :]
        return part[..., : self.size], part[..., self.size :]


def _runs(blocks: Sequence[BlockIndex], rows: int, late: int) -> list[tuple[slice, BlockIndex]]:
    """Rows that are neighbors, of a block and the last of the mirrored one, with the position of
    the first."""
    early = slice(0, rows - late)
    runs: list[tuple[slice, BlockIndex]] = [(early, blocks[0] * rows)]
    if late:
        runs.append((slice(early.stop, rows), blocks[1] * rows + early.stop))
    return runs


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pairs: Tensor, ring: _Ring) -> Tensor:
        ctx.ring, ctx.place = ring, ring.send.place()
        merged = _Merged(query, pairs.shape[-1] - ring.size)
        coming: Callable[[], Tensor] | None = None
        held = pairs
        for step in range(ring.devices):
            held = coming() if coming is not None else held
            coming = ring.sent(held) if step < ring.devices - 1 else None
            for rows, read, diagonal in ring.computed(step, query.shape[-2], held.shape[-2]):
                key, value = ring.split(held, read)
                part = partial_attention(query[..., rows, :], key, value, diagonal, ring.scale)
                merged.add(rows, *part)
        out, lse = merged.out.to(query.dtype), merged.lse
        ctx.save_for_backward(query, pairs, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (query, pairs, out, lse), ring = ctx.saved_tensors, ctx.ring
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        own = held = pairs
        coming: Callable[[], Tensor] | None = None
        followed: Callable[[], Tensor] | None = None
        for step in range(ring.devices):
            held = coming() if coming is not None else held
            coming = ring.sent(held) if step < ring.devices - 1 else None
            found = torch.zeros_like(pairs)
            for rows, read, diagonal in ring.computed(step, query.shape[-2], held.shape[-2]):
                key, value = ring.split(held, read)
                mine = (each[..., rows, :] for each in (gradient, query))
                known = out[..., rows, :], lse[..., rows]
                parts = partial_attention_backward(*mine, key, value, *known, diagonal, ring.scale)
                of_query[..., rows, :] += parts[0]
                for sums, each in zip(ring.split(found, read), parts[1:], strict=True):
                    sums += each
            if step == 0:
                own = found
                continue
            # The gradient of keys and values goes on with them, to where they came from.
            found = found if followed is None else found.add_(followed())
            followed = ring.sent(found)
        own = own if followed is None else own.add_(followed())
        return of_query.to(query.dtype), own, None


class _Merged:
    """What queries got so far."""

    def __init__(self, query: Tensor, size: int) -> None:
        precise = torch.promote_types(query.dtype, torch.float32)
        self.out = query.new_zeros(*query.shape[:-1], size, dtype=precise)
        # Less than that of any keys, but a number: minus infinity from itself is none.
        nothing = torch.finfo(precise).min
        self.lse = query.new_full(query.shape[:-1], nothing, dtype=precise)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """What the queries in some rows get from further keys."""
        before = self.lse[..., rows]
        after = torch.logaddexp(before, lse)
        kept, new = ((each - after).exp().unsqueeze(-1) for each in (before, lse))
        self.out[..., rows, :] = kept * self.out[..., rows, :] + new * out
        self.lse[..., rows] = after
