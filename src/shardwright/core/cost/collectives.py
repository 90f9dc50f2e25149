"""Seconds of collectives over the axes of a device matrix: the α-β model, level by level.

A message of n bytes takes α + n/β seconds on a link of latency α and bandwidth β; each collective
call adds a constant. Over several levels of links, collectives are hierarchical as in NCCL and
HCCL: an all-reduce over nodes is a reduce-scatter within each node, an all-reduce of the shards
between nodes, and an all-gather within each node. A group of p devices needs ⌈log₂ p⌉ sequential
messages (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005), or p − 1 on a ring. Gloo always uses rings; NCCL uses rings for all-gather and
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log2, prod

from shardwright.core.cost.cluster import GLOO, RINGS, Cluster, LinkLevel
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.layout import DeviceMatrix

ELEMENT_BYTES = 4
"""Bytes of a float32 element, the dtype of small all-reduces such as those of a loss."""


class Links:
    """Time model of collectives over the axes of a device matrix on a cluster.

    Args:
        mesh: device matrix of one pipeline stage.
        stages: number of pipeline stages, each of consecutive ranks.

    Raises:
        ConfigError: if the cluster has too few devices.
    """

    def __init__(self, cluster: Cluster, mesh: DeviceMatrix, stages: int = 1) -> None:
        starts = tuple(stage * mesh.num_devices for stage in range(stages))
        self.cluster = cluster.with_active_devices(mesh.num_devices * stages)
        self.mesh = mesh
        # `Cluster.with_active_devices` changes only rates and latencies, not link levels.
        self.levels = cluster.link_levels_of_axes(mesh, starts)
        self.shares_processor = cluster.device.is_oversubscribed(mesh.num_devices * stages)

    def seconds(
        self, collective: str, axes: Iterable[int], num_bytes: float, bucketed: bool = False
    ) -> float:
        """Return the seconds of one collective over the flattened mesh `axes`.

        Args:
            collective: type of collective, one of `COLLECTIVES`.
            num_bytes: bytes of the local input or output, whichever is larger: the output of an
                all-gather, the input of a reduce-scatter.
            bucketed: whether the collective is coalesced with others into a bucket, which sends
                more than `num_bytes` at once.
        """
        levels_of_group = self._link_levels_of_group(axes)
        # A group of one device, such as an axis of size 1.
        if not levels_of_group:
            return 0.0
        pattern = COLLECTIVES[collective].pattern
        if pattern == "point_to_point":
            # Each device sends its local tensor to one other device, which may be in another node.
            link = self.cluster.levels[levels_of_group[-1][0]]
            return link.call + link.latency + num_bytes / link.rate
        if pattern == "pairwise":
            return self._all_to_all_seconds(levels_of_group, num_bytes)
        # A bucket is sent as one tensor, so that a small member of it leaves no part of the ring
        # empty.
        may_skip_parts = self.shares_processor and collective == "all_reduce" and not bucketed
        return self._hierarchical_seconds(levels_of_group, num_bytes, collective, may_skip_parts)

    def dispatch_seconds(
        self, axes: Iterable[int], num_bytes: float, copies: float, once: bool, speed: float = 1.0
    ) -> float:
        """Return the seconds of an all-to-all of copies of tokens to random devices of a group.

        Args:
            axes: flattened mesh axes of the group.
            num_bytes: bytes of the tokens of a device.
            copies: number of copies of each token.
            once: whether a node receives a token once, and forwards it to its devices that receive
                a copy, each of them once.
            speed: rate of the fastest links, relative to that of collectives.
        """
        levels_of_group = self._link_levels_of_group(axes)
        devices = prod(size for _, size in levels_of_group)
        joined_devices, seconds_of_levels, start = 1, [0.0], 0.0
        for level, size in levels_of_group:
            link = self.cluster.levels[level]
            sent = copies * (size - 1) * joined_devices / devices
            if once:
                groups = devices / joined_devices
                sent = groups * (1 - (1 - 1 / groups) ** copies) * (size - 1) / size
            rate = link.rate * (speed if level == 0 else 1)
            start += link.call + sequential_messages(link, size) * link.latency
            seconds_of_levels.append(sent * num_bytes / rate)
            joined_devices *= size
        # A node forwards tokens while it receives others.
        return start + (max(seconds_of_levels) if once else sum(seconds_of_levels))

    def _hierarchical_seconds(
        self,
        levels_of_group: list[tuple[int, int]],
        num_bytes: float,
        collective: str,
        may_skip_parts: bool,
    ) -> float:
        """Return the seconds of a hierarchical collective, level by level, innermost first.

        Each level sends `num_bytes` divided by the number of devices that the levels inside of it
        connect.

        Args:
            levels_of_group: (index of the link level, number of devices or inner groups that it
                connects).
            may_skip_parts: whether a ring skips the empty parts of a tensor that has fewer elements
                than the ring has devices.
        """
        seconds, level_bytes, devices = 0.0, num_bytes, prod(size for _, size in levels_of_group)
        for level, size in levels_of_group:
            link = self.cluster.levels[level]
            # Trees and gloo's rings run level by level, each with the messages of its own group.
            hops: float = sequential_messages(link, size)
            if link.collectives == RINGS and num_rounds(link, collective) == 1:
                # NCCL's ring passes through all devices of the group; `hops` are the hops of the
                # ring on links of this level.
                hops = devices - devices // size
            if may_skip_parts and level_bytes < ELEMENT_BYTES * size:
                # The tensor has fewer elements than the ring has devices, and empty parts are not
                # sent. Processes that wait leave the processor to those that send.
                hops *= max(1.0, level_bytes / ELEMENT_BYTES) / size
            # α-β model of one round: each device sends p − 1 of p parts of the tensor (Thakur et
            # al., 2005).
            round_seconds = hops * link.latency + (size - 1) / size * level_bytes / link.rate
            seconds += link.call + num_rounds(link, collective) * round_seconds
            # The reduce-scatter within the inner groups leaves 1/p of the tensor for the outer
            # levels.
            level_bytes, devices = level_bytes / size, devices // size
        return seconds

    def _all_to_all_seconds(
        self, levels_of_group: list[tuple[int, int]], num_bytes: float
    ) -> float:
        """Return the seconds of an all-to-all.

        Each device sends an equal part of its tensor to every other device, over the innermost link
        level that joins the two.
        """
        devices = prod(size for _, size in levels_of_group)
        seconds, joined_devices = 0.0, 1
        for level, size in levels_of_group:
            link = self.cluster.levels[level]
            # The tensor has `devices` parts. Over the links of this level go the parts for devices
            # that inner levels do not reach.
            share = (joined_devices * size - joined_devices) / devices
            seconds += link.call + sequential_messages(link, size) * link.latency
            seconds += share * num_bytes / link.rate
            joined_devices *= size
        return seconds

    def _link_levels_of_group(self, axes: Iterable[int]) -> list[tuple[int, int]]:
        """Return the link levels that a collective over the flattened `axes` crosses, innermost
        first, each as (level index, number of devices or inner groups that the level joins)."""
        # Axes that cross the same level form one group there: a collective over axes of 2 and 4
        # devices in a node has 8 members.
        sizes: dict[int, int] = {}
        for axis in axes:
            for level, size in self.levels[axis]:
                sizes[level] = sizes.get(level, 1) * size
        return sorted(sizes.items())


def sequential_messages(link: LinkLevel, devices: int) -> int:
    """Return the number of messages on the critical path of a collective over `devices` devices."""
    return devices - 1 if link.collectives == GLOO else ceil(log2(devices))


def num_rounds(link: LinkLevel, collective: str) -> int:
    """Return how many times a collective passes a tensor through the group: 2 for an all-reduce,
    which is a reduce-scatter and an all-gather."""
    spec = COLLECTIVES[collective]
    # Gloo reduce-scatters by an all-reduce of which each rank keeps its shard: two rounds for one.
    over_gloo = link.collectives == GLOO and spec.gloo_rounds is not None
    return spec.gloo_rounds or spec.rounds if over_gloo else spec.rounds
