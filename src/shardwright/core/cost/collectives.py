"""Seconds of collectives over the axes of a device matrix: the α-β model, level by level.

A message of n bytes takes α + n/β seconds on a link of latency α and bandwidth β, and each call of
a collective a constant. Groups that cross several levels of links work level by level, as NCCL's
and HCCL's hierarchical algorithms do: an all-reduce over nodes is a reduce-scatter within each
node, an all-reduce of the shards between nodes, and an all-gather within each node. Rounds: a group
of p devices needs ⌈log₂ p⌉ (Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", 2005), or p − 1 where messages go round a ring, as gloo's do,
and NCCL's unless they sum over all devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log2, prod

from shardwright.core.cost.cluster import GLOO, RINGS, Cluster, LinkLevel
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.layout import DeviceMatrix

ELEMENT = 4
"""Bytes of a number that is summed over devices: of a loss, or of a count."""


class Links:
    """The links of a cluster under the axes of a device matrix.

    Args:
        mesh: the device matrix of one pipeline stage.
        stages: number of pipeline stages, one after the other in rank order.

    Raises:
        ConfigError: if the cluster has not so many devices.
    """

    def __init__(self, cluster: Cluster, mesh: DeviceMatrix, stages: int = 1) -> None:
        starts = tuple(stage * mesh.num_devices for stage in range(stages))
        self.cluster = cluster.among(mesh.num_devices * stages)
        self.mesh = mesh
        self.levels = cluster.levels_of(mesh, starts)
        self.shared = cluster.device.shared(mesh.num_devices * stages)

    def seconds(
        self, collective: str, axes: Iterable[int], num_bytes: float, joined: bool = False
    ) -> float:
        """Seconds of one collective over the joined `axes`.

        Args:
            collective: one of `COLLECTIVES`.
            num_bytes: of the tensor of one device, the larger side: the output of an all-gather,
                the input of a reduce-scatter.
            joined: whether it is a part of one of more bytes, with as many messages.
        """
        group = self._group(axes)
        if not group:
            return 0.0
        pattern = COLLECTIVES[collective].pattern
        if pattern == "point_to_point":
            # Every device sends all that it has to one other, which may be in another node.
            link = self.cluster.levels[group[-1][0]]
            return link.call + link.latency + num_bytes / link.rate
        if pattern == "pairwise":
            return self._all_to_all(group, num_bytes)
        few = self.shared and collective == "all_reduce" and not joined
        return self._level_by_level(group, num_bytes, collective, few)

    def _level_by_level(
        self, group: list[tuple[int, int]], num_bytes: float, collective: str, few: bool
    ) -> float:
        """Each level moves what the levels inside it have left: the whole, cut by their devices."""
        seconds, left, behind = 0.0, num_bytes, prod(size for _, size in group)
        for level, size in group:
            link = self.cluster.levels[level]
            hops: float = messages(link, size)
            if link.collectives == RINGS and rounds(link, collective) == 1:
                hops = behind - behind // size
            if few and left < ELEMENT * size:
                # The ring passes on one part for each device, and none for an empty part. Others
                # wait no less for it, but leave the processor to those that send.
                hops *= max(1.0, left / ELEMENT) / size
            once = hops * link.latency + (size - 1) / size * left / link.rate
            seconds += link.call + rounds(link, collective) * once
            left, behind = left / size, behind // size
        return seconds

    def _all_to_all(self, group: list[tuple[int, int]], num_bytes: float) -> float:
        """Each device sends every other an equal part, over the link between the two."""
        devices = prod(size for _, size in group)
        seconds, reached = 0.0, 1
        for level, size in group:
            link = self.cluster.levels[level]
            share = (reached * size - reached) / devices
            seconds += link.call + messages(link, size) * link.latency
            seconds += share * num_bytes / link.rate
            reached *= size
        return seconds

    def _group(self, axes: Iterable[int]) -> list[tuple[int, int]]:
        """The levels of the joined axes, innermost first, with the number of devices in each."""
        sizes: dict[int, int] = {}
        for axis in axes:
            for level, size in self.levels[axis]:
                sizes[level] = sizes.get(level, 1) * size
        return sorted(sizes.items())


def messages(link: LinkLevel, devices: int) -> int:
    """How many messages follow each other until all of a group have what all sent."""
    return devices - 1 if link.collectives == GLOO else ceil(log2(devices))


def rounds(link: LinkLevel, collective: str) -> int:
    """How often everything goes through the group: an all-reduce is a reduction and a gather."""
    spec = COLLECTIVES[collective]
    over_gloo = link.collectives == GLOO and spec.gloo_rounds is not None
    return spec.gloo_rounds or spec.rounds if over_gloo else spec.rounds
