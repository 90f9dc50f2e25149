"""The table of redistribution steps: communication volume, rounds and gradient of each kind.

Does not import torch. To add a kind, add its `CollectiveSpec` here, and its implementation to the
table `BINDINGS` of `core/runtime/collectives.py`.

The communication volume is the bytes that one device sends, by the ring algorithms of Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009: with p devices
in the group an all-gather sends (p-1)/p of its output, a reduce-scatter (p-1)/p of its input, an
all-reduce the sum of both, an all-to-all (p-1)/p of the local tensor, and a permute or an
all-to-all of unequal parts the full local tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import lcm, prod
from typing import Literal, TypeVar

from shardwright.core.layout.axes import Axes, common_length, shard_index
from shardwright.core.layout.layout import TensorLayout

Pattern = Literal["ring", "pairwise", "point_to_point"]
"""How a collective communicates: around a ring, between all pairs of devices, or from each device
to those that need parts of its shard."""

_Cell = TypeVar("_Cell", int, tuple[int, ...])

AxesBetween = Callable[[TensorLayout, TensorLayout], Axes | None]
"""Function of two layouts, source and target, that returns the axes of one step between them."""


@dataclass(frozen=True)
class CollectiveSpec:
    """Specification of one type of redistribution step.

    Args:
        name: name of the step, such as `all_gather`.
        local: whether the forward pass needs no communication.
        backward: collective of the backward pass; None without communication.
        backward_if_varying: collective of the backward pass if the target is varying over the axes
            of the step: replicated, with gradients that are partial sums.
        pattern: communication pattern of the forward pass.
        passes: number of times that each device sends (p-1)/p of the larger of input and output;
            with a point-to-point pattern, the full local tensor.
        rounds: number of times that data travels around the group; determines the latency.
        gloo_rounds: number of rounds with gloo; None for `rounds`.
        joins: type of two consecutive steps that one step of this type can replace; None if it
            replaces no steps.
        axes_between: function that returns the axes of a single step of this type from a source to
            a target layout, or None if no such step exists; None without `joins`.
    """

    name: str
    local: bool = False
    backward: str | None = None
    backward_if_varying: str | None = None
    pattern: Pattern = "ring"
    passes: int = 1
    rounds: int = 1
    gloo_rounds: int | None = None
    joins: str | None = None
    axes_between: AxesBetween | None = None

    def backward_of(self, varying: bool) -> str | None:
        """Return the collective of the backward pass; None without communication.

        Args:
            varying: whether the gradient of the target is a partial sum over the axes of the step.
        """
        return self.backward_if_varying if varying else self.backward

    def sent_volume(self, size: int, group: int) -> int:
        """Return the communication volume of one device, rounded up, in the unit of `size`
        (elements or bytes).

        Args:
            size: local size of the larger of input and output.
            group: number of devices in the group.
        """
        if self.pattern == "point_to_point":
            return self.passes * size
        # (p-1)/p of the larger tensor per pass; -(-a // b) is a / b rounded up.
        return -(-self.passes * (group - 1) * size // group)


@dataclass(frozen=True)
class CellExchange:
    """The cells of a shard that each device of a group sends to each device in an `all_to_all_v`.

    A *cell* is the largest block of which the shards of both layouts consist. A *position* is the
    index of a device in the group, with the axes in mesh order. The cells of a shard are counted in
    row-major order.

    Args:
        send_cuts, receive_cuts: number of cells along each dimension of a shard in the source
            layout, and of a shard in the target layout.
        send_order: indices of the cells of the source shard in the order of sending, cells for
            position 0 first; one tuple per position.
        send_counts: number of cells sent to each position; one tuple per position.
        receive_order: for each cell of the target shard, its index among the received cells; one
            tuple per position.
        receive_counts: number of cells received from each position; one tuple per position.
    """

    send_cuts: tuple[int, ...]
    receive_cuts: tuple[int, ...]
    send_order: tuple[tuple[int, ...], ...]
    send_counts: tuple[tuple[int, ...], ...]
    receive_order: tuple[tuple[int, ...], ...]
    receive_counts: tuple[tuple[int, ...], ...]

    @property
    def backward(self) -> CellExchange:
        """The inverse exchange, from target shards to source shards."""
        return CellExchange(
            self.receive_cuts,
            self.send_cuts,
            tuple(map(_invert_permutation, self.receive_order)),
            self.receive_counts,
            tuple(map(_invert_permutation, self.send_order)),
            self.send_counts,
        )


@lru_cache(maxsize=1 << 10)
def cell_exchange(source: TensorLayout, target: TensorLayout) -> CellExchange:
    """Return the cells that each device sends and receives in the `all_to_all_v` of two layouts.

    A *cell* is the largest block of which the shards of both layouts consist.
    """
    # Devices that differ on a common leading axis exchange nothing, so that it is not of the group.
    before, after = _find_differing_axes(source, target)
    sizes = source.device_matrix
    axes = sorted(axis for dim in before for axis in dim)
    # Along each dimension the coarsest cells that divide the shards of both layouts.
    cuts = [
        lcm(source.layout.size(a), target.layout.size(b))
        for a, b in zip(before, after, strict=True)
    ]
    group = list(product(*(range(sizes[axis]) for axis in axes)))
    source_cells = [
        _list_cells_of_shard(before, cuts, dict(zip(axes, coords, strict=True)), sizes)
        for coords in group
    ]
    target_cells = [
        _list_cells_of_shard(after, cuts, dict(zip(axes, coords, strict=True)), sizes)
        for coords in group
    ]
    return _exchange_cells(
        source_cells,
        target_cells,
        tuple(n // source.layout.size(a) for n, a in zip(cuts, before, strict=True)),
        tuple(n // source.layout.size(a) for n, a in zip(cuts, after, strict=True)),
    )


@dataclass(frozen=True)
class MovedRows:
    """Blocks of rows that move between the equal shards of one dimension.

    Args:
        dim: the dimension.
        source: the blocks of each shard, by any numbers, in their order before the move.
        target: the blocks of each shard, in their order after the move.
    """

    dim: int
    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]

    @cached_property
    def is_even(self) -> bool:
        """Whether each shard sends equally many blocks to each shard, itself included."""
        counts = self.exchange(range(len(self.source)), self.dim + 1).send_counts
        return len({count for row in counts for count in row}) == 1

    def exchange(self, order: Sequence[int], ndim: int) -> CellExchange:
        """Return the blocks that each device sends and receives.

        Args:
            order: for each shard, the position of its device in the group.
            ndim: number of dimensions of the tensor.
        """
        shards = [order.index(position) for position in range(len(order))]
        cuts = tuple(len(self.source[0]) if dim == self.dim else 1 for dim in range(ndim))
        return _exchange_cells(
            [self.source[shard] for shard in shards],
            [self.target[shard] for shard in shards],
            cuts,
            cuts,
        )


def _exchange_cells(
    source_cells: Sequence[Sequence[_Cell]],
    target_cells: Sequence[Sequence[_Cell]],
    send_cuts: tuple[int, ...],
    receive_cuts: tuple[int, ...],
) -> CellExchange:
    """Return the exchange between the cells of each position, before and after."""
    group_size = len(source_cells)
    sender = {cell: position for position, cells in enumerate(source_cells) for cell in cells}
    receiver = {cell: position for position, cells in enumerate(target_cells) for cell in cells}
    # Sender and receiver order the cells between them by their index in the full tensor.
    sent = [sorted(cells, key=lambda cell: (receiver[cell], cell)) for cells in source_cells]
    received = [sorted(cells, key=lambda cell: (sender[cell], cell)) for cells in target_cells]
    return CellExchange(
        send_cuts,
        receive_cuts,
        tuple(
            tuple(map(cells.index, order)) for cells, order in zip(source_cells, sent, strict=True)
        ),
        tuple(
            _count_positions([receiver[cell] for cell in cells], group_size)
            for cells in source_cells
        ),
        tuple(
            tuple(map(order.index, cells))
            for cells, order in zip(target_cells, received, strict=True)
        ),
        tuple(
            _count_positions([sender[cell] for cell in cells], group_size) for cells in target_cells
        ),
    )


def all_to_all_v_axes(source: TensorLayout, target: TensorLayout) -> Axes | None:
    """Return the axes of the `all_to_all_v` between two layouts, in mesh order.

    Returns None if the layouts use different axes. Also returns None if each shard has cells for
    every device of the group: `all_to_all_v` then sends as many bytes as `all_to_all`.
    """
    before, after = _find_differing_axes(source, target)
    axes = sorted(axis for dim in before for axis in dim)
    # A change of the set of axes would need a gather or a slice too.
    if axes != sorted(axis for dim in after for axis in dim):
        return None
    size = source.layout.size
    count_pairs = [(size(a), size(b)) for a, b in zip(before, after, strict=True)]
    # Cells of one source shard: if there are fewer than devices, some pairs exchange nothing.
    cells = prod(lcm(a, b) // a for a, b in count_pairs)
    return tuple(axes) if cells < size(axes) else None


def _find_differing_axes(
    source: TensorLayout, target: TensorLayout
) -> tuple[list[Axes], list[Axes]]:
    """Return the axes that shard each dimension, in `source` and in `target`, without the common
    leading axes."""
    before, after = [], []
    for source_axes, target_axes in zip(source.axes, target.axes, strict=True):
        prefix_length = common_length(source_axes, target_axes)
        before.append(source_axes[prefix_length:])
        after.append(target_axes[prefix_length:])
    return before, after


def _list_cells_of_shard(
    cuts: list[Axes], cells: list[int], coordinates: dict[int, int], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Return the cells of a device's shard in row-major order, as indices in the full tensor.

    Args:
        cuts: the axes that shard each dimension.
        cells: number of cells of the full tensor along each dimension.
        coordinates: the device's coordinate on each axis.
        sizes: number of devices along each axis.
    """
    ranges = []
    for axes, count in zip(cuts, cells, strict=True):
        first, length = shard_index(axes, sizes, coordinates), count // prod(sizes[a] for a in axes)
        ranges.append(range(first * length, (first + 1) * length))
    return list(product(*ranges))


