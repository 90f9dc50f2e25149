"""The table of redistribution steps: communication volume, rounds and gradient of each kind.

Does not import torch. To add a kind, add its `CollectiveSpec` here, and its implementation to the
table `BINDINGS` of `core/runtime/collectives.py`.

The communication volume is the bytes that one device sends, by the ring algorithms of Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009: with p devices
in the group an all-gather sends (p-1)/p of its output, a reduce-scatter (p-1)/p of its input, an
all-reduce both, an all-to-all (p-1)/p of the local tensor, a permute or an all-to-all of unequal
parts all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import lcm, prod
from typing import Literal

from shardwright.core.layout.axes import Axes, common_length, shard_index
from shardwright.core.layout.layout import TensorLayout

Pattern = Literal["ring", "pairwise", "point_to_point"]
"""Traffic pattern: round the group, level by level of the interconnect; from each device to each
other one; from each device to those that need parts of its shard."""

AxesBetween = Callable[[TensorLayout, TensorLayout], Axes | None]


@dataclass(frozen=True)
class CollectiveSpec:
    """One kind of step between two layouts.

    Args:
        kind: its name.
        local: whether the forward pass communicates nothing.
        backward: the collective of the backward pass; None if it communicates nothing.
        backward_if_varying: the collective of the backward pass if the target is varying over the
            axes of the step.
        pattern: the traffic pattern.
        passes: number of times that (p-1)/p of the larger of input and output is sent; with a
            point-to-point pattern, that all of it is.
        rounds: number of times that data travels round the group, for the latency.
        gloo_rounds: number of rounds with gloo, if it differs.
        joins: the kind of which this one replaces two consecutive steps, if not with more bytes.
        axes_between: for a kind that joins: returns the axes over which one step leads from the
            first layout to the second, or None if none does.
    """

    kind: str
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
        """Returns the collective of the backward pass; None if it communicates nothing."""
        return self.backward_if_varying if varying else self.backward

    def sent(self, size: int, group: int) -> int:
        """Returns what one device sends, rounded up, in the unit of `size`.

        Args:
            size: size of the larger of input and output.
            group: number of devices in the group.
        """
        if self.pattern == "point_to_point":
            return self.passes * size
        return -(-self.passes * (group - 1) * size // group)


@dataclass(frozen=True)
class CellExchange:
    """The cells of its shard that each device of a group sends to each other, in an `all_to_all_v`.

    A *cell* is the largest block of which the shards of both layouts consist. A *position* is the
    index of a device in the group, which counts the axes in mesh order. The cells of a shard are
    numbered in row-major order.

    Args:
        send_cuts, receive_cuts: number of cells of a shard along each dimension, before and after.
        send_order: for each position, its cells in the order of sending, those for position 0
            first.
        send_counts: for each position, the number of cells that it sends to each other.
        receive_order: for each position and cell of its new shard, the index in the received cells.
        receive_counts: for each position, the number of cells that it receives from each other.
    """

    send_cuts: tuple[int, ...]
    receive_cuts: tuple[int, ...]
    send_order: tuple[tuple[int, ...], ...]
    send_counts: tuple[tuple[int, ...], ...]
    receive_order: tuple[tuple[int, ...], ...]
    receive_counts: tuple[tuple[int, ...], ...]

    @property
    def backward(self) -> CellExchange:
        """The exchange of the backward pass, in the opposite direction."""
        return CellExchange(
            self.receive_cuts,
            self.send_cuts,
            tuple(map(_inverse, self.receive_order)),
            self.receive_counts,
            tuple(map(_inverse, self.send_order)),
            self.send_counts,
        )


@lru_cache(maxsize=1 << 10)
def cell_exchange(source: TensorLayout, target: TensorLayout) -> CellExchange:
    """Returns the exchange over `exchanged_axes` that turns shards of `source` into `target`'s."""
    before, after = _differing_axes(source, target)
    sizes = source.device_matrix
    axes = sorted(axis for dim in before for axis in dim)
    cuts = [
        lcm(source.layout.size(a), target.layout.size(b))
        for a, b in zip(before, after, strict=True)
    ]
    group = list(product(*(range(sizes[axis]) for axis in axes)))
    old = [_cells(before, cuts, dict(zip(axes, coords, strict=True)), sizes) for coords in group]
    new = [_cells(after, cuts, dict(zip(axes, coords, strict=True)), sizes) for coords in group]
    sender = {cell: position for position, cells in enumerate(old) for cell in cells}
    receiver = {cell: position for position, cells in enumerate(new) for cell in cells}
    # Both sides order the cells between two positions by their index in the full tensor.
    sent = [sorted(cells, key=lambda cell: (receiver[cell], cell)) for cells in old]
    received = [sorted(cells, key=lambda cell: (sender[cell], cell)) for cells in new]
    return CellExchange(
        tuple(n // source.layout.size(a) for n, a in zip(cuts, before, strict=True)),
        tuple(n // source.layout.size(a) for n, a in zip(cuts, after, strict=True)),
        tuple(tuple(map(cells.index, order)) for cells, order in zip(old, sent, strict=True)),
        tuple(_counts([receiver[cell] for cell in cells], len(group)) for cells in old),
        tuple(tuple(map(order.index, cells)) for cells, order in zip(new, received, strict=True)),
        tuple(_counts([sender[cell] for cell in cells], len(group)) for cells in new),
    )


def exchanged_axes(source: TensorLayout, target: TensorLayout) -> Axes | None:
    """Returns the axes of the `all_to_all_v` between two layouts, in mesh order.

    None if the layouts use different axes, or if each shard has cells for every device of the
    group: then an ordinary all-to-all is as good.
    """
    before, after = _differing_axes(source, target)
    axes = sorted(axis for dim in before for axis in dim)
    if axes != sorted(axis for dim in after for axis in dim):
        return None
    size = source.layout.size
    parts = [(size(a), size(b)) for a, b in zip(before, after, strict=True)]
    cells = prod(lcm(a, b) // a for a, b in parts)
    return tuple(axes) if cells < size(axes) else None


def _differing_axes(source: TensorLayout, target: TensorLayout) -> tuple[list[Axes], list[Axes]]:
    """The axes of each dimension in both layouts, without the common prefix."""
    before, after = [], []
    for source_axes, target_axes in zip(source.axes, target.axes, strict=True):
        same = common_length(source_axes, target_axes)
        before.append(source_axes[same:])
        after.append(target_axes[same:])
    return before, after


def _cells(
    cuts: list[Axes], cells: list[int], coordinates: dict[int, int], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The cells of the shard at `coordinates`, row by row, as indices in the full tensor."""
    ranges = []
    for axes, count in zip(cuts, cells, strict=True):
        first, length = shard_index(axes, sizes, coordinates), count // prod(sizes[a] for a in axes)
        ranges.append(range(first * length, (first + 1) * length))
    return list(product(*ranges))


def _counts(positions: list[int], devices: int) -> tuple[int, ...]:
    """The number of occurrences of each position."""
    counts = Counter(positions)
    return tuple(counts[position] for position in range(devices))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))


# The order breaks ties between steps of equal cost (`route_search.KINDS`).
COLLECTIVES = {
    spec.kind: spec
    for spec in (
        CollectiveSpec("slice", local=True, backward="all_gather"),
        CollectiveSpec("reduce_scatter", backward="all_gather", gloo_rounds=2),
        CollectiveSpec("permute", backward="permute", pattern="point_to_point"),
        CollectiveSpec("all_to_all", backward="all_to_all", pattern="pairwise"),
        CollectiveSpec("all_reduce", passes=2, rounds=2),
        CollectiveSpec("vary", local=True, backward_if_varying="all_reduce"),
        CollectiveSpec("all_gather", backward_if_varying="reduce_scatter"),
        CollectiveSpec(
            "all_to_all_v",
            backward="all_to_all_v",
            pattern="point_to_point",
            joins="all_to_all",
            axes_between=exchanged_axes,
        ),
    )
}
