"""Lower bounds on the seconds of redistributions between layouts given as numbers of mesh axes.

Axes of equal size on one link level form a group. A lower bound depends only on how many axes of
each group shard each dim, not on which. There are far fewer such counts than layouts. The bound
follows from the bytes that a device must receive:

- From a layout without partial sums: the bytes of the target shard, minus its largest possible
  overlap with the source shard on the device.
- From partial sums on p devices: p - 1 messages to sum each element, and one message for each
  further device that reads the sum.

The same bound holds for all devices of a node together, whose messages cross the slower links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardwright.core.cost.collectives import ELEMENT_BYTES, Links
from shardwright.core.layout.axes import Axes

# Single precision halves the memory of tables, which have millions of entries.
LayoutTable = npt.NDArray[np.float32]
ROUNDING = 1e-6
"""Smallest difference between fractions of a tensor that is not a rounding error of single
precision."""

Counts = npt.NDArray[np.int64]
"""Integer array of shape (..., factor or dim, axis group): the number of mesh axes of each
`AxisGroup` that cut each factor of an operator, or shard each dim of a tensor."""


@dataclass(frozen=True)
class AxisGroup:
    """Mesh axes of equal size on one link level, which are interchangeable in a lower bound.

    Args:
        level: index of the link level, 0 for the fastest.
        size: number of devices along each axis.
    """

    level: int
    size: int
    axes: Axes


def group_axes(links: Links) -> tuple[AxisGroup, ...]:
    """Group the axes of a device matrix, all of prime size, by link level and size, fastest links
    first.

    An axis that crosses several levels belongs to the fastest, which can only lower the bound.
    """
    by_group: dict[tuple[int, int], list[int]] = {}
    for axis, size in enumerate(links.mesh.device_matrix):
        if size > 1:
            by_group.setdefault((links.levels[axis][0][0], size), []).append(axis)
    return tuple(AxisGroup(*group, tuple(axes)) for group, axes in sorted(by_group.items()))


def enumerate_cut_counts(
    axis_groups: Sequence[AxisGroup], limits: Sequence[int], max_cuts: int
) -> Counts | None:
    """Return, for all valid cuts of an operator, the number of axes of each group that shard each
    factor; shape (cuts, factors, axis groups).

    Args:
        limits: for each factor, an integer that its number of shards must divide.
        max_cuts: maximum number of cuts to return.

    Returns:
        None if there are more than `max_cuts`.
    """
    cut_counts = np.zeros((1, len(limits), 0), dtype=np.int64)
    for num_groups, group in enumerate(axis_groups, start=1):
        distributions = np.array(
            list(_distribute_axes_over_factors(len(group.axes), len(limits))), dtype=np.int64
        )
        # Checked before invalid cuts, of which there may be many, are filtered out: the factor of
        # 20 only limits memory.
        if len(cut_counts) * len(distributions) > 20 * max_cuts:
            return None
        repeated = np.repeat(cut_counts, len(distributions), axis=0)
        added = np.tile(distributions, (len(cut_counts), 1))[:, :, None]
        cut_counts = np.concatenate([repeated, added], axis=2)
        divides = np.array(limits) % num_shards_of(axis_groups[:num_groups], cut_counts) == 0
        cut_counts = cut_counts[divides.all(axis=1)]
    return cut_counts if len(cut_counts) <= max_cuts else None


def _distribute_axes_over_factors(num_axes: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `num_factors` non-negative integers, the numbers of axes that cut each
    factor, whose sum is at most `num_axes`."""
    if not num_factors:
        yield ()
        return
    for first in range(num_axes + 1):
        for later_counts in _distribute_axes_over_factors(num_axes - first, num_factors - 1):
            yield (first, *later_counts)


