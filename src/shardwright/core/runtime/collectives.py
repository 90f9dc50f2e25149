"""Redistribution steps as functions on local tensors, with their gradients.

Each type of step is a pair of plain functions, forward and backward, over PyTorch's functional
collectives; one autograd function combines any pair. The gradient of each step is another step:

| step | forward | backward |
|---|---|---|
| slice | keep this rank's shard of a replicated tensor | all-gather |
| vary | identity | all-reduce |
| all_reduce | sum over the ranks | identity |
| reduce_scatter | sum over the ranks, keep this rank's shard | all-gather |
| all_gather | concatenate the shards | reduce-scatter if varying, else slice |
| all_to_all | gather one dimension, shard another | all-to-all, in reverse |
| permute | send the shard to another rank | permute, in reverse |
| all_to_all_v | exchange parts of shards | all-to-all-v, in reverse |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.layout.axes import Axes, shard_index
from shardwright.core.layout.collective_spec import CellExchange, cell_exchange
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.rules.rule import TensorFunction
from shardwright.core.runtime.collective_errors import program_line
from shardwright.core.runtime.devices import Devices, Group, Index
from shardwright.core.runtime.exposed_communication import WaitTimer
from shardwright.core.runtime.sent_dtypes import reducible, restored, sendable
from shardwright.core.torch_internals.compiled import is_compiling
from shardwright.core.torch_internals.distributed import functional_collectives as c10d


@dataclass(frozen=True)
class Collective:
    """An asynchronous collective; calling it runs `start` and `finish` in sequence.

    Args:
        start: starts the collective on a local tensor and returns the pending result.
        finish: waits for the pending result and returns the result, in the given dtype.
        joined: (dim, number of shards) if `finish` concatenates along `dim` the shards that the
            pending result has along dimension 0; None if the pending result has its final shape.
    """

    start: TensorFunction
    finish: Callable[[Tensor, torch.dtype], Tensor]
    joined: tuple[int, int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.finish(self.start(x), x.dtype)

    def pending_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the pending result, given the `shape` of the final result."""
        pending = list(shape)
        if self.joined is not None:
            dim, blocks = self.joined
            # For dimension 0 the two changes cancel.
            pending[dim] //= blocks
            pending[0] *= blocks
        return pending


def blocking(function: TensorFunction) -> Collective:
    """Wrap `function`, a synchronous collective, as a `Collective` that completes in `start`."""
    return Collective(function, lambda out, dtype: out)


def all_reduce(group: Group, operation: str = "sum") -> Collective:
    """Return an all-reduce over `group`; `operation` is "sum" or "max"."""
    return Collective(
        lambda x: c10d.all_reduce(reducible(x), operation, group.name),
        _make_finish_for_final_shape(group),
    )


def all_gather(dim: int, group: Group) -> Collective:
    """Return an all-gather over `group`, whose result is concatenated along `dim`."""

    def start(x: Tensor) -> Tensor:
        out: Tensor = c10d.all_gather_into_tensor(sendable(x), group.size, group.name)
        return out

    return Collective(start, _make_finish_with_concatenation(dim, group), (dim, group.size))


def reduce_scatter(dim: int, group: Group) -> Collective:
    """Return a reduce-scatter over the group, which sums over the ranks and keeps this rank's shard
    along `dim`."""

    def start(x: Tensor) -> Tensor:
        # The collective splits along dimension 0, in the order of the group's ranks.
        if dim != 0 or not group.in_order:
            x = torch.cat(_order_blocks_by_rank(x.chunk(group.size, dim), group), 0)
        out: Tensor = c10d.reduce_scatter_tensor(reducible(x), "sum", group.size, group.name)
        return out

    return Collective(start, _make_finish_for_final_shape(group))


