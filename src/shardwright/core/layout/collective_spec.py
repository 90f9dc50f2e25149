"""The kinds of redistribution steps, one entry each: what they send, and how often. No torch.

To add a kind, add its `CollectiveSpec` here, and what carries it out to the table `BINDINGS` of
`core/runtime/collectives.py`.

Bytes are those that one device sends, by the ring algorithms of the literature (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): with p devices in the
group an all-gather sends (p-1)/p of its output, a reduce-scatter (p-1)/p of its input, an
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

from shardwright.core.layout.axes import Axes, block_number, common_length
from shardwright.core.layout.layout import TensorLayout

Pattern = Literal["ring", "pairwise", "point_to_point"]
"""How messages travel: round the group, level by level of the links; from each device to each
other one; from each device to those that its block has parts for."""

AxesBetween = Callable[[TensorLayout, TensorLayout], Axes | None]


@dataclass(frozen=True)
class CollectiveSpec:
    """One kind of step between two layouts.

    Args:
        kind: its name.
        local: whether nothing is sent forward.
        backward: the kind whose collective the gradient is; None if the gradient sends nothing.
        backward_if_varying: likewise, where the step leaves the tensor varying.
        pattern: how its messages travel.
        passes: how often (p-1)/p of the tensor's larger side is sent; of a point-to-point pattern,
            how often all of it.
        rounds: how often everything goes through the group.
        gloo_rounds: likewise with gloo, where that differs.
        joins: the kind of which it replaces two steps in a row, at no more bytes.
        axes_between: of a kind that joins, the axes over which it leads from one layout to another
            at once; None if it does not.
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
        """The collective of the gradient; None if that sends nothing."""
        return self.backward_if_varying if varying else self.backward

    def sent(self, size: int, group: int) -> int:
        """What one device of a group sends, rounded up, if its tensor's larger side is `size`."""
        if self.pattern == "point_to_point":
            return self.passes * size
        return -(-self.passes * (group - 1) * size // group)


@dataclass(frozen=True)
class CellExchange:
    """Which parts of its block each device of a group sends to which, in an `all_to_all_v`.

    The blocks of both layouts are made of equal cells. Positions count the joined axes in mesh
    order; cells of a block are numbered row by row.

    Args:
        send_cuts, receive_cuts: for each dimension the cells along a block before and after.
        send_order: for each position the numbers of its cells as they are sent, those for position
            0 first.
        send_counts: for each position how many cells it sends to each.
        receive_order: for each position and cell of its new block the place among the received.
        receive_counts: for each position how many cells it receives from each.
    """

    send_cuts: tuple[int, ...]
    receive_cuts: tuple[int, ...]
    send_order: tuple[tuple[int, ...], ...]
    send_counts: tuple[tuple[int, ...], ...]
    receive_order: tuple[tuple[int, ...], ...]
    receive_counts: tuple[tuple[int, ...], ...]

    @property
    def backward(self) -> CellExchange:
        """The same exchange the other way: what was sent is received in the order of sending."""
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
    """How the blocks of `source` become those of `target`, over `exchanged_axes`."""
    before, after = _changed(source, target)
    sizes = source.device_matrix
    axes = sorted(axis for dim in before for axis in dim)
    cuts = [
        lcm(source.layout.size(a), target.layout.size(b))
        for a, b in zip(before, after, strict=True)
    ]
    places = list(product(*(range(sizes[axis]) for axis in axes)))
    held = [_cells(before, cuts, dict(zip(axes, place, strict=True)), sizes) for place in places]
    wanted = [_cells(after, cuts, dict(zip(axes, place, strict=True)), sizes) for place in places]
    holder = {cell: position for position, cells in enumerate(held) for cell in cells}
    reader = {cell: position for position, cells in enumerate(wanted) for cell in cells}
    # What goes from one position to another is in the order of the whole tensor's cells.
    sent = [sorted(cells, key=lambda cell: (reader[cell], cell)) for cells in held]
    received = [sorted(cells, key=lambda cell: (holder[cell], cell)) for cells in wanted]
    return CellExchange(
        tuple(n // source.layout.size(a) for n, a in zip(cuts, before, strict=True)),
        tuple(n // source.layout.size(a) for n, a in zip(cuts, after, strict=True)),
        tuple(tuple(map(cells.index, order)) for cells, order in zip(held, sent, strict=True)),
        tuple(_counts([reader[cell] for cell in cells], len(places)) for cells in held),
        tuple(
            tuple(map(order.index, cells)) for cells, order in zip(wanted, received, strict=True)
        ),
        tuple(_counts([holder[cell] for cell in cells], len(places)) for cells in wanted),
    )


def exchanged_axes(source: TensorLayout, target: TensorLayout) -> Axes | None:
    """The axes that cut other dimensions in `target` than in `source`, in mesh order; None if other
    axes cut the tensor there, or if a block has a cell for every device, as in an all-to-all."""
    before, after = _changed(source, target)
    axes = sorted(axis for dim in before for axis in dim)
    if axes != sorted(axis for dim in after for axis in dim):
        return None
    size = source.layout.size
    parts = [(size(a), size(b)) for a, b in zip(before, after, strict=True)]
    cells = prod(lcm(a, b) // a for a, b in parts)
    return tuple(axes) if cells < size(axes) else None


def _changed(source: TensorLayout, target: TensorLayout) -> tuple[list[Axes], list[Axes]]:
    """For each dimension the axes of both layouts without those with which both begin."""
    before, after = [], []
    for mine, other in zip(source.axes, target.axes, strict=True):
        same = common_length(mine, other)
        before.append(mine[same:])
        after.append(other[same:])
    return before, after


def _cells(
    cuts: list[Axes], cells: list[int], place: dict[int, int], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The cells of the block at `place`, row by row, as indices into the whole tensor's."""
    ranges = []
    for axes, count in zip(cuts, cells, strict=True):
        first, length = block_number(axes, sizes, place), count // prod(sizes[a] for a in axes)
        ranges.append(range(first * length, (first + 1) * length))
    return list(product(*ranges))


def _counts(positions: list[int], devices: int) -> tuple[int, ...]:
    """How often each position comes."""
    counts = Counter(positions)
    return tuple(counts[position] for position in range(devices))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))


# In the order in which steps of equal cost are taken.
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
