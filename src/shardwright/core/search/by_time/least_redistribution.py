"""What a redistribution takes at least, without finding its steps.

A device must receive what it reads of a value and does not hold, and the devices of a node together
what comes over the slower links. `axis_counts` bounds likewise where only the numbers of axes are
known; here it is known which axes cut a dimension.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise, takewhile
from operator import eq

from shardwright.core.cost.collectives import Links
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import TensorLayout

Placement = tuple[Axes, ...]
"""For each dimension the axes that cut it."""

NONE = 1e-9
"""A share of a value that is but rounding."""


class LeastRedistribution:
    """Bounds on the links of a device matrix of prime axes; those of equal layouts are found once.

    >>> from shardwright.core.cost.clusters import load_cluster
    >>> from shardwright.core.layout.prime_mesh import prime_mesh
    >>> mesh = prime_mesh(16)
    >>> least = LeastRedistribution(Links(load_cluster("h100"), mesh))
    >>> whole, rows, columns = mesh("None", "None"), mesh("b", "None"), mesh("None", "b")
    >>> least.seconds(whole, rows, 2**20, differentiable=False)
    0.0
    >>> 0 < least.seconds(rows, columns, 2**20, False) < least.seconds(rows, whole, 2**20, False)
    True
    """

    def __init__(self, links: Links) -> None:
        levels = links.cluster.levels
        fastest = [max(level.rate for level in levels[n:]) for n in range(len(levels))]
        slower = [1 / rate for rate in fastest]
        self._added = [after - before for before, after in pairwise([0.0, *slower])]
        self._message = min(level.call + level.latency for level in levels)
        self._mesh = links.mesh
        # An axis that crosses several levels counts to the fastest.
        self._level = [spans[0][0] if spans else 0 for spans in links.levels]
        self._inside = [
            links.mesh.size([axis for axis, level in enumerate(self._level) if level < crossed])
            for crossed in range(len(levels) + 1)
        ]
        self._known: dict[object, tuple[float, float]] = {}

    def seconds(
        self, source: TensorLayout, target: TensorLayout, num_bytes: float, differentiable: bool
    ) -> float:
        """Seconds from `source` to `target` at least, and of the gradient back.

        Args:
            num_bytes: of the whole value.
        """
        key = source.axes, source.partial, target.axes, target.varying, differentiable
        if key not in self._known:
            byte, latency = self._one_way(source.axes, source.partial, target.axes)
            if differentiable:
                back, further = self._one_way(target.axes, target.varying, source.axes)
                byte, latency = byte + back, latency + further
            self._known[key] = byte, latency
        byte, latency = self._known[key]
        return byte * num_bytes + latency

    def _one_way(
        self, left: Placement, terms: Collection[int], read: Placement
    ) -> tuple[float, float]:
        """Seconds for each byte of the whole value, and latency."""
        received = self._received(left, terms, read, 0)
        byte = self._added[0] * received
        for crossed, added in enumerate(self._added[1:], start=1):
            if added and self._inside[crossed] < self._inside[-1]:
                byte += added * self._received(left, terms, read, crossed)
        return byte, self._message if received > NONE else 0.0

    def _received(
        self, left: Placement, terms: Collection[int], read: Placement, crossed: int
    ) -> float:
        """What a device receives over links of this level and slower ones, as a share of the whole
        value: the mean of all devices, of which none must receive more."""
        inside, groups = self._inside[crossed], self._inside[-1] / self._inside[crossed]
        sums = self._size(self._crossing(terms, crossed))
        wanted = common = 1.0
        seen: set[int] = set()
        for here, there in zip(left, read, strict=True):
            mine, other = self._crossing(here, crossed), self._crossing(there, crossed)
            wanted /= self._size(other)
            alike = sum(1 for _ in takewhile(bool, map(eq, mine, other)))
            common /= self._size(mine[:alike])
            mine, other = mine[alike:], other[alike:]
            sides, axes = (self._size(mine), self._size(other)), {*mine, *other}
            # Which blocks meet is independent, unless they are chosen by the same axes.
            independent = len(axes) == len(mine) + len(other) and not axes & seen
            common /= sides[0] * sides[1] if independent else max(sides)
            seen |= axes if mine and other else set()
        # Terms of a sum: a message for each but the first, then one for each copy but the first.
        received = wanted - common if sums == 1 else (sums - 2) / groups + wanted
        return received / inside

    def _crossing(self, axes: Collection[int], crossed: int) -> Axes:
        return tuple(axis for axis in axes if self._level[axis] >= crossed)

    def _size(self, axes: Axes) -> int:
        return self._mesh.size(axes)