def all_to_all(dim: int, to_dim: int, group: Group) -> Collective:
    """Return an all-to-all over `group`, which moves sharding from `dim` to `to_dim`."""

    def start(x: Tensor) -> Tensor:
        # The collective exchanges rows: block i along dimension 0 goes to rank i of the group.
        blocks = torch.cat(_order_blocks_by_rank(x.chunk(group.size, to_dim), group), 0)
        sizes = [blocks.shape[0] // group.size] * group.size
        out: Tensor = c10d.all_to_all_single(sendable(blocks), sizes, sizes, group.name)
        return out

    return Collective(start, _make_finish_with_concatenation(dim, group), (dim, group.size))


def _make_finish_for_final_shape(group: Group) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return a `Collective.finish` that waits for the pending result and keeps its shape."""
    return lambda pending, dtype: complete(pending, dtype, group)


def _make_finish_with_concatenation(
    dim: int, group: Group
) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return a `Collective.finish` that waits for the pending result and moves its shards from
    dimension 0 to `dim`."""

    def finish(pending: Tensor, dtype: torch.dtype) -> Tensor:
        out = complete(pending, dtype, group)
        # Collectives concatenate blocks along dimension 0, in the order of the group's ranks.
        if dim == 0 and group.in_order:
            return out
        blocks = out.chunk(group.size, 0)
        return torch.cat([blocks[position] for position in group.order], dim)

    return finish


def slice_block(x: Tensor, dim: int, index: Index, count: int) -> Tensor:
    """Return shard `index` of `count` equal shards of `x` along `dim`, as a view."""
    size = x.shape[dim] // count
    return torch.narrow(x, dim, index * size, size)


def exchange(x: Tensor, send: list[Index], receive: list[Index], group: Group) -> Tensor:
    """Send this rank's tensor to one rank, and return the tensor received from another rank.

    Args:
        x: the tensor to send; all ranks send equal shapes.
        send: for each rank of the group, 1 for the destination, 0 for all others.
        receive: for each rank of the group, 1 for the source, 0 for all others.
        group: the communicating ranks.
    """
    out = start_exchange(x, send, receive, group)
    return complete(out, x.dtype, group).view(x.shape)


def start_exchange(x: Tensor, send: list[Index], receive: list[Index], group: Group) -> Tensor:
    """Start `exchange` and return the pending result, of shape (1, number of elements)."""
    # As in PyTorch's `permute_tensor`: functional collectives have no send and receive.
    flat = sendable(x.contiguous().view(1, -1))
    out: Tensor = c10d.all_to_all_single(flat, receive, send, group.name)
    return out


def split_cells(x: Tensor, cuts: Sequence[int]) -> Tensor:
    """Divide `x` into a grid of equal cells, `cuts[d]` along dimension d, and return the cells in
    row-major order, stacked along a new first dimension."""
    sizes = [size // count for size, count in zip(x.shape, cuts, strict=True)]
    pairs = [n for pair in zip(cuts, sizes, strict=True) for n in pair]
    # The indices of the cells first, then the dimensions of a cell.
    cells = x.reshape(pairs).permute(*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2))
    return cells.reshape(-1, *sizes)


def join_cells(cells: Tensor, cuts: Sequence[int]) -> Tensor:
    """Join `cells`, the result of `split_cells` with equal `cuts`, to the original tensor."""
    sizes, dims = cells.shape[1:], len(cuts)
    # Each dimension is again (index of the cell, position in the cell).
    order = [d + offset for d in range(dims) for offset in (0, dims)]
    x = cells.reshape(*cuts, *sizes).permute(order)
    return x.reshape([count * size for count, size in zip(cuts, sizes, strict=True)])


def _order_blocks_by_rank(blocks: tuple[Tensor, ...], group: Group) -> list[Tensor]:
    ordered = list(blocks)
    # Shard i goes to the rank that owns it, at position `order[i]` of the group.
    for block, position in zip(blocks, group.order, strict=True):
        ordered[position] = block
    return ordered


def wait(x: Tensor, waits: WaitTimer) -> Tensor:
    """Wait for the pending result `x` of a collective and return it; add the time to `waits`."""
    # The timer cannot be traced, so waits of compiled programs do not count.
    if is_compiling():
        return c10d.wait_tensor(x)  # type: ignore[no-any-return]
    with waits.measure():
        return c10d.wait_tensor(x)  # type: ignore[no-any-return]


def complete(x: Tensor, dtype: torch.dtype, group: Group) -> Tensor:
    """Wait for `x`, the pending result of a collective on a tensor from `sendable` or `reducible`;
    return the result in `dtype`, the dtype of the original tensor."""
    return restored(wait(x, group.waits), dtype)


def identity(x: Tensor) -> Tensor:
    """Return `x`: the forward pass of `vary`, whose backward pass is an all-reduce."""
    return x


class _RedistributeFunction(torch.autograd.Function):
    """Autograd function that applies collective `forward` to a tensor, and `backward` to the
    tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
        # Recorded now: autograd calls `backward` without a frame of the program.
        ctx.backward_function, ctx.call_site = backward, program_line()
        out = forward(x)
        # Autograd treats an input that is returned unchanged differently from a view of it.
        return out.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_function(gradients[0]), None, None


@dataclass(frozen=True)
class BoundCollective:
    """A redistribution step bound to process groups, as a function of the local tensor."""

    forward: Collective
    backward: Collective

    def __call__(self, x: Tensor) -> Tensor:
        # Without a gradient, the overhead of an autograd function is avoided.
        if x.requires_grad:
            return _RedistributeFunction.apply(x, self.forward, self.backward)  # type: ignore[no-any-return,no-untyped-call]
        return self.forward(x)


def bind(step: RedistributionStep, devices: Devices) -> BoundCollective:
    """Bind a redistribution step to the process groups of `devices`."""
    return BINDINGS[step.operation](step, devices)


def _bind_slice(step: RedistributionStep, devices: Devices) -> BoundCollective:
    group = devices.group(step.axes)
    return BoundCollective(
        _bind_shard_slice(step, devices), all_gather(_get_sharded_dim(step), group)
    )


def _bind_gradient_all_reduce(step: RedistributionStep, devices: Devices) -> BoundCollective:
    return BoundCollective(blocking(identity), all_reduce(devices.group(step.axes)))


def _bind_all_reduce(step: RedistributionStep, devices: Devices) -> BoundCollective:
    return BoundCollective(all_reduce(devices.group(step.axes)), blocking(identity))


def _bind_reduce_scatter(step: RedistributionStep, devices: Devices) -> BoundCollective:
    group, dim = devices.group(step.axes), _get_sharded_dim(step)
    return BoundCollective(reduce_scatter(dim, group), all_gather(dim, group))


def _bind_all_gather(step: RedistributionStep, devices: Devices) -> BoundCollective:
    group, dim = devices.group(step.axes), _get_sharded_dim(step)
    if step.backward == "reduce_scatter":
        return BoundCollective(all_gather(dim, group), reduce_scatter(dim, group))
    # The gradient of a replicated result is equal on all ranks, so each keeps its block of it.
    return BoundCollective(all_gather(dim, group), _bind_shard_slice(step, devices))


def _bind_all_to_all(step: RedistributionStep, devices: Devices) -> BoundCollective:
    group, dim, to_dim = devices.group(step.axes), _get_sharded_dim(step), step.to_dim
    assert to_dim is not None
    return BoundCollective(all_to_all(dim, to_dim, group), all_to_all(to_dim, dim, group))


def _bind_shard_slice(step: RedistributionStep, devices: Devices) -> Collective:
    """Return a collective that keeps this rank's shard along the sharded dimension of `step`."""
    dim, count, index = (
        _get_sharded_dim(step),
        devices.matrix.size(step.axes),
        devices.index(step.axes),
    )
    return blocking(lambda x: slice_block(x, dim, index, count))


def _get_sharded_dim(step: RedistributionStep) -> int:
    assert step.dim is not None
    return step.dim


def start_all_reduce(step: RedistributionStep, devices: Devices) -> BoundCollective:
    """Bind an all-reduce that only starts; the operator that reads the result waits for it."""
    start = all_reduce(devices.group(step.axes)).start
    return BoundCollective(blocking(start), blocking(identity))


def _bind_permute(step: RedistributionStep, devices: Devices) -> BoundCollective:
    return bind_permutation(step.permutation(), step.axes, devices)


def bind_permutation(targets: Sequence[int], axes: Axes, devices: Devices) -> BoundCollective:
    """Bind a permutation of shards: position i of the group over `axes`, in the order of the mesh,
    sends its shard to position `targets[i]`."""
    group, send, receive = make_permutation_splits(targets, axes, devices)
    return BoundCollective(
        blocking(lambda x: exchange(x, send, receive, group)),
        blocking(lambda g: exchange(g, receive, send, group)),
    )


def make_permutation_splits(
    targets: Sequence[int], axes: Axes, devices: Devices
) -> tuple[Group, list[Index], list[Index]]:
    """Return the group over `axes`, and the number of blocks (0 or 1) that this rank sends to, and
    receives from, each rank of the group in a permutation.

    Args:
        targets: for each position in the group, the position of the rank to which it sends.
        axes: the mesh axes of the group.
        devices: this rank's view of the devices.
    """
    # Sorted, because `to` counts positions in the order of the mesh, as the process group does.
    group = devices.group(tuple(sorted(axes)))
    # The collective's splits are numbers of rows: 1 for the one partner, 0 for other ranks.
    sources = [targets.index(position) for position in range(group.size)]
    # This rank sends to a position if it is the source of that position.
    send = [_make_position_indicator(devices, group, source) for source in sources]
    return group, send, [_make_position_indicator(devices, group, target) for target in targets]


def _bind_all_to_all_v(step: RedistributionStep, devices: Devices) -> BoundCollective:
    return bind_exchange(cell_exchange(step.source, step.target), step.axes, devices)


def bind_exchange(exchange: CellExchange, axes: Axes, devices: Devices) -> BoundCollective:
    """Bind an exchange of cells over `axes` and, for gradients, its inverse."""
    # Sorted, as the tables of an exchange count positions in the order of the mesh.
    group = devices.group(tuple(sorted(axes)))
    return BoundCollective(
        blocking(_bind_cell_exchange(exchange, group, devices)),
        blocking(_bind_cell_exchange(exchange.backward, group, devices)),
    )


def _bind_cell_exchange(exchange: CellExchange, group: Group, devices: Devices) -> TensorFunction:
    sizes = devices.matrix.device_matrix

    def row(table: tuple[tuple[int, ...], ...]) -> list[Index]:
        """Return this rank's row of `table`, which has one row per rank of the group."""

        def entry(column: int) -> Index:
            return devices.per_rank(
                lambda coordinates: table[shard_index(group.axes, sizes, coordinates)][column]
            )

        return [entry(column) for column in range(len(table[0]))]

    send, receive = row(exchange.send_counts), row(exchange.receive_counts)
    send_order, receive_order = row(exchange.send_order), row(exchange.receive_order)

    def exchange_cells(x: Tensor) -> Tensor:
        cells = split_cells(x, exchange.send_cuts)
        shape = cells.shape[1:]
        flat = _order_cells(cells, send_order).flatten(1)
        out = c10d.all_to_all_single(sendable(flat), receive, send, group.name)
        out = complete(out, x.dtype, group)
        ordered = _order_cells(out, receive_order)
        return join_cells(ordered.view(-1, *shape), exchange.receive_cuts)

    return exchange_cells


def _order_cells(cells: Tensor, order: Sequence[Index]) -> Tensor:
    """Return the cells along dimension 0 in the order of the indices in `order`."""
    # By `narrow`, which takes the `SymInt`s of simulated ranks; an index would need one number.
    runs: list[list[Index]] = []
    for index in order:
        if runs and isinstance(index, int) and index == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    # Consecutive cells at once; those of simulated ranks one by one, as each has its own order.
    return torch.cat([torch.narrow(cells, 0, *run) for run in runs])


def _make_position_indicator(devices: Devices, group: Group, position: int) -> Index:
    """Return 1 on the rank at `position` of the group, 0 on other ranks."""
    sizes = devices.matrix.device_matrix
    return devices.per_rank(
        lambda coordinates: int(shard_index(group.axes, sizes, coordinates) == position)
    )


BINDINGS: dict[str, Callable[[RedistributionStep, Devices], BoundCollective]] = {
    "slice": _bind_slice,
    "vary": _bind_gradient_all_reduce,
    "all_reduce": _bind_all_reduce,
    "reduce_scatter": _bind_reduce_scatter,
    "all_gather": _bind_all_gather,
    "all_to_all": _bind_all_to_all,
    "permute": _bind_permute,
    "all_to_all_v": _bind_all_to_all_v,
}
"""Functions that bind a redistribution step to process groups, by the type of step."""
