"""Collectives inside the kernels of operators, bound to process groups."""

from __future__ import annotations

from torch import Tensor

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.collective_spec import MovedRows
from shardwright.core.rules.rule import (
    GATHER,
    MIRROR,
    NEXT,
    PREVIOUS,
    RING,
    Reduce,
    Reduction,
)
from shardwright.core.runtime.collective_errors import program_line
from shardwright.core.runtime.collectives import (
    BoundCollective,
    all_gather,
    all_reduce,
    bind_exchange,
    bind_permutation,
    blocking,
    identity,
    make_permutation_splits,
    reduce_scatter,
    slice_block,
    start_exchange,
    wait,
)
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.distributed import functional_collectives as c10d


def bound_reduction(devices: Devices, axes: Axes, reduction: Reduction) -> Reduce:
    """Bind the collective inside an operator's kernel to process groups.

    Args:
        devices: this rank's view of the devices.
        axes: the mesh axes over which the collective communicates.
        reduction: the collective, as the rule of the operator declares it.
    """
    operation, varying, group = reduction.operation, reduction.varying, devices.group(axes)
    if reduction.moved is not None:
        return _bind_moved_rows(reduction.moved, len(reduction.shape), axes, devices)
    if operation == GATHER:
        return _bind_kernel_all_gather(devices, axes, varying)
    if operation in (MIRROR, PREVIOUS, NEXT, RING):
        # Block i moves to block n-1-i, i-1 or i+1; `order` maps blocks to positions in the group.
        blocks = range(group.size)
        following = (*blocks[1:], 0)
        # Named by the source: with NEXT each rank receives the block of the next one.
        moved = {MIRROR: blocks[::-1], NEXT: (blocks[-1], *blocks[:-1])}
        to = dict(zip(blocks, moved.get(operation, following), strict=True))
        target_of = {group.order[block]: group.order[to[block]] for block in blocks}
        targets = [target_of[position] for position in blocks]
        permute = bind_permutation(targets, axes, devices)
        # Only a ring overlaps the exchange with computation, and needs its start apart from its
        # end.
        if operation != RING:
            return Reduce(permute, permute.forward.start, identity)
        group, send, receive = make_permutation_splits(targets, axes, devices)
        return Reduce(
            permute,
            lambda x: start_exchange(x, send, receive, group),
            lambda pending: wait(pending, group.waits),
            program_line,
        )

    def start(x: Tensor) -> Tensor:
        # Detached: `BoundCollective` below defines the gradient of the sum. A maximum needs none,
        # as it only shifts the exponents of a softmax.
        return c10d.all_reduce(x.detach().contiguous(), operation, group.name)  # type: ignore[no-any-return]

    def finish(x: Tensor) -> Tensor:
        return wait(x, group.waits)

    def run(x: Tensor) -> Tensor:
        return finish(start(x))

    if operation != "sum":
        return Reduce(run, start, finish)
    # Each rank has one term of a varying gradient; otherwise all ranks have the full gradient.
    backward = all_reduce(group) if varying else blocking(identity)
    return Reduce(BoundCollective(blocking(run), backward), start, finish)


def _bind_moved_rows(moved: MovedRows, ndim: int, axes: Axes, devices: Devices) -> Reduce:
    """Bind a move of rows between the shards over `axes`."""
    order = devices.group(axes).order
    move = bind_exchange(moved.exchange(order, ndim), axes, devices)
    return Reduce(move, move.forward.start, identity)


def _bind_kernel_all_gather(devices: Devices, axes: Axes, varying: bool) -> Reduce:
    """Bind an all-gather along dimension 0 to the process group over `axes`."""
    group, index = devices.group(axes), devices.index(axes)
    gather = all_gather(0, group)
    own_block = blocking(lambda x: slice_block(x, 0, index, group.size))
    return Reduce(
        BoundCollective(gather, reduce_scatter(0, group) if varying else own_block),
        lambda x: gather.start(x.detach()),
        lambda pending: gather.finish(pending, pending.dtype),
    )
