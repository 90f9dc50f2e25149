"""Seconds of operators, redistributions and parameters on the device matrix of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.collectives import Links
from shardwright.core.cost.flops import MovedBytes, Work, work_of
from shardwright.core.graph.graph import Op, Value
from shardwright.core.layout.axes import Axes, Shape
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.partition.decisions import BUCKET_BYTES
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import RING, Cuts, Reduction

UPDATE_PASSES = 7
"""Number of times that AdamW reads or writes memory of the size of a stored parameter: it reads the
parameter, the gradient and two moments, and writes the parameter and the moments."""

ACCUMULATION_PASSES = 3
"""Number of times that adding a gradient to another in place reads or writes memory of its size."""

PARAMETER_OPERATORS, MEMBER_OPERATORS, RECOMPUTE_OPERATORS = 4.5, 2.5, 1.7
"""Host overhead on CPUs, in units of one operator's overhead.

- of AdamW's update of a parameter
- of copying a parameter or gradient into and out of a bucket
- of `torch.utils.checkpoint`, for each recomputed operator

Measured with steps of a small model on 8 processes. Accelerators hide host overhead."""

RING_OPERATORS = 20
"""Number of operators launched per step of ring attention: attention on two parts of the sequence,
and the merge of both results."""

ForwardBackward = tuple[float, float]
"""Pair (seconds of the forward pass, seconds of the backward pass)."""


class TimeModel:
    """Time model of operators and redistributions on a device matrix of a cluster, with a cache.

    Args:
        mesh: device matrix of one pipeline stage.
        stages: number of pipeline stages, each of which has its own devices.
        optimizer_shard_size: number of devices over which ZeRO shards optimizer state; -1 for all
            devices that replicate a parameter, None without ZeRO.
        parameter_weight: weight of the seconds of gathering, reducing and updating parameters in
            the objective of a search; 1 for a prediction.

    Raises:
        ConfigError: if the cluster has too few devices.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: DeviceMatrix,
        stages: int = 1,
        optimizer_shard_size: int | None = None,
        parameter_weight: float = 1.0,
    ) -> None:
        self.mesh = mesh
        self.parameter_weight = parameter_weight
        self.links = Links(cluster, mesh, stages)
        devices = mesh.num_devices * stages
        self.device = self.links.cluster.device
        self.shares_processor = cluster.device.is_oversubscribed(devices)
        # With slowdown 1 overlap saves nothing: a core that copies messages does not compute.
        self.slowdown = 1.0 if self.shares_processor else self.device.overlap_slowdown
        self.optimizer_shard_size = optimizer_shard_size
        self._operators: dict[tuple[object, ...], ForwardBackward] = {}
        self._steps: dict[tuple[RedistributionStep, Shape, int], ForwardBackward] = {}

    def operator_seconds(self, op: Op, cuts: Cuts) -> ForwardBackward:
        """Return the seconds (forward, backward) in which a device computes its shard of `op`."""
        # By id: `work_of` returns one object for operators of the same rule, and hashing all fields
        # of the object would take most of the time.
        work = work_of(op)
        key = (id(work), *cuts.items())
        if (seconds := self._operators.get(key)) is None:
            rule = rule_of(op)
            counts = rule.shard_counts(self.mesh, cuts) if rule is not None else {}
            seconds = self._operators[key] = self.work_seconds(work, counts)
        return seconds

    def recompute_seconds(self, op: Op, cuts: Cuts) -> float:
        """Return the seconds that a device takes to recompute its shard of `op` in the backward
        pass."""
        # Views are recomputed too, but launch no kernels.
        count = RECOMPUTE_OPERATORS if work_of(op).forward_bytes else 0
        return self.operator_seconds(op, cuts)[0] + self.host_seconds(count)

    def host_seconds(self, operators: float) -> float:
        """Return the host seconds to launch `operators` operators; 0 on an accelerator, which hides
        launches."""
        return 0.0 if self.device.at_full_rate is None else operators * self.device.overhead

    def work_seconds(self, work: Work, shard_counts: Mapping[str, int]) -> ForwardBackward:
        """Return the seconds (forward, backward) of `work` on one device.

        Args:
            shard_counts: number of shards of each factor.
        """
        # Every factor is a loop of the operator, so each cut divides the FLOPs.
        share = 1 / prod(shard_counts.values())

        def local_size(size: float, factors: frozenset[str]) -> float:
            return size / prod(shard_counts.get(factor, 1) for factor in factors)

        scales = {
            "norm": self.device.norm_traffic,
            "pointwise": self.device.pointwise_traffic,
            "routing": self.device.routing_traffic,
        }
        traffic = scales.get(work.traffic, 1.0)

        def seconds(flops: float, tensors: tuple[tuple[int, frozenset[str]], ...]) -> float:
            moved = traffic * sum(local_size(*tensor) for tensor in tensors)
            # The roofline model (Williams, Waterman and Patterson, "Roofline", 2009).
            return max(flops * share / rate, moved / self.device.stream_bandwidth)

        def memory_seconds(tensors: MovedBytes) -> float:
            moved = (
                scales.get(traffic_class, 1.0) * local_size(size, names)
                for traffic_class, size, names in tensors
            )
            return sum(moved) / self.device.stream_bandwidth

        sizes = (local_size(*size) for size in work.product_sizes)
        rate = self.device.rate(work.dtype, sizes, work.category == "attention")
        overhead = self.device.overhead
        forward = backward = 0.0
        # Views move no bytes and launch no kernel, so they take no overhead either.
        if work.forward_bytes:
            forward = overhead + seconds(work.forward_flops, work.forward_bytes)
            forward += memory_seconds(work.forward_moved)
        if work.backward_bytes:
            # The gradient of each input takes at least one kernel.
            backward = overhead * work.num_gradients
            backward += seconds(work.backward_flops, work.backward_bytes)
            backward += memory_seconds(work.backward_moved)
        return forward, backward

    def step_seconds(
        self, step: RedistributionStep, value: Value, differentiable: bool
    ) -> ForwardBackward:
        """Return the seconds (forward, backward) of one redistribution step of `value`."""
        itemsize = value.itemsize
        key = (step, value.shape, itemsize)
        if key not in self._steps:
            # The larger side: the output of an all-gather, or the input of a reduce-scatter.
            local = max(prod(s.shard_shape(value.shape)) for s in (step.source, step.target))
            self._steps[key] = (
                self._redistribution_step_seconds(step.forward, step, local * itemsize),
                self._redistribution_step_seconds(step.backward, step, local * itemsize),
            )
        forward, backward = self._steps[key]
        return forward, backward if differentiable else 0.0

    def dispatch_seconds(self, step: RedistributionStep, value: Value, copies: float) -> float:
        """Return the seconds of sending `copies` copies of each token of `value` to the devices of
        their experts, instead of redistributing all tokens by `step`."""
        tokens = min(prod(s.shard_shape(value.shape)) for s in (step.source, step.target))
        efficiency = self.device.dispatch_efficiency
        fastest = self.links.cluster.levels[0]
        return self.links.dispatch_seconds(
            step.axes,
            tokens * value.itemsize,
            copies,
            self.device.sends_tokens_once,
            1.0 if efficiency is None else efficiency / fastest.efficiency,
        )

    def inner_collective_seconds(
        self,
        reduction: Reduction,
        axes: Axes,
        differentiable: bool,
        computation: ForwardBackward = (0.0, 0.0),
    ) -> ForwardBackward:
        """Return the exposed seconds (forward, backward) of one collective inside an operator.

        Args:
            axes: axes over which the collective communicates.
            differentiable: whether the operator has a backward pass.
            computation: seconds in which a device computes its shard of the operator, which overlap
                the messages of ring attention.
        """
        num_bytes = prod(reduction.shape) * reduction.dtype.itemsize
        collective_seconds = self.links.seconds(reduction.collective, axes, num_bytes)
        group, saved_fraction = self.mesh.size(axes), 1 - self.slowdown
        counts = reduction.num_collectives(group, differentiable)
        if reduction.operation != RING:
            return counts[0] * collective_seconds, counts[1] * collective_seconds
        # Each of the `group` steps of the ring but the last overlaps a transfer with computation.
        launches = (group - 1) * RING_OPERATORS * self.device.overhead
        hideable = (seconds * (group - 1) / group for seconds in computation)
        forward, backward = (
            count * collective_seconds
            - saved_fraction * min(count * collective_seconds, limit)
            + (launches if count else 0.0)
            for count, limit in zip(counts, hideable, strict=True)
        )
        return forward, backward

    def _redistribution_step_seconds(
        self, name: str | None, step: RedistributionStep, num_bytes: int
    ) -> float:
        return 0.0 if name is None else self.links.seconds(name, step.axes, num_bytes)

    def bucketed_seconds(
        self, axes: Axes, num_bytes: float, collective: str = "all_reduce"
    ) -> float:
        """Return the seconds, times `parameter_weight`, that a tensor adds to a bucketed
        collective.

        The latency counts in proportion to the tensor's part of a bucket.

        Args:
            num_bytes: bytes of the local input or output, whichever is larger.
        """
        full = self.links.seconds(collective, axes, num_bytes, bucketed=True)
        # The share is in proportion to bytes: a tensor as large as a bucket has the full latency.
        latency = self.links.seconds(collective, axes, 0, bucketed=True)
        saved = latency * max(0.0, 1 - num_bytes / BUCKET_BYTES)
        return self.parameter_weight * (full - saved)

    def parameter_seconds(
        self, varying: Axes, replicated: Axes, num_bytes: float
    ) -> tuple[float, float]:
        """Return the (all-gather, gradient reduction) seconds of a parameter, both bucketed and
        multiplied by `parameter_weight`.

        ZeRO shards over all axes that replicate a parameter. Only `varying` axes need a reduction
        of the gradient, as the others also replicate the computation.

        Args:
            varying: axes over which the gradient is a partial sum.
            replicated: all other axes that replicate the parameter.
            num_bytes: bytes of the shard that a device's operators read.
        """
        reduced_bytes = num_bytes * self.device.reduction_traffic
        if self.optimizer_shard_size is None:
            return 0.0, self.bucketed_seconds(varying, reduced_bytes)
        gather = self.bucketed_seconds((*varying, *replicated), num_bytes, "all_gather")
        return gather, self.bucketed_seconds(varying, reduced_bytes, "reduce_scatter")

    def accumulation_seconds(self, num_bytes: float) -> float:
        """Return the seconds of adding `num_bytes` of gradients to those of earlier
        micro-batches."""
        passes = ACCUMULATION_PASSES * self.device.accumulation_traffic
        return passes * num_bytes / self.device.stream_bandwidth

    def update_seconds(self, num_bytes: float, count: int = 0) -> float:
        """Return the seconds of the optimizer step over `count` stored parameters of `num_bytes` in
        total."""
        memory_seconds = UPDATE_PASSES * num_bytes / self.device.stream_bandwidth
        return memory_seconds + self.host_seconds(PARAMETER_OPERATORS * count)

    def parameter_update_seconds(self, num_bytes: float, num_shards: int) -> float:
        """Return the seconds, times `parameter_weight`, of the optimizer step over a parameter, or
        over its ZeRO shard.

        Args:
            num_bytes: bytes of the shard that a device's operators read.
            num_shards: number of shards in which operators read the parameter.
        """
        if self.optimizer_shard_size is None:
            return self.parameter_weight * self.update_seconds(num_bytes)
        num_replicas = self.mesh.num_devices // num_shards
        # -1 stands for all devices that replicate the parameter.
        if self.optimizer_shard_size > 0:
            num_replicas = min(num_replicas, self.optimizer_shard_size)
        return self.parameter_weight * self.update_seconds(num_bytes / num_replicas)
