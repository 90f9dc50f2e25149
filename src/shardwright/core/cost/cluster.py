"""Description of a cluster: compute rates and memory of its devices, and the links between them.

Links have *levels*: fast links join the devices of a node, and slower links join nodes. Ranks fill
one node after another, so the position of an axis in the device matrix decides which levels a
collective over the axis crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from shardwright.core.layout.layout import DeviceMatrix
from shardwright.errors import ConfigError

LOCAL = "local"
"""Name of the cluster of processes on this machine's CPU."""

REFERENCE_HEAD_SIZE = 128
"""Size of the attention heads with which `Device.attention_efficiency` is measured."""

LinkSpans = tuple[tuple[int, int], ...]
"""Link levels that a group of devices crosses, innermost first, each as (index of the level, number
of devices or inner groups that it joins)."""

TREES, RINGS, GLOO = "trees", "rings", "gloo"
"""Algorithms of collectives, which differ in the number of sequential messages; values of
`LinkLevel.collectives`."""


@dataclass(frozen=True)
class LinkLevel:
    """One level of the interconnect: the fastest links between the groups of the inner level.

    Args:
        name: name of the level, such as `node` or `network`.
        bandwidth: bytes per second that each device sends while all devices send.
        latency: seconds from the start of a message to its arrival. For processes that share a
            processor, the latency of a single process; `Cluster.with_active_devices` scales it.
        devices: number of devices in one group of this level; None for any number.
        collectives: `trees`: a group of p devices needs ⌈log₂ p⌉ sequential messages; `rings`: as
            `trees` for all-reduce, but all-gather and reduce-scatter use one ring of all devices,
            as in NCCL; `gloo`: p − 1 sequential messages between neighbors, and reduce-scatter
            takes as long as an all-reduce.
        efficiency: fraction of the bandwidth that collectives of large tensors reach.
        call: constant seconds per collective, in addition to those of its messages; scaled like
            `latency`.
    """

    name: str
    bandwidth: float
    latency: float
    devices: int | None = None
    collectives: str = TREES
    efficiency: float = 1.0
    call: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that each device sends in a collective of large tensors."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Device:
    """Compute rates and memory of one device.

    Args:
        memory: size of device memory, in bytes.
        rates: peak rate of matrix products by dtype name (`bfloat16`), in FLOP per second.
        memory_bandwidth: peak bandwidth of device memory, in bytes per second.
        matrix_efficiency, memory_efficiency: fractions of the peak rate and of the peak bandwidth
            that large operators reach.
        attention_efficiency: fraction of the peak that fused attention over many keys reaches; by
            default `matrix_efficiency`.
        attention_half: number of keys of a query at which fused attention reaches half its rate; in
            general t keys multiply the rate by t / (t + `attention_half`). With causal attention a
            query has half of all keys on average.
        attention_head_half: slowdown of fused attention by small heads, which have fewer FLOPs for
            each exponential of the softmax: for h, heads of size d < 128 multiply the rate by
            d / (d + h) · (128 + h) / 128. 0 for no slowdown.
        matrix_half: size of a matrix dimension (m, n or k) at which a product reaches half its
            rate; in general a dimension of size d multiplies the rate by d / (d + `matrix_half`).
        norm_traffic: bytes that a norm reads and writes, relative to a fused kernel; above 1 for
            norms composed of several operators.
        pointwise_traffic: bytes that element-wise operators read and write, relative to one kernel
            per operator; below 1 where a kernel computes several operators.
        overlaps_parameters: whether gathers of parameters and reductions of their gradients overlap
            computation.
        overlaps_products: whether a collective right before or after a matrix product is pipelined
            with the product.
        sends_routed_tokens: whether a token is sent only to the devices of its experts, and not to
            all devices that share the experts.
        sends_tokens_once: whether a token is sent once to a device that has several of its experts;
            only with `sends_routed_tokens`.
        dispatch_efficiency: fraction of the bandwidth that kernels which send routed tokens reach
            on the fastest links; by default that of collectives.
        routing_traffic: bytes that kernels read and write to sort tokens by expert and to sum the
            outputs of experts, relative to sorting and weighting all copies of tokens separately.
        reduction_traffic: bytes that reductions of gradients send, relative to gradients in the
            dtype of computation; 2 for bfloat16 gradients that are reduced in float32.
        divides_sends: whether devices of a stage that hold the same activation each send a part of
            it to the next stage, which gathers the parts over its fastest links.
        exchanges_in_turn: whether a stage computes nothing while it sends to another one or
            receives from it, and sends only after it has received.
        part_overhead: seconds to copy the part of each device in a gather or reduction of
            parameters; 0 if a collective reads and writes one tensor instead of a list.
        gathers_to_recompute: whether sharded parameters of a recomputed segment are gathered twice
            in the backward pass, to recompute the segment and to compute its gradients.
        accumulation_traffic: bytes that adding the gradients of a micro-batch to those of earlier
            ones reads and writes, relative to three passes over gradients in the dtype of the
            stored parameters: two reads and a write. 0 if matrix products add their results to the
            gradients.
        overlap_slowdown: seconds by which one second of overlapped communication slows down
            computation; 0 for free overlap, 1 for no gain from overlap.
        overhead: minimum seconds of each operator, such as the time of a kernel launch.
        pass_overhead: seconds per forward or backward pass of a chunk on a pipeline stage, in
            addition to its operators.
        step_overhead: seconds per step on a pipeline stage, in addition to its passes.
        at_full_rate: number of devices that can compute at the full rate at the same time, if
            devices are processes on one CPU; None if all can.
    """

    memory: int
    rates: Mapping[str, float]
    memory_bandwidth: float
    matrix_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    attention_efficiency: float | None = None
    attention_half: float = 0.0
    attention_head_half: float = 0.0
    matrix_half: float = 0.0
    norm_traffic: float = 1.0
    pointwise_traffic: float = 1.0
    overlaps_parameters: bool = True
    overlaps_products: bool = False
    sends_routed_tokens: bool = False
    sends_tokens_once: bool = False
    dispatch_efficiency: float | None = None
    routing_traffic: float = 1.0
    reduction_traffic: float = 1.0
    divides_sends: bool = False
    exchanges_in_turn: bool = False
    part_overhead: float = 0.0
    gathers_to_recompute: bool = False
    accumulation_traffic: float = 1.0
    overlap_slowdown: float = 0.0
    overhead: float = 0.0
    pass_overhead: float = 0.0
    step_overhead: float = 0.0
    at_full_rate: int | None = None

    def peak_rate(self, dtype: torch.dtype) -> float:
        """Peak FLOP per second of matrix products in `dtype`; for an unlisted dtype, the lowest
        rate."""
        return self.rates.get(str(dtype).removeprefix("torch."), min(self.rates.values()))

    def rate(
        self, dtype: torch.dtype, product_sizes: Iterable[float] = (), is_attention: bool = False
    ) -> float:
        """Return the FLOP per second that a matrix product reaches.

        Args:
            product_sizes: sizes m, n and k of the product; for fused attention, the mean number of
                keys of a query and the size of a head. Empty if all are large, and heads have size
                128.
            is_attention: whether the product is part of fused attention.
        """
        peak_rate = self.peak_rate(dtype)
        if is_attention:
            share = self.attention_efficiency or self.matrix_efficiency
            return peak_rate * share * self._attention_rate_for_sizes(tuple(product_sizes))
        matrix_rate = peak_rate * self.matrix_efficiency
        return matrix_rate * prod(d / (d + self.matrix_half) for d in product_sizes)

    def _attention_rate_for_sizes(self, product_sizes: tuple[float, ...]) -> float:
        """Return the FLOP rate of fused attention for given sizes, relative to many keys and heads
        of size 128.

        Args:
            product_sizes: mean number of keys of a query, then the head size; a missing size does
                not reduce the rate.
        """
        share = 1.0
        # Slices instead of indices, as `product_sizes` may be empty.
        for keys in product_sizes[:1]:
            share *= keys / (keys + self.attention_half)
        for head_size in product_sizes[1:]:
            # The size of a head limits the rate up to the reference size only.
            size, half = min(head_size, REFERENCE_HEAD_SIZE), self.attention_head_half
            # Normalized to 1 for the head size with which the efficiency was measured.
            share *= size / (size + half) * (REFERENCE_HEAD_SIZE + half) / REFERENCE_HEAD_SIZE
        return share

    @property
    def stream_bandwidth(self) -> float:
        """Bytes per second that a memory-bound operator reads and writes."""
        return self.memory_bandwidth * self.memory_efficiency

    def is_oversubscribed(self, devices: int) -> bool:
        """Whether `devices` processes exceed the number that the CPU runs at full rate."""
        return self.at_full_rate is not None and devices > self.at_full_rate

    def with_active_devices(self, devices: int) -> Device:
        """Return a copy with the rates that each device has while `devices` devices compute.

        Rates differ only for processes that share a CPU.
        """
        if self.at_full_rate is None or not self.is_oversubscribed(devices):
            return self
        # `at_full_rate` processes occupy the processor; more of them share it evenly.
        processor_share = self.at_full_rate / devices
        return replace(
            self,
            rates={dtype: rate * processor_share for dtype, rate in self.rates.items()},
            memory_bandwidth=self.memory_bandwidth * processor_share,
            overhead=self.overhead / processor_share,
            pass_overhead=self.pass_overhead / processor_share,
            step_overhead=self.step_overhead / processor_share,
        )