class CountedRedistributionBound:
    """Lower bounds on the seconds of redistributions between layouts given as axis counts."""

    def __init__(self, links: Links, axis_groups: Sequence[AxisGroup]) -> None:
        levels = links.cluster.levels
        # The best of this level and all slower ones: a cluster may have a faster level further out.
        fastest_rates = [max(level.rate for level in levels[n:]) for n in range(len(levels))]
        self._latency = [min(level.latency for level in levels[n:]) for n in range(len(levels))]
        seconds_per_byte = [1 / rate for rate in fastest_rates]
        # Bytes that cross slower links are among those counted at faster ones, so that each level
        # adds only what it takes longer.
        self._added_seconds_per_byte = [
            after - before for before, after in pairwise([0.0, *seconds_per_byte])
        ]
        # On shared links, a ring over a tensor with fewer elements than devices skips the hops of
        # empty parts (see `Links`), so that the latencies of all hops are no lower bound there.
        self._few_elements_bytes = (
            ELEMENT_BYTES * links.mesh.num_devices**2 if links.shares_processor else 0
        )
        self._level = np.array([group.level for group in axis_groups])
        # Products of sizes as sums of logarithms: one matrix product for all layouts.
        self._log_size = np.log2([group.size for group in axis_groups])
        self._num_axes = np.array([len(group.axes) for group in axis_groups])
        self._cached_rates: dict[object, tuple[LayoutTable, LayoutTable]] = {}
        self._cached_tables: dict[object, LayoutTable] = {}

    def between(
        self, source: Counts, target: Counts, num_bytes: float, differentiable: bool
    ) -> LayoutTable:
        """Return lower bounds on the seconds of redistributing a value between layouts.

        Rows of the result are source layouts, columns are target layouts.

        Args:
            source: number of axes of each group that shard each dim, of shape (layout, dim + 1,
                axis group); the last dim counts the axes over which the value is a partial sum.
            target: counts of the same shape; the last dim counts the axes over which the gradient
                is a partial sum.
            num_bytes: bytes of the full value.
            differentiable: whether the gradient is redistributed back.
        """
        key = source.shape, source.tobytes(), target.tobytes(), differentiable
        if (key, num_bytes) not in self._cached_tables:
            if key not in self._cached_rates:
                self._cached_rates[key] = self._two_pass_time_coefficients(
                    source, target, differentiable
                )
            seconds_per_byte, latency = self._cached_rates[key]
            # Then only the latency of a single message is certain.
            if num_bytes < self._few_elements_bytes:
                latency = np.minimum(latency, np.float32(self._latency[0]))
            self._cached_tables[key, num_bytes] = np.float32(num_bytes) * seconds_per_byte + latency
        return self._cached_tables[key, num_bytes]

    def _two_pass_time_coefficients(
        self, source: Counts, target: Counts, differentiable: bool
    ) -> tuple[LayoutTable, LayoutTable]:
        seconds_per_byte, latency = self._one_pass_time_coefficients(source, target)
        if not differentiable:
            return seconds_per_byte, latency
        backward_byte, backward_latency = self._one_pass_time_coefficients(target, source)
        # Transposed: the gradient goes from the layouts of consumers back to those of the producer.
        return seconds_per_byte + backward_byte.T, latency + backward_latency.T

    def _one_pass_time_coefficients(
        self, source: Counts, target: Counts
    ) -> tuple[LayoutTable, LayoutTable]:
        """Return lower bounds for one pass, as two tables over source (row) and target (column):
        seconds per byte of the full value, and seconds of latency."""
        received_share = self._min_received_fractions(source, target, self._level >= 0)
        seconds_per_byte = self._added_seconds_per_byte[0] * received_share
        for level, added in enumerate(self._added_seconds_per_byte[1:], start=1):
            if added and (self._level >= level).any():
                seconds_per_byte += added * self._min_received_fractions(
                    source, target, self._level >= level
                )
        # A sum of p terms and p copies of a shard take log2 p messages in a row each, at least.
        sum_latency = source[:, -1] @ (self._log_size * [self._latency[n] for n in self._level])
        log_copies = (source.sum(1) @ self._log_size)[:, None] - (
            target[:, :-1].sum(1) @ self._log_size
        )
        copy_latency = self._latency[0] * np.maximum(log_copies, 0.0)
        latency = np.maximum(
            sum_latency[:, None] + copy_latency, self._latency[0] * (received_share > ROUNDING)
        )
        return seconds_per_byte, latency.astype(np.float32)

    def _min_received_fractions(
        self, source: Counts, target: Counts, crossed: npt.NDArray[np.bool_]
    ) -> LayoutTable:
        """Return a lower bound on the fraction of the full value that a device receives over some
        links.

        Args:
            crossed: for each axis group whether its links are among these links.
        """
        log_crossing = np.where(crossed, self._log_size, 0.0)
        devices_inside = 2.0 ** (self._num_axes * (self._log_size - log_crossing)).sum()
        num_groups = 2.0 ** (self._num_axes * log_crossing).sum()
        source_shares, target_shares = (
            2.0 ** -(each @ log_crossing).astype(np.float32) for each in (source, target)
        )
        # The last dim counts the axes of partial sums, which have as many terms as devices.
        num_terms = source_shares[:, -1, None] ** -1
        read_share = target_shares[:, :-1].prod(1)
        common_share = np.ones((len(source), len(target)), np.float32)
        for dim in range(target_shares.shape[1] - 1):
            # A dim that no layout shards overlaps entirely, which is a factor of 1.
            if (source_shares[:, dim] != 1).any() or (target_shares[:, dim] != 1).any():
                # Blocks of one dim overlap at most by the smaller of the two.
                common_share *= np.minimum(source_shares[:, dim, None], target_shares[:, dim])
        # Partial sums of p terms: p - 1 messages until an element is summed, and one for each copy
        # of the sum but the first.
        from_complete, from_partial = (
            read_share - common_share,
            (num_terms - 2) / num_groups + read_share,
        )
        received: LayoutTable = np.where(
            num_terms > 1 + ROUNDING, from_partial, from_complete
        ) / np.float32(devices_inside)
        return received


def num_shards_of(axis_groups: Sequence[AxisGroup], counts: Counts) -> Counts:
    """Return the number of shards of each dim: the product of the sizes of the axes that shard it.

    Args:
        counts: number of axes of each axis group, of shape (..., axis group).
    """
    sizes = np.array([group.size for group in axis_groups], dtype=np.int64)
    num_shards: Counts = (sizes**counts).prod(axis=-1)
    return num_shards


def pick_axes(axis_groups: Sequence[AxisGroup], counts: Counts, skip: Counts | None = None) -> Axes:
    """Return the first `counts[g]` mesh axes of each axis group `g`, not counting `skip[g]` axes at
    its start."""
    first_axes = np.zeros_like(counts) if skip is None else skip
    return tuple(
        axis
        for group, count, start in zip(axis_groups, counts, first_axes, strict=True)
        for axis in group.axes[start : start + count]
    )
