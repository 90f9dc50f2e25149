"""Layouts by how many axes of each kind cut each dimension, and what lies between two at least.

Axes of one size on one level of links are alike: which of them cut a dimension decides what can be
shared, not what is possible. So a lower bound knows only their numbers, which are few. Between two
such layouts lies at least what a device must receive:

- A value that is whole somewhere: the block that is read, but for the most that the block that is
  there can have in common with it.
- Terms of a sum, one on each of p devices: p - 1 messages for each element until it is a sum, and
  one for each further copy.

What holds for a device holds for the devices of a node together, whose messages cross the slower
links. Each step of a redistribution takes at least as long as its messages do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardwright.core.cost.collectives import ELEMENT, Links
from shardwright.core.layout.axes import Axes

LayoutTable = npt.NDArray[np.float32]
NONE = 1e-6
"""A share of a value that is but rounding."""

Counts = npt.NDArray[np.int64]
"""How many axes of each kind (last dimension) are used for what (second to last)."""


@dataclass(frozen=True)
class AxisGroup:
    """Axes of one size on one level of links."""

    level: int
    size: int
    axes: Axes


def group_axes(links: Links) -> tuple[AxisGroup, ...]:
    """The axes of a device matrix of prime axes by what they are, those of the fastest links first;
    one that crosses several levels counts to the fastest."""
    by_kind: dict[tuple[int, int], list[int]] = {}
    for axis, size in enumerate(links.mesh.device_matrix):
        if size > 1:
            by_kind.setdefault((links.levels[axis][0][0], size), []).append(axis)
    return tuple(AxisGroup(*group, tuple(axes)) for group, axes in sorted(by_kind.items()))


def ways_to_cut(
    axis_groups: Sequence[AxisGroup], limits: Sequence[int], most: int
) -> Counts | None:
    """All ways to cut factors, each (way, factor, kind) with the number of axes that cut it; None
    if there are more than `most`.

    Args:
        limits: for each factor the number that its number of parts must divide.
    """
    ways = np.zeros((1, len(limits), 0), dtype=np.int64)
    for number, group in enumerate(axis_groups, start=1):
        dealt = np.array(list(_dealt(len(group.axes), len(limits))), dtype=np.int64)
        if len(ways) * len(dealt) > 20 * most:
            return None
        before = np.repeat(ways, len(dealt), axis=0)
        chosen = np.tile(dealt, (len(ways), 1))[:, :, None]
        ways = np.concatenate([before, chosen], axis=2)
        divides = np.array(limits) % parts_of(axis_groups[:number], ways) == 0
        ways = ways[divides.all(axis=1)]
    return ways if len(ways) <= most else None


def _dealt(axes: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways in which at most so many axes are dealt out to factors."""
    if not factors:
        yield ()
        return
    for first in range(axes + 1):
        for rest in _dealt(axes - first, factors - 1):
            yield (first, *rest)


class LeastSeconds:
    """Seconds that redistributions take at least on the links of a device matrix."""

    def __init__(self, links: Links, axis_groups: Sequence[AxisGroup]) -> None:
        levels = links.cluster.levels
        fastest = [max(level.rate for level in levels[n:]) for n in range(len(levels))]
        self._latency = [min(level.latency for level in levels[n:]) for n in range(len(levels))]
        slower = [1 / rate for rate in fastest]
        self._added = [after - before for before, after in pairwise([0.0, *slower])]
        # Of fewer bytes a shard may be a sum of fewer numbers than devices: see `Links`.
        self._few = ELEMENT * links.mesh.num_devices**2 if links.shared else 0
        self._level = np.array([group.level for group in axis_groups])
        self._log_size = np.log2([group.size for group in axis_groups])
        self._axes = np.array([len(group.axes) for group in axis_groups])
        self._rates: dict[object, tuple[LayoutTable, LayoutTable]] = {}
        self._tables: dict[object, LayoutTable] = {}

    def between(
        self, left: Counts, read: Counts, num_bytes: float, differentiable: bool
    ) -> LayoutTable:
        """From each layout in which a value is left (row) to each in which it is read (column).

        Args:
            left: (layout, dimension, kind), the last dimension that of sums.
            read: likewise, the last dimension that of reads whose gradients are sums.
            num_bytes: of the whole value.
        """
        key = left.shape, left.tobytes(), read.tobytes(), differentiable
        if (key, num_bytes) not in self._tables:
            if key not in self._rates:
                self._rates[key] = self._both_ways(left, read, differentiable)
            byte, latency = self._rates[key]
            if num_bytes < self._few:
                latency = np.minimum(latency, np.float32(self._latency[0]))
            self._tables[key, num_bytes] = np.float32(num_bytes) * byte + latency
        return self._tables[key, num_bytes]

    def _both_ways(
        self, left: Counts, read: Counts, differentiable: bool
    ) -> tuple[LayoutTable, LayoutTable]:
        byte, latency = self._one_way(left, read)
        if not differentiable:
            return byte, latency
        back, further = self._one_way(read, left)
        return byte + back.T, latency + further.T

    def _one_way(self, left: Counts, read: Counts) -> tuple[LayoutTable, LayoutTable]:
        """Seconds for each byte of the whole value, and latencies."""
        received = self._received(left, read, self._level >= 0)
        byte = self._added[0] * received
        for level, added in enumerate(self._added[1:], start=1):
            if added and (self._level >= level).any():
                byte += added * self._received(left, read, self._level >= level)
        sums = left[:, -1] @ (self._log_size * [self._latency[n] for n in self._level])
        uncut = (left.sum(1) @ self._log_size)[:, None] - read[:, :-1].sum(1) @ self._log_size
        copies = self._latency[0] * np.maximum(uncut, 0.0)
        latency = np.maximum(sums[:, None] + copies, self._latency[0] * (received > NONE))
        return byte, latency.astype(np.float32)

    def _received(self, left: Counts, read: Counts, crossed: npt.NDArray[np.bool_]) -> LayoutTable:
        """What a device receives over the links that axes cross, as a share of the whole value."""
        size = np.where(crossed, self._log_size, 0.0)
        inside = 2.0 ** (self._axes * (self._log_size - size)).sum()
        groups = 2.0 ** (self._axes * size).sum()
        here, there = (2.0 ** -(each @ size).astype(np.float32) for each in (left, read))
        terms = here[:, -1, None] ** -1
        wanted = there[:, :-1].prod(1)
        common = np.ones((len(left), len(read)), np.float32)
        for dim in range(there.shape[1] - 1):
            if (here[:, dim] != 1).any() or (there[:, dim] != 1).any():
                common *= np.minimum(here[:, dim, None], there[:, dim])
        whole, summed = wanted - common, (terms - 2) / groups + wanted
        received: LayoutTable = np.where(terms > 1 + NONE, summed, whole) / np.float32(inside)
        return received


def parts_of(axis_groups: Sequence[AxisGroup], counts: Counts) -> Counts:
    """In how many parts so many axes of each kind (last dimension) cut."""
    sizes = np.array([group.size for group in axis_groups], dtype=np.int64)
    products: Counts = (sizes**counts).prod(axis=-1)
    return products


def some_axes(axis_groups: Sequence[AxisGroup], counts: Counts, skip: Counts | None = None) -> Axes:
    """So many axes of each kind, but for the first `skip`."""
    before = np.zeros_like(counts) if skip is None else skip
    return tuple(
        axis
        for group, count, first in zip(axis_groups, counts, before, strict=True)
        for axis in group.axes[first : first + count]
    )