@dataclass(frozen=True)
class Cluster:
    """Identical devices, their software, and the levels of links between them.

    Args:
        levels: the fastest (innermost) first.
        software: framework and kernels that the fields of `device` describe.
    """

    name: str
    device: Device
    levels: tuple[LinkLevel, ...]
    software: str = ""

    def with_active_devices(self, devices: int) -> Cluster:
        """Return a copy with the device rates and link latencies while `devices` devices compute.

        They differ only for processes that share a CPU.
        """
        if self.device.at_full_rate is None or not self.device.is_oversubscribed(devices):
            return self
        # To send a message, a process has to wait for its turn on the processor.
        waiting_turns = devices / self.device.at_full_rate
        levels = tuple(
            # Not the bandwidth, which is defined as that of all devices sending at once.
            replace(level, latency=waiting_turns * level.latency, call=waiting_turns * level.call)
            for level in self.levels
        )
        return replace(self, device=self.device.with_active_devices(devices), levels=levels)

    def num_nodes(self, devices: int) -> int:
        """Return the number of nodes that `devices` devices need; 1 on a cluster with a single link
        level."""
        node_size = self.levels[0].devices if len(self.levels) > 1 else None
        return 1 if node_size is None else -(-devices // node_size)

    def inner_group_sizes(self, devices: int) -> tuple[int, ...]:
        """Return the group sizes below `devices` of all link levels, ascending."""
        sizes = (level.devices for level in self.levels)
        return tuple(size for size in sizes if size is not None and size < devices)

    def check_node_size(self, size: int) -> None:
        """Check that the number of devices per node is the group size of an inner link level.

        Args:
            size: number of devices per node, in a run on several nodes.

        Raises:
            ConfigError: if no inner level has groups of `size` devices.
        """
        # The last level joins nodes, so a cluster with a single level says nothing of their size.
        sizes = [level.devices for level in self.levels[:-1]]
        if sizes and size not in sizes:
            raise ConfigError(
                f"a node of cluster {self.name!r} has {sizes[0]} devices, but this run has nodes of"
                f" {size}\nstart {sizes[0]} ranks on each node, or use a cluster file with"
                f" `devices: {size}` in its first level"
            )

    def link_levels_of_axes(
        self, mesh: DeviceMatrix, first_ranks: tuple[int, ...] = (0,)
    ) -> tuple[LinkSpans, ...]:
        """Return the link levels that each axis of `mesh` crosses.

        Args:
            mesh: device matrix of one pipeline stage.
            first_ranks: first rank of each pipeline stage; all stages have the shape of `mesh`.

        Raises:
            ConfigError: if the cluster has too few devices.
        """
        self._check_num_devices(max(first_ranks) + mesh.num_devices)
        mesh_ranks = np.asarray(mesh.ranks).reshape(mesh.device_matrix)
        # All stages at once, since a collective takes as long as in the stage in which its axis
        # crosses the slowest links.
        ranks = np.stack([mesh_ranks + first for first in first_ranks])
        # Dimension 0 of `ranks` is the stage.
        axes = range(1, 1 + len(mesh.device_matrix))
        return tuple(self._link_levels_of_axis(np.moveaxis(ranks, axis, -1)) for axis in axes)

    def _link_levels_of_axis(self, ranks: np.ndarray[Any, Any]) -> LinkSpans:
        """Return the link levels that an axis crosses.

        Args:
            ranks: array of the ranks of all stages, whose last dimension is the axis.
        """
        size, spans, joined = ranks.shape[-1], [], 1
        for number, level in enumerate(self.levels):
            reach = size
            # A level joins the largest block of neighbors along the axis that is always inside one
            # group of the level; the outermost level joins the remaining blocks.
            if number < len(self.levels) - 1:
                # Only the outermost level, which this branch excludes, may have no number of
                # devices.
                groups = ranks // (level.devices or 1)
                divisors = (n for n in range(1, size + 1) if size % n == 0)
                reach = max(n for n in divisors if _are_rank_blocks_within_groups(groups, n))
            # A level that joins no more ranks along the axis than the inner levels is not crossed.
            if reach > joined:
                spans.append((number, reach // joined))
            joined = reach
        return tuple(spans)

    def link_between(self, rank: int, other_rank: int) -> LinkLevel:
        """Return the innermost link level that joins two ranks.

        Raises:
            ConfigError: if the cluster has too few devices.
        """
        self._check_num_devices(max(rank, other_rank) + 1)
        # Levels are nested, so the first level with both ranks in one group has the fastest links.
        for level in self.levels[:-1]:
            if level.devices is not None and rank // level.devices == other_rank // level.devices:
                return level
        return self.levels[-1]

    def _check_num_devices(self, devices: int) -> None:
        num_devices = self.levels[-1].devices
        if num_devices is not None and devices > num_devices:
            raise ConfigError(
                f"cluster {self.name!r} has {num_devices} devices, but {devices} were requested\n"
                f"use at most {num_devices} devices, or in the cluster's file increase or remove"
                " `devices` of the last level"
            )


def _are_rank_blocks_within_groups(group_of_rank: np.ndarray[Any, Any], run_length: int) -> bool:
    """Whether each block of `run_length` consecutive ranks along the last dimension is within one
    group of devices.

    Args:
        group_of_rank: index of the group of each rank, of shape (..., ranks).
    """
    runs = group_of_rank.reshape(*group_of_rank.shape[:-1], -1, run_length)
    return bool((runs == runs[..., :1]).all())
