"""One step of a redistribution: a collective, a slice, or a change without communication."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from shardwright.core.layout.axes import (
    Axes,
    Shape,
    common_length,
    shard_index,
)
from shardwright.core.layout.collective_spec import COLLECTIVES, CollectiveSpec
from shardwright.core.layout.layout import TensorLayout
from shardwright.errors import LayoutError


@dataclass(frozen=True)
class RedistributionStep:
    """One collective, or a local operation whose gradient needs a collective.

    Args:
        operation: name of the step, a key of `COLLECTIVES`.
        axes: the mesh axes of the group: in the order in which they shard the dimension, the most
            significant first; in mesh order if they shard no dimension. For a permute, all axes
            whose use changes, in mesh order.
        dim: the dimension that is sharded (slice, reduce_scatter) or gathered (all_gather,
            all_to_all); None for other kinds.
        to_dim: the dimension that an all_to_all shards; None for other kinds.
        source, target: the layouts before and after the step.
    """

    operation: str
    axes: Axes
    dim: int | None
    to_dim: int | None
    source: TensorLayout
    target: TensorLayout

    @property
    def group_size(self) -> int:
        """Number of devices in a process group of the step."""
        return self.source.layout.size(self.axes)

    @property
    def spec(self) -> CollectiveSpec:
        """Specification of the step's operation: its communication volume and gradient."""
        return COLLECTIVES[self.operation]

    @property
    def forward(self) -> str | None:
        """Name of the collective of the forward pass; None without communication."""
        return None if self.spec.local else self.operation

    @property
    def backward(self) -> str | None:
        """Name of the collective of the backward pass; None without communication."""
        # A step makes all of its axes varying or none.
        return self.spec.backward_of(self.target.varying.issuperset(self.axes))

    def forward_bytes(self, shape: Shape, itemsize: int) -> int:
        """Return the bytes that one device sends in the forward pass; `shape` is global."""
        return self._count_sent_bytes(self.forward, shape, itemsize)

    def backward_bytes(self, shape: Shape, itemsize: int) -> int:
        """Return the bytes that one device sends in the backward pass; `shape` is global."""
        return self._count_sent_bytes(self.backward, shape, itemsize)

    def _count_sent_bytes(self, collective: str | None, shape: Shape, itemsize: int) -> int:
        if collective is None:
            return 0
        # The larger of input and output: the output of an all-gather, the input of a reduce-scatter
        # or a slice.
        local = itemsize * max(
            prod(self.source.shard_shape(shape)), prod(self.target.shard_shape(shape))
        )
        return COLLECTIVES[collective].sent_volume(local, self.group_size)

    def permutation(self) -> tuple[int, ...]:
        """Return the destination of each device's shard in a permute.

        Devices are positions in the group, with the `axes` in mesh order. The i-th device that has
        a shard sends it to the i-th device that needs it.

        Raises:
            LayoutError: if the step is not a permute.
        """
        if self.operation != "permute":
            raise LayoutError(
                f"a step of kind {self.operation!r} has no permutation\n"
                "call `permutation` only on steps of kind 'permute'"
            )
        receivers = self._group_positions_by_block(self.target)
        destinations = [0] * self.group_size
        for block, senders in self._group_positions_by_block(self.source).items():
            # Equally many have and need a shard, as a permute keeps the numbers of shards.
            for sender, receiver in zip(senders, receivers[block], strict=True):
                destinations[sender] = receiver
        return tuple(destinations)

    def _group_positions_by_block(self, layout: TensorLayout) -> dict[tuple[int, ...], list[int]]:
        """Map the index of each shard to the devices that have it, as positions in the group.

        Args:
            layout: `self.source` or `self.target`.
        """
        sizes = self.source.device_matrix
        pairs = zip(self.source.axes, self.target.axes, strict=True)
        # A permute keeps the numbers of shards, so leading and trailing axes that both layouts have
        # in common do not change the destination.
        differing = [strip_common_ends(before, after) for before, after in pairs]
        layout_index = 0 if layout is self.source else 1
        positions: dict[tuple[int, ...], list[int]] = {}
        group = product(*(range(sizes[axis]) for axis in self.axes))
        for position, coordinates in enumerate(group):
            coordinate = dict(zip(self.axes, coordinates, strict=True))
            block = tuple(shard_index(axes[layout_index], sizes, coordinate) for axes in differing)
            positions.setdefault(block, []).append(position)
        return positions

    def __str__(self) -> str:
        names = self.source.layout.named(self.axes)
        dims = "" if self.dim is None else f", dimension {self.dim}"
        dims += "" if self.to_dim is None else f" to {self.to_dim}"
        return f"{self.operation} {names}{dims}"


def strip_common_ends(first: Axes, second: Axes) -> tuple[Axes, Axes]:
    """Remove the longest common prefix and suffix of two lists of axes."""
    prefix = common_length(first, second)
    first, second = first[prefix:], second[prefix:]
    suffix = common_length(first[::-1], second[::-1])
    return first[: len(first) - suffix], second[: len(second) - suffix]
