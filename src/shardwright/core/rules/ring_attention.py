"""Ring attention: queries stay on their device; keys and values travel around a ring of devices.

Each device has a shard of the sequence. In step 0 a device attends to its own keys and values and
sends these to the next device; in each later step it attends to the keys and values that it has
received. After n - 1 transfers each shard has visited all n devices, and the partial results are
merged by their log-sum-exp. In the backward pass keys and values travel again, and the gradient of
each shard travels one step behind, back to its device. Each device needs memory for a few shards,
independently of n (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context", 2023).

Under a causal mask later shards have more work. The devices with shards i and n - 1 - i therefore
swap the second halves of their shards before the ring, as in the load balancing of Megatron-LM's
context parallelism; each step then has equal work on all devices.
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
from shardwright.core.rules.notation import argument_binder, call_arguments
from shardwright.core.rules.rule import MIRROR, RING, LocalSharding, Reduce, Reduction

BlockIndex = int | torch.SymInt
"""Index of a device's shard of the sequence: an int, or a `SymInt` if many ranks are simulated at
once."""


def supports_ring(arguments: Mapping[str, Any]) -> bool:
    """Whether ring attention supports an attention call: 4 dimensions, no mask, no dropout and, if
    causal, as many queries as keys.

    Args:
        arguments: arguments of the attention call, by name.
    """
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    return (
        len(query) == len(key) == len(value) == 4
        and (query[0], query[1] % key[1]) == (key[0], 0)
        and key[:3] == value[:3]
        and arguments["attn_mask"] is None
        and arguments["dropout_p"] == 0
        and (query[2] == key[2] if arguments["is_causal"] else True)
    )


def ring_capacity(arguments: Mapping[str, Any]) -> int:
    """Return the capacity of the factor `ring`: the number of devices in the ring must divide
    it."""
    # Queries and keys are sharded into equal numbers of blocks, also in cross attention.
    return gcd(arguments["query"].shape[-2], arguments["key"].shape[-2])


def ring_reductions(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Return the collectives of ring attention: the ring and, if causal attention is balanced,
    swaps of queries, keys and values before the ring, and of outputs after the ring."""
    arguments = call_arguments(op)
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    devices, pair_size = shard_counts["ring"], key[3] + value[3]

    def reduction(exchange: str, heads: int, rows: int, size: int) -> Reduction:
        shape = query[0] // shard_counts.get("b", 1), heads, rows, size
        return Reduction(("ring",), exchange, shape, op.output.dtype, varying=True)

    # A single key-value head is replicated over the shards of `h`.
    heads = [n // shard_counts.get("h", 1) if n > 1 else 1 for n in (query[1], key[1])]
    ring = reduction(RING, heads[1], key[2] // devices, pair_size)
    swapped = _count_swapped_rows(arguments, devices, shard_counts.get("s", 1))
    if swapped == (0, 0):
        return (ring,)
    return (
        reduction(MIRROR, heads[0], swapped[0], query[3]),
        reduction(MIRROR, heads[1], swapped[1], pair_size),
        ring,
        reduction(MIRROR, heads[0], swapped[0], value[3]),
    )


def _count_swapped_rows(args: Mapping[str, Any], devices: int, num_splits: int) -> tuple[int, int]:
    """Return the numbers of queries and of keys that a device swaps with device n - 1 - i, to
    balance the causal mask.

    Args:
        args: arguments of the attention call, by name.
        devices: number of devices in the ring.
        num_splits: number of shards of a device's queries along factor `s`.
    """
    queries, keys = (args[name].shape[-2] // devices for name in ("query", "key"))
    # Without a causal mask all blocks have equal work.
    swaps = args["is_causal"] and queries // num_splits > 1
    return (queries // num_splits // 2, keys // 2) if swaps else (0, 0)


def ring_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    """Build the local kernel of ring attention for a device with one shard of queries, keys and
    values."""
    bind, full_arguments = argument_binder(op), call_arguments(op)
    devices, num_splits = local.shard_counts["ring"], local.shard_counts.get("s", 1)
    swapped = _count_swapped_rows(full_arguments, devices, num_splits)
    ring = _AttentionRing(
        devices=devices,
        index=local.index("ring"),
        num_splits=num_splits,
        split_index=local.index("s") if num_splits > 1 else 0,
        swapped=swapped,
        causal=full_arguments["is_causal"],
        key_size=full_arguments["key"].shape[-1],
        scale=full_arguments["scale"],
        # In `ring_reductions`, the swaps of queries and of key-value pairs precede the ring.
        send=local.reduce[2 if any(swapped) else 0],
    )

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        # Keys and values are one tensor, so that each step is one transfer.
        query, pairs = arguments["query"], torch.cat((arguments["key"], arguments["value"]), -1)
        if any(swapped):
            query = _swap_last_rows(query, swapped[0], local.reduce[0])
            pairs = _swap_last_rows(pairs, swapped[1], local.reduce[1])
        out: Tensor = _RingAttention.apply(query, pairs, ring)  # type: ignore[no-untyped-call]
        return _swap_last_rows(out, swapped[0], local.reduce[3]) if any(swapped) else out

    return run


def _swap_last_rows(block: Tensor, count: int, swap: Reduce) -> Tensor:
    """Return the block with its last `count` rows replaced by those of another device, which
    receives this device's rows."""
    first, last = torch.split(block, [block.shape[-2] - count, count], -2)
    return torch.cat((first, swap(last)), -2)


AttentionBlock = tuple[slice, slice, BlockIndex | None]
"""Block of the score matrix: (rows of queries, rows of keys, diagonal of the causal mask in the
block); the diagonal is None if attention is not causal."""


@dataclass(frozen=True)
class _AttentionRing:
    """Ring of one attention operator on one device.

    Args:
        devices: number of devices in the ring.
        index: index i of this device in the ring; it swaps rows with device `devices` - 1 - i.
        num_splits: number of shards of a device's queries along factor `s`.
        split_index: index of this shard along factor `s`.
        swapped: (number of last queries, number of last keys) that the other device swapped in.
        causal: whether a query attends only to keys up to its own position.
        key_size: number of features of a key; in a tensor of key-value pairs the features of the
            value follow.
        scale: factor of the scores; None for 1 / sqrt(key size).
        send: collective that sends to the next device and receives from the previous one.
    """

    devices: int
    index: BlockIndex
    num_splits: int
    split_index: BlockIndex
    swapped: tuple[int, int]
    causal: bool
    key_size: int
    scale: float | None
    send: Reduce

    def blocks_of_step(self, step: int, queries: int, keys: int) -> Iterator[AttentionBlock]:
        """Yield the pairs of query rows and key rows to compute in a step of the ring, at most 2 x
        2.

        Omits pairs that the causal mask excludes.

        Args:
            step: number of times that the current keys have been sent on.
            queries, keys: numbers of queries and of keys on a device.
        """
        own_blocks = self.index, self.devices - 1 - self.index
        # The device at which the current keys started.
        origin = (self.index - step) % self.devices
        key_blocks = origin, self.devices - 1 - origin
        # `s` subdivides the queries of a ring's device, so blocks of queries are counted over both
        # factors.
        query_blocks = [self.num_splits * n + self.split_index for n in own_blocks]
        for rows, start in _find_consecutive_row_ranges(query_blocks, queries, self.swapped[0]):
            for key_rows, first in _find_consecutive_row_ranges(key_blocks, keys, self.swapped[1]):
                diagonal = start - first if self.causal else None
                # A `SymInt` differs between simulated ranks, so no pair can be left out there.
                if isinstance(diagonal, int) and diagonal <= rows.start - rows.stop:
                    continue  # All these keys come after all these queries.
                yield rows, key_rows, diagonal

    def send_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Launch the transfer of `x` to the next device.

        Returns a function that waits for the tensor from the previous device and returns it.
        """
        pending = self.send.start(x)
        return lambda: self.send.end(pending).view(x.shape)

    def split(self, pairs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the keys and the values in `rows` of key-value pairs, as views."""
        pair_rows = pairs[..., rows, :]
        return pair_rows[..., : self.key_size], pair_rows[..., self.key_size :]


def _find_consecutive_row_ranges(
    blocks: Sequence[BlockIndex], rows: int, swapped: int
) -> list[tuple[slice, BlockIndex]]:
    """Return (local rows, position of the first row in the sequence) of the consecutive ranges.

    Args:
        blocks: sequence positions in units of `rows`: of this device's rows, and of the swapped
            rows.
        rows: number of local rows.
        swapped: number of rows, the last ones, that come from another device.
    """
    own_rows = slice(0, rows - swapped)
    ranges: list[tuple[slice, BlockIndex]] = [(own_rows, blocks[0] * rows)]
    if swapped:
        ranges.append((slice(own_rows.stop, rows), blocks[1] * rows + own_rows.stop))
    return ranges


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pairs: Tensor, ring: _AttentionRing) -> Tensor:
        # `call_site` is read by the runtime's errors, which name the line of the program.
        ctx.ring, ctx.call_site = ring, ring.send.call_site()
        merged = _MergedAttention(query, pairs.shape[-1] - ring.key_size)
        receive: Callable[[], Tensor] | None = None
        current = pairs
        for step in range(ring.devices):
            current = receive() if receive is not None else current
            # Launched before the computation, so that the two overlap.
            receive = ring.send_on(current) if step < ring.devices - 1 else None
            for rows, key_rows, diagonal in ring.blocks_of_step(
                step, query.shape[-2], current.shape[-2]
            ):
                key, value = ring.split(current, key_rows)
                attended = partial_attention(query[..., rows, :], key, value, diagonal, ring.scale)
                merged.add(rows, *attended)
        out, lse = merged.out.to(query.dtype), merged.lse
        # Without the received keys, which travel again in the backward pass: memory does not grow
        # with the ring.
        ctx.save_for_backward(query, pairs, out, lse)
        return out

    @staticmethod
    # Transfers and in-place sums are outside of autograd, so a second derivative must be an error.
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (query, pairs, out, lse), ring = ctx.saved_tensors, ctx.ring
        # Each step adds a term, so the sum keeps the precision of the log-sum-exp.
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        grad_own_pairs = current = pairs
        receive: Callable[[], Tensor] | None = None
        receive_grad: Callable[[], Tensor] | None = None
        for step in range(ring.devices):
            current = receive() if receive is not None else current
            receive = ring.send_on(current) if step < ring.devices - 1 else None
            # In the dtype of the tensors that travel: single precision would double the bytes.
            grad_pairs = torch.zeros_like(pairs)
            for rows, key_rows, diagonal in ring.blocks_of_step(
                step, query.shape[-2], current.shape[-2]
            ):
                key, value = ring.split(current, key_rows)
                local = (tensor[..., rows, :] for tensor in (gradient, query))
                saved = out[..., rows, :], lse[..., rows]
                terms = partial_attention_backward(*local, key, value, *saved, diagonal, ring.scale)
                grad_query[..., rows, :] += terms[0]
                for total, term in zip(ring.split(grad_pairs, key_rows), terms[1:], strict=True):
                    total += term
            if step == 0:
                grad_own_pairs = grad_pairs
                continue
            # The gradient of keys and values travels one step behind them. After the last step it
            # is one device short of their owner, which one more transfer reaches.
            grad_pairs = grad_pairs if receive_grad is None else grad_pairs.add_(receive_grad())
            receive_grad = ring.send_on(grad_pairs)
        grad_own_pairs = (
            grad_own_pairs if receive_grad is None else grad_own_pairs.add_(receive_grad())
        )
        return grad_query.to(query.dtype), grad_own_pairs, None


class _MergedAttention:
    """Output and log-sum-exp of each query over the keys merged so far."""

    def __init__(self, query: Tensor, size: int) -> None:
        precise = torch.promote_types(query.dtype, torch.float32)
        self.out = query.new_zeros(*query.shape[:-1], size, dtype=precise)
        # The log-sum-exp of no keys; not minus infinity, whose difference to itself is NaN.
        lowest = torch.finfo(precise).min
        self.lse = query.new_full(query.shape[:-1], lowest, dtype=precise)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the output and log-sum-exp of the queries in `rows` over further keys.

        out = (e^lse1 out1 + e^lse2 out2) / e^lse, with e^lse = e^lse1 + e^lse2.
        """
        before = self.lse[..., rows]
        after = torch.logaddexp(before, lse)
        old_weight, new_weight = ((x - after).exp().unsqueeze(-1) for x in (before, lse))
        self.out[..., rows, :] = old_weight * self.out[..., rows, :] + new_weight * out
        self.lse[..., rows] = after