def _count_positions(positions: list[int], devices: int) -> tuple[int, ...]:
    """Return how often each position from 0 to `devices` - 1 occurs in `positions`."""
    counts = Counter(positions)
    return tuple(counts[position] for position in range(devices))


def _invert_permutation(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))


# Between steps of equal cost, the search prefers the kind that is listed first
# (`route_problem.KINDS`).
COLLECTIVES = {
    spec.name: spec
    for spec in (
        CollectiveSpec("slice", local=True, backward="all_gather"),
        # Gloo implements a reduce-scatter as an all-reduce of which each rank keeps its shard.
        CollectiveSpec("reduce_scatter", backward="all_gather", gloo_rounds=2),
        CollectiveSpec("permute", backward="permute", pattern="point_to_point"),
        CollectiveSpec("all_to_all", backward="all_to_all", pattern="pairwise"),
        # A ring all-reduce is a reduce-scatter and an all-gather; with `vary`, Megatron's g and f.
        CollectiveSpec("all_reduce", passes=2, rounds=2),
        CollectiveSpec("vary", local=True, backward_if_varying="all_reduce"),
        # The gradient of a replicated tensor is equal on all devices: each slices its block
        # locally.
        CollectiveSpec("all_gather", backward_if_varying="reduce_scatter"),
        CollectiveSpec(
            "all_to_all_v",
            backward="all_to_all_v",
            pattern="point_to_point",
            joins="all_to_all",
            axes_between=all_to_all_v_axes,
        ),
    )
}
