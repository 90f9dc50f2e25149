"""How a tensor lies on a matrix of devices. No torch in here.

A `Layout` is the device matrix with a name for each of its axes, the outermost (slowest varying in
rank order) first. Called with one entry per tensor dimension it makes a `TensorLayout`:

>>> layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
>>> a = layout("mp", ("sp", "dp"))
>>> a.shard_counts
(2, 4)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True)
class Layout:
    """A device matrix whose axes have names.

    Args:
        device_matrix: number of devices along each axis, outermost first.
        alias_names: one name for each axis.
        rank_list: the rank at each place of the matrix in row-major order; by default 0, 1, 2, …
    """

    device_matrix: tuple[int, ...]
    alias_names: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None

    @property
    def num_devices(self) -> int:
        return prod(self.device_matrix)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.rank_list if self.rank_list is not None else tuple(range(self.num_devices))

    def size(self, axes: tuple[int, ...] | frozenset[int]) -> int:
        """Number of devices along the joined `axes` (indices from the left)."""
        return prod(self.device_matrix[a] for a in axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where `rank` stands on each axis."""
        place, found = self.ranks.index(rank), []
        for size in reversed(self.device_matrix):
            place, coordinate = divmod(place, size)
            found.append(coordinate)
        return tuple(reversed(found))

    def replicated(self, ndim: int) -> TensorLayout:
        """The layout in which every device holds the whole tensor."""
        return TensorLayout(self, ((),) * ndim)


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor lies on the devices of a `Layout`.

    Args:
        layout: the device matrix.
        axes: for each tensor dimension the axes (indices into the device matrix, from the left)
            that cut it, the most significant first; `()` where the dimension is whole.
        partial: axes on which every device holds one term of a sum.
        varying: axes on which the value is replicated but its gradient is one term of a sum.
    """

    layout: Layout
    axes: tuple[tuple[int, ...], ...]
    partial: frozenset[int] = frozenset()
    varying: frozenset[int] = frozenset()

    @property
    def sharded(self) -> frozenset[int]:
        """The axes that cut some dimension."""
        return frozenset(a for dim in self.axes for a in dim)

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """In how many parts each dimension is cut."""
        return tuple(self.layout.size(dim) for dim in self.axes)

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part of a tensor of `shape`."""
        return tuple(size // parts for size, parts in zip(shape, self.shard_counts, strict=True))

    def replace_axes(self, axes: tuple[tuple[int, ...], ...]) -> TensorLayout:
        return replace(self, axes=axes)


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors of `number`, ascending: 12 → (2, 2, 3), 1 → ()."""
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return (*found, number) if number > 1 else tuple(found)


def prime_mesh(devices: int) -> Layout:
    """The device matrix on which plans are made: one axis for each prime factor of `devices`."""
    sizes = prime_factors(devices)
    names = "abcdefghijklmnopqrstuvwxyz"
    return Layout(sizes, tuple(names[i] for i in range(len(sizes))))
