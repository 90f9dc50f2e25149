"""Collectives of parameter buckets: one all-gather and one gradient reduction for all members.

Starting a collective and waiting for its result are separate calls, between which computation runs.
Members are concatenated in one flat buffer. The buffer of a single member that is sharded along
dimension 0 is the unsharded tensor itself, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from shardwright.core.partition.parameter_buckets import Bucket, varying_axes
from shardwright.core.runtime.collectives import complete, slice_block
from shardwright.core.runtime.devices import Devices, Group, Index
from shardwright.core.runtime.sent_dtypes import reducible, sendable
from shardwright.core.torch_internals.compiled import is_compiling
from shardwright.core.torch_internals.distributed import functional_collectives as c10d


@dataclass(frozen=True)
class Gather:
    """An all-gather of a bucket.

    Args:
        group: the ranks that take part.
        index: index of this rank's shard in the gathered tensor.
        reduces: whether the backward pass reduce-scatters the gradient; otherwise it slices this
            rank's shard of the gradient.
    """

    group: Group
    index: Index
    reduces: bool


@dataclass(frozen=True, eq=False)
class BoundBucket:
    """A bucket of parameters, bound to the process groups of its collectives.

    Args:
        bucket: the members and their redistributions.
        gathers: the all-gathers, in order.
        replicas: the group over which gradients are all-reduced; None without replicas.
    """

    bucket: Bucket
    gathers: tuple[Gather, ...]
    replicas: Group | None

    def __post_init__(self) -> None:
        # Compute now, because torch.compile cannot trace the lock of a cached property.
        _ = (
            self.sizes,
            self.dtype,
            self.stored_dtype,
            self._gather_group_sizes,
            self._is_flat_buffer_view_of_member,
        )

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the local shards of the bucket's parameters."""
        return tuple(m.stored_layout.shard_shape(m.value.shape) for m in self.bucket.members)

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of elements of the local shards of the bucket's parameters."""
        return [prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the bucket's parameters, in which collectives run."""
        # Buckets are made of parameters of one dtype, so any member has it.
        return self.bucket.members[0].value.dtype

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        return self.bucket.members[0].value.stored_dtype

    # Forward

    def start_gather(self, shards: Sequence[Tensor]) -> Tensor:
        """Start the first all-gather of the local `shards`, cast to `dtype`; return the pending
        result, for `finish_gather`."""
        # Cast first: an all-gather in bfloat16 sends half the bytes of an all-gather in float32.
        pieces = [shard.to(self.dtype).reshape(-1) for shard in shards]
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        group = self.gathers[0].group
        out: Tensor = c10d.all_gather_into_tensor(sendable(flat), group.size, group.name)
        return out

    def finish_gather(self, pending: Tensor) -> list[Tensor]:
        """Wait for the result of `start_gather`, run the remaining all-gathers, and return the
        unsharded members."""
        out = self._wait_for_collective(pending)
        # Each all-gather needs the result of the previous one, so only the first can start ahead.
        for number, gather in enumerate(self.gathers):
            if number:
                size, name = gather.group.size, gather.group.name
                out = c10d.all_gather_into_tensor(sendable(out), size, name)
                out = self._wait_for_collective(out)
            # Ranks are in the order of the device matrix, which may differ from the order of
            # blocks.
            if not gather.group.in_order:
                blocks = out.chunk(gather.group.size)
                out = torch.cat([blocks[position] for position in gather.group.order])
        if self._is_flat_buffer_view_of_member:
            return [out.view(self._get_unsharded_member_shape(0))]
        # The first dimensions enumerate the ranks, each with its shards of all members in a row.
        split = torch.split(out.view(*self._gather_group_sizes, self.numel), self.sizes, -1)
        return [self._join_member_blocks(number, piece) for number, piece in enumerate(split)]

    def unsharded(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters of a bucket that needs no all-gather: the local `shards`, cast to
        `dtype`."""
        return [shard.to(self.dtype) for shard in shards]

    # Backward

    def reduce(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Start the reduction of gradients, and return the pending flat result; `sum_replicas` then
        sums it over the replicas.

        Args:
            gradients: gradient of each unsharded member; None for a member without gradient.
        """
        flat = self._flatten_gradients(gradients)
        is_pending = False
        # Backpropagate through the all-gathers in reverse.
        for gather in reversed(self.gathers):
            if is_pending:
                flat = self._wait_for_collective(flat)
            blocks = flat.view(gather.group.size, -1)
            # Each rank of this group has the same full gradient, and keeps its own block.
            if not gather.reduces:
                flat = slice_block(blocks, 0, gather.index, gather.group.size).reshape(-1)
                continue
            if not gather.group.in_order:
                rows = [gather.group.order.index(rank) for rank in range(gather.group.size)]
                blocks = torch.stack([blocks[row] for row in rows])
            name = gather.group.name
            unreduced = reducible(blocks.view(-1))
            flat = c10d.reduce_scatter_tensor(unreduced, "sum", gather.group.size, name)
            flat = self._wait_if_complex(flat)
            is_pending = True
        # After a reduce-scatter, `sum_replicas` all-reduces the shards instead, as in HSDP.
        if self.replicas is not None and not self._has_reduce_scatter:
            return self._wait_if_complex(
                _start_gradient_all_reduce(
                    flat, self.replicas, in_place=not self._is_flat_buffer_view_of_member
                )
            )
        return flat

    def sum_replicas(self, flat: Tensor) -> Tensor:
        """Wait for the reduce-scatter, if any, and start the all-reduce over replicas, if any.

        Args:
            flat: result of `reduce`.

        Returns:
            The pending flat gradient, for `shard_gradients`.
        """
        if self.replicas is None or not self._has_reduce_scatter:
            return self._wait_for_collective(flat) if self._has_reduce_scatter else flat
        flat = self._wait_for_collective(flat)
        return self._wait_if_complex(_start_gradient_all_reduce(flat, self.replicas, in_place=True))

    def shard_gradients(self, flat: Tensor) -> list[Tensor]:
        """Wait for the result of `sum_replicas`, and return the gradients of the local shards."""
        if self.replicas is not None:
            flat = self._wait_for_collective(flat)
        # Gradients are reduced in `dtype`, and optimizers step in the stored dtype.
        flat = flat.to(self.stored_dtype)
        if len(self.sizes) == 1:
            return [flat.view(self.shapes[0])]
        pieces = torch.split(flat, self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def _wait_for_collective(self, pending: Tensor) -> Tensor:
        """Wait for a collective and return its result in `dtype`."""
        group = self.gathers[0].group if self.gathers else self.replicas
        assert group is not None
        return complete(pending, self.dtype, group)

    def _wait_if_complex(self, flat: Tensor) -> Tensor:
        """Return `flat`, the pending result of a collective, as a gradient that autograd accepts.

        The pending result of a complex tensor has pairs of real numbers, whose shape autograd would
        reject, so the collective is completed here.
        """
        return self._wait_for_collective(flat) if self.dtype.is_complex else flat

    # Layout of the flat buffers

    @property
    def _has_reduce_scatter(self) -> bool:
        return any(gather.reduces for gather in self.gathers)

    @cached_property
    def _gather_group_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each all-gather, the last all-gather first."""
        return tuple(gather.group.size for gather in reversed(self.gathers))

    @cached_property
    def _block_dim_permutations(self) -> list[tuple[int, ...]]:
        """For each member, the permutation of gathered shards that makes them one tensor.

        Gathered shards have the dimensions [all-gathers, tensor dimensions]. The permutation moves
        each all-gather in front of the tensor dimension that it concatenates.
        """
        orders = []
        count = len(self.gathers)
        for member, shape in zip(self.bucket.members, self.shapes, strict=True):
            # Reversed like `_gather_group_sizes`, in which the last all-gather comes first.
            dims = [step.dim for step in member.steps if step.operation == "all_gather"][::-1]
            order: list[int] = []
            for dim in range(len(shape)):
                # Blocks of a dimension that several all-gathers shard are joined, the outermost
                # index first.
                order += [number for number, cut in enumerate(dims) if cut == dim]
                order.append(count + dim)
            orders.append(tuple(order))
        return orders

    @cached_property
    def _is_flat_buffer_view_of_member(self) -> bool:
        """Whether the flat buffer is a view of a single member, so that no copy is needed."""
        order = self._block_dim_permutations[0]
        # With the identity as permutation, the concatenated shards already are the full tensor.
        return len(self.sizes) == 1 and order == tuple(range(len(order)))

    def _get_unsharded_member_shape(self, member_index: int) -> tuple[int, ...]:
        member = self.bucket.members[member_index]
        return member.used_layout.shard_shape(member.value.shape)

    def _join_member_blocks(self, member_index: int, flat_shards: Tensor) -> Tensor:
        """Return a member of the bucket as one contiguous unsharded tensor.

        Args:
            member_index: index of the member in the bucket.
            flat_shards: the member's gathered shards, a range of the flat buffer.
        """
        blocks = _unflatten_last_dim(flat_shards, self.shapes[member_index])
        return (
            blocks.permute(self._block_dim_permutations[member_index])
            .reshape(self._get_unsharded_member_shape(member_index))
            .contiguous()
        )

    def _flatten_gradients(self, gradients: Sequence[Tensor | None]) -> Tensor:
        example = next(gradient for gradient in gradients if gradient is not None)
        if self._is_flat_buffer_view_of_member:
            return example.reshape(-1)
        if not self.gathers:
            pairs = zip(gradients, self.sizes, strict=True)
            # Zeros for a member without gradient, so that all ranks reduce buffers of one layout.
            return torch.cat(
                [example.new_zeros(size) if g is None else g.reshape(-1) for g, size in pairs]
            )
        # One copy per gradient, directly into its blocks of the buffer; permuting and concatenating
        # would copy twice.
        flat = example.new_empty(*self._gather_group_sizes, self.numel)
        for member_index, flat_shards in enumerate(torch.split(flat, self.sizes, -1)):
            gradient, order, shape = (
                gradients[member_index],
                self._block_dim_permutations[member_index],
                self.shapes[member_index],
            )
            if gradient is None:
                flat_shards.zero_()
                continue
            sizes = (*self._gather_group_sizes, *shape)
            blocks = gradient.reshape([sizes[dim] for dim in order])
            inverse = [order.index(dim) for dim in range(len(order))]
            _unflatten_last_dim(flat_shards, shape).copy_(blocks.permute(inverse))
        return flat.view(-1)


def bind_bucket(bucket: Bucket, devices: Devices) -> BoundBucket:
    """Bind the collectives of a bucket to the process groups of `devices`."""
    axes = varying_axes(bucket)
    gathers = [step for step in bucket.steps if step.operation == "all_gather"]
    return BoundBucket(
        bucket,
        tuple(
            Gather(devices.group(s.axes), devices.index(s.axes), s.backward == "reduce_scatter")
            for s in gathers
        ),
        devices.group(axes) if axes else None,
    )


def _unflatten_last_dim(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view of `flat` whose last dimension is split into dimensions of `shape`."""
    return flat.view(*flat.shape[:-1], *shape)


def _start_gradient_all_reduce(flat: Tensor, group: Group, in_place: bool) -> Tensor:
    """Start the all-reduce of a flat gradient, and return the pending result.

    Args:
        flat: this rank's flat gradient.
        group: the ranks over which gradients are summed.
        in_place: whether `flat` may be overwritten, as nothing else reads it.
    """
    # In place saves a buffer. Compiled graphs are functional; Inductor reuses buffers itself.
    if in_place and not is_compiling():
        out: Tensor = c10d.all_reduce_(reducible(flat), "sum", group.name)
    else:
        out = c10d.all_reduce(reducible(flat), "sum", group.name)
    return out
