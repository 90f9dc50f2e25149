"""A lower bound on the seconds of a redistribution, without a search for its steps.

A device must receive all elements of a value that it reads but does not store. The devices of a
node together must receive, over the slower links, all elements that no device of the node stores.
`axis_counts` computes the same bound for layouts given as counts of axes.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise, takewhile
from operator import eq

from shardwright.core.cost.collectives import Links
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import TensorLayout

Placement = tuple[Axes, ...]
"""For each dim of a tensor the indices of the axes that shard it."""

ROUNDING = 1e-9
"""Fractions of a tensor up to this limit are rounding errors of double precision, and count as
zero."""


class RedistributionBound:
    """Lower bounds on the seconds of redistributions on a device matrix with axes of prime size,
    cached.

    >>> from shardwright.core.cost.clusters import load_cluster
    >>> from shardwright.core.layout.prime_mesh import prime_mesh
    >>> mesh = prime_mesh(16)
    >>> bound = RedistributionBound(Links(load_cluster("h100"), mesh)).seconds
    >>> replicated, rows, columns = mesh("None", "None"), mesh("b", "None"), mesh("None", "b")
    >>> bound(replicated, rows, 2**20, differentiable=False)
    0.0
    >>> 0 < bound(rows, columns, 2**20, False) < bound(rows, replicated, 2**20, False)
    True
    """

    def __init__(self, links: Links) -> None:
        levels = links.cluster.levels
        # The best of this level and all slower ones: a cluster may have a faster level further out.
        fastest_rates = [max(level.rate for level in levels[n:]) for n in range(len(levels))]
        seconds_per_byte = [1 / rate for rate in fastest_rates]
        # Bytes that cross slower links are among those counted at faster ones, so that each level
        # adds only what it takes longer.
        self._added_seconds_per_byte = [
            after - before for before, after in pairwise([0.0, *seconds_per_byte])
        ]
        # The link with the lowest latency: no message takes less, wherever it goes.
        self._latency = min(level.call + level.latency for level in levels)
        self._mesh = links.mesh
        # An axis that crosses several levels counts as the fastest, which can only lower the bound.
        self._level = [spans[0][0] if spans else 0 for spans in links.levels]
        self._devices_inside = [
            links.mesh.size([axis for axis, level in enumerate(self._level) if level < crossed])
            for crossed in range(len(levels) + 1)
        ]
        self._cache: dict[object, tuple[float, float]] = {}

    def seconds(
        self, source: TensorLayout, target: TensorLayout, num_bytes: float, differentiable: bool
    ) -> float:
        """Return a lower bound on the seconds of redistributing a value from `source` to `target`.

        Args:
            num_bytes: bytes of the full value.
            differentiable: whether the seconds of redistributing the gradient back are added.
        """
        # By layouts alone: the seconds are linear in the bytes.
        key = source.axes, source.partial, target.axes, target.varying, differentiable
        if key not in self._cache:
            seconds_per_byte, latency = self._one_pass_time_coefficients(
                source.axes, source.partial, target.axes
            )
            if differentiable:
                backward_byte, backward_latency = self._one_pass_time_coefficients(
                    target.axes, target.varying, source.axes
                )
                seconds_per_byte, latency = (
                    seconds_per_byte + backward_byte,
                    latency + backward_latency,
                )
            self._cache[key] = seconds_per_byte, latency
        seconds_per_byte, latency = self._cache[key]
        return seconds_per_byte * num_bytes + latency

    def _one_pass_time_coefficients(
        self, source: Placement, partial_axes: Collection[int], target: Placement
    ) -> tuple[float, float]:
        """Return lower bounds for one pass (forward or backward): seconds per byte of the full
        value, and seconds of latency."""
        received = self._min_received_fraction(source, partial_axes, target, 0)
        seconds_per_byte = self._added_seconds_per_byte[0] * received
        for crossed, added in enumerate(self._added_seconds_per_byte[1:], start=1):
            # No bytes cross the links of a level that no axis spans.
            if added and self._devices_inside[crossed] < self._devices_inside[-1]:
                seconds_per_byte += added * self._min_received_fraction(
                    source, partial_axes, target, crossed
                )
        return seconds_per_byte, self._latency if received > ROUNDING else 0.0

    def _min_received_fraction(
        self, source: Placement, partial_axes: Collection[int], target: Placement, crossed: int
    ) -> float:
        """Return the least fraction of the full value that a device receives over links of level
        `crossed` and slower levels.

        The result is a mean over all devices, so that at least one device receives this fraction.
        """
        devices_inside, num_groups = (
            self._devices_inside[crossed],
            self._devices_inside[-1] / self._devices_inside[crossed],
        )
        num_terms = self._num_devices(self._axes_crossing_level(partial_axes, crossed))
        read_share = common_share = 1.0
        paired_axes: set[int] = set()
        for source_axes, target_axes in zip(source, target, strict=True):
            source_crossing, target_crossing = (
                self._axes_crossing_level(source_axes, crossed),
                self._axes_crossing_level(target_axes, crossed),
            )
            read_share /= self._num_devices(target_crossing)
            num_common = sum(1 for _ in takewhile(bool, map(eq, source_crossing, target_crossing)))
            common_share /= self._num_devices(source_crossing[:num_common])
            source_crossing, target_crossing = (
                source_crossing[num_common:],
                target_crossing[num_common:],
            )
            sizes, axes = (
                (self._num_devices(source_crossing), self._num_devices(target_crossing)),
                {*source_crossing, *target_crossing},
            )
            # Source and target blocks overlap independently, so that the mean overlap is the
            # product of both shares, unless some axis selects blocks on both sides.
            independent = (
                len(axes) == len(source_crossing) + len(target_crossing) and not axes & paired_axes
            )
            common_share /= sizes[0] * sizes[1] if independent else max(sizes)
            paired_axes |= axes if source_crossing and target_crossing else set()
        # Partial sums of p terms: p - 1 messages until an element is summed, and one for each copy
        # of the sum but the first.
        received = (
            read_share - common_share
            if num_terms == 1
            else (num_terms - 2) / num_groups + read_share
        )
        return received / devices_inside

    def _axes_crossing_level(self, axes: Collection[int], crossed: int) -> Axes:
        return tuple(axis for axis in axes if self._level[axis] >= crossed)

    def _num_devices(self, axes: Axes) -> int:
        return self._mesh.size(axes)
