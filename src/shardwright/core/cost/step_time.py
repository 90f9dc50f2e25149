"""Seconds of one training step: computation by a roofline, collectives by the α-β model.

An operator takes an overhead plus the longer of two times: its FLOPs at the rate that the device
reaches with matrices of that size, and its bytes at the device's memory bandwidth. `Links` predicts
collectives. Communication overlaps computation as follows:

- Redistributions of activations overlap the operators between producer and first consumer, and the
  weight gradients that linear consumers delay (`core/partition/overlap.py`). The rest is exposed.
- Reductions of parameter gradients overlap the backward computation, bucket by bucket. Only what
  exceeds it is exposed.
- Gathers of sharded parameters overlap the forward computation. Only what exceeds it is exposed.
- Overlapped communication slows computation down by a fraction of its time (`overlap_slowdown`).
- Nothing overlaps where devices are processes that share a processor: the cores that copy one
  process's messages are those that the others compute on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.collectives import Links
from shardwright.core.cost.flops import Work, work_of
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes, Shape
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.layout.redistribution import RedistributionStep
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.decisions import BUCKET_BYTES
from shardwright.core.partition.overlap import Overlap
from shardwright.core.partition.parameter_buckets import Bucket
from shardwright.core.partition.transfer import Transfer
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import RING, Cuts, Reduction

UPDATE_PASSES = 7
"""Memory passes of AdamW over each stored parameter: it reads parameter, gradient and two moments,
and writes parameter and moments."""

PARAMETER_OPERATORS, MEMBER_OPERATORS, RECOMPUTE_OPERATORS = 4.5, 2.5, 1.7
"""Host time in units of an operator's overhead: AdamW's update of a parameter; copying a parameter
or gradient into a bucket and out of it; bookkeeping of `torch.utils.checkpoint` per recomputed
operator. Only CPUs pay it, as an accelerator computes meanwhile. Measured with steps of a small
model on 8 processes."""

RING_OPERATORS = 20
"""Operators launched per step of ring attention: attention on two parts, and merging each."""

ForwardBackward = tuple[float, float]
"""Seconds of the forward and of the backward pass."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step on one device, by kind of work.

    Args:
        forward, backward: computation of one micro-batch.
        forward_redistributions, backward_redistributions: redistributions of activations of one
            micro-batch.
        gathers: gathers of sharded parameters made once per step.
        gradients: reductions of parameter gradients made once per step.
        update: optimizer step.
        gathers_per_micro_batch: gathers made in each forward pass.
        gradients_per_micro_batch: reductions made in each backward pass, and gathers repeated
            there.
        micro_batches: number of micro-batches per step.
        bubble: fraction of the step in which a pipeline stage is idle.
        forward_hidden, backward_hidden: part of the redistributions that overlaps computation.
        slowdown: fraction of overlapped communication by which computation is slowed down; 1 means
            that overlap gains nothing.
    """

    forward: float
    backward: float
    forward_redistributions: float
    backward_redistributions: float
    gathers: float
    gradients: float
    update: float
    gathers_per_micro_batch: float = 0.0
    gradients_per_micro_batch: float = 0.0
    micro_batches: int = 1
    bubble: float = 0.0
    forward_hidden: float = 0.0
    backward_hidden: float = 0.0
    slowdown: float = 0.0

    @property
    def forward_seconds(self) -> float:
        """Forward pass of one micro-batch, with exposed communication."""
        gained = (1 - self.slowdown) * self.forward_hidden
        return (
            self.forward + self.forward_redistributions - gained + self.exposed_per_micro_batch[0]
        )

    @property
    def backward_seconds(self) -> float:
        """Backward pass of one micro-batch, with exposed communication."""
        gained = (1 - self.slowdown) * self.backward_hidden
        return (
            self.backward + self.backward_redistributions - gained + self.exposed_per_micro_batch[1]
        )

    @property
    def computation(self) -> float:
        """Computation of all micro-batches and of the optimizer."""
        return self.micro_batches * (self.forward + self.backward) + self.update

    @property
    def exposed_per_micro_batch(self) -> ForwardBackward:
        """Exposed communication of parameters and gradients in each micro-batch."""
        return (
            self._exposed_part(self.gathers_per_micro_batch, self.forward - self.forward_hidden),
            self._exposed_part(
                self.gradients_per_micro_batch, self.backward - self.backward_hidden
            ),
        )

    @property
    def exposed_per_step(self) -> ForwardBackward:
        """Exposed communication of parameters and gradients that is made once per step."""
        # It overlaps the forward pass of the first micro-batch and the backward pass of the last.
        forward = max(0.0, self.forward - self.forward_hidden - self.gathers_per_micro_batch)
        backward = max(0.0, self.backward - self.backward_hidden - self.gradients_per_micro_batch)
        return (
            self._exposed_part(self.gathers, forward),
            self._exposed_part(self.gradients, backward),
        )

    @property
    def exposed(self) -> float:
        """Exposed communication that is made once per step, forward and backward together."""
        return sum(self.exposed_per_step)

    def _exposed_part(self, communication: float, computation: float) -> float:
        """Exposed part of `communication`, plus the slowdown of `computation` by the rest."""
        return communication - (1 - self.slowdown) * min(communication, computation)

    @property
    def communication(self) -> float:
        """Exposed communication of the step."""
        each = self.forward_seconds + self.backward_seconds - self.forward - self.backward
        # Sums of the same terms in two orders differ in their last digits.
        return max(0.0, self.micro_batches * each + self.exposed)

    @property
    def seconds(self) -> float:
        """The whole step."""
        busy = self.micro_batches * (self.forward_seconds + self.backward_seconds)
        return busy / (1 - self.bubble) + self.exposed + self.update


class TimeModel:
    """Seconds of operators and redistributions on a device matrix of a cluster, cached.

    Args:
        stages: number of pipeline stages, each with its own device matrix of this shape.
        optimizer_shard_size: number of replicas of a parameter over which optimizer state is
            sharded; -1 for all, None without ZeRO.
        parameter_weight: weight of seconds spent on gathering, reducing and updating parameters in
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
        self.shared = cluster.device.shared(devices)
        self.slowdown = 1.0 if self.shared else self.device.overlap_slowdown
        self.optimizer_shard_size = optimizer_shard_size
        self._operators: dict[tuple[object, ...], ForwardBackward] = {}
        self._steps: dict[tuple[RedistributionStep, Shape, int], ForwardBackward] = {}

    def operator(self, op: Op, cuts: Cuts) -> ForwardBackward:
        """Computation of one device's shard of `op`, forward and backward."""
        work = work_of(op)
        key = (id(work), *cuts.items())
        if (seconds := self._operators.get(key)) is None:
            rule = rule_of(op)
            counts = rule.shard_counts(self.mesh, cuts) if rule is not None else {}
            seconds = self._operators[key] = self.work(work, counts)
        return seconds

    def recompute_seconds(self, op: Op, cuts: Cuts) -> float:
        """Seconds to recompute one device's shard of `op` in the backward pass."""
        count = RECOMPUTE_OPERATORS if work_of(op).forward_bytes else 0
        return self.operator(op, cuts)[0] + self.host_seconds(count)

    def host_seconds(self, operators: float) -> float:
        """Host time of `operators` operator launches; 0 on an accelerator, which hides it."""
        return 0.0 if self.device.at_full_rate is None else operators * self.device.overhead

    def work(self, work: Work, shard_counts: Mapping[str, int]) -> ForwardBackward:
        """Seconds of `work` on one device.

        Args:
            shard_counts: number of shards of each factor.
        """
        share = 1 / prod(shard_counts.values())

        def shard(size: float, factors: frozenset[str]) -> float:
            return size / prod(shard_counts.get(factor, 1) for factor in factors)

        def seconds(flops: float, tensors: tuple[tuple[int, frozenset[str]], ...]) -> float:
            moved = sum(shard(*tensor) for tensor in tensors)
            return max(flops * share / rate, moved / self.device.stream)

        sides = (shard(*side) for side in work.sides)
        rate = self.device.rate(work.dtype, sides, work.kind == "attention")
        overhead = self.device.overhead
        forward = backward = 0.0
        if work.forward_bytes:
            forward = overhead + seconds(work.forward_flops, work.forward_bytes)
        if work.backward_bytes:
            backward = overhead * work.gradients
            backward += seconds(work.backward_flops, work.backward_bytes)
        return forward, backward

    def step(self, step: RedistributionStep, value: Value, differentiable: bool) -> ForwardBackward:
        """Seconds of one redistribution step of `value`, forward and backward."""
        itemsize = value.itemsize
        key = (step, value.shape, itemsize)
        if key not in self._steps:
            local = max(prod(s.shard_shape(value.shape)) for s in (step.source, step.target))
            self._steps[key] = (
                self._collective(step.forward, step, local * itemsize),
                self._collective(step.backward, step, local * itemsize),
            )
        there, back = self._steps[key]
        return there, back if differentiable else 0.0

    def inner_collective(
        self,
        reduction: Reduction,
        axes: Axes,
        differentiable: bool,
        beside: ForwardBackward = (0.0, 0.0),
    ) -> ForwardBackward:
        """Exposed seconds of one collective inside an operator, forward and backward.

        Args:
            beside: computation of the operator; ring attention overlaps its messages with it.
        """
        num_bytes = prod(reduction.shape) * reduction.dtype.itemsize
        once = self.links.seconds(reduction.collective, axes, num_bytes)
        group, gained = self.mesh.size(axes), 1 - self.slowdown
        times = reduction.num_collectives(group, differentiable)
        if reduction.kind != RING:
            return times[0] * once, times[1] * once
        launches = (group - 1) * RING_OPERATORS * self.device.overhead
        hides = (seconds * (group - 1) / group for seconds in beside)
        there, back = (
            count * once - gained * min(count * once, most) + (launches if count else 0.0)
            for count, most in zip(times, hides, strict=True)
        )
        return there, back

    def _collective(self, kind: str | None, step: RedistributionStep, num_bytes: int) -> float:
        return 0.0 if kind is None else self.links.seconds(kind, step.axes, num_bytes)

    def bucketed(self, axes: Axes, num_bytes: float, collective: str = "all_reduce") -> float:
        """Seconds of a tensor's part of bucketed collectives: it pays for its own bytes, and for
        its share of a bucket's latency."""
        whole = self.links.seconds(collective, axes, num_bytes, joined=True)
        latency = self.links.seconds(collective, axes, 0, joined=True)
        saved = latency * max(0.0, 1 - num_bytes / BUCKET_BYTES)
        return self.parameter_weight * (whole - saved)

    def parameter(self, varying: Axes, whole: Axes, num_bytes: float) -> tuple[float, float]:
        """Seconds of gathering a parameter and of reducing its gradient, once per step, in buckets.

        ZeRO shards over all axes on which a parameter is replicated, including those on which
        computation is replicated too and the gradient needs no reduction.

        Args:
            varying: axes over which its gradient is a partial sum.
            whole: other axes on which the parameter is replicated.
            num_bytes: bytes of the shard that a device uses.
        """
        if self.optimizer_shard_size is None:
            return 0.0, self.bucketed(varying, num_bytes)
        gather = self.bucketed((*varying, *whole), num_bytes, "all_gather")
        return gather, self.bucketed(varying, num_bytes, "reduce_scatter")

    def update(self, num_bytes: float, count: int = 0) -> float:
        """Seconds of the optimizer step over `count` stored parameters of `num_bytes` in total."""
        moving = UPDATE_PASSES * num_bytes / self.device.stream
        return moving + self.host_seconds(PARAMETER_OPERATORS * count)

    def parameter_update(self, num_bytes: float, num_shards: int) -> float:
        """Seconds of the optimizer step over a parameter, divided among its replicas by ZeRO.

        Args:
            num_bytes: bytes of the shard that a device uses.
            num_shards: number of shards it is used in.
        """
        if self.optimizer_shard_size is None:
            return self.parameter_weight * self.update(num_bytes)
        sharers = self.mesh.num_devices // num_shards
        if self.optimizer_shard_size > 0:
            sharers = min(sharers, self.optimizer_shard_size)
        return self.parameter_weight * self.update(num_bytes / sharers)


def operator_seconds(graph: Graph, model: TimeModel, cuts: Mapping[str, Cuts]) -> list[float]:
    """Seconds of computation of each operator on one device, forward and backward together."""
    return [sum(model.operator(op, cuts.get(op.name, {}))) for op in graph.ops]


def step_time(
    graph: Graph,
    flow: Communication,
    cuts: Mapping[str, Cuts],
    model: TimeModel,
    *,
    micro_batches: int = 1,
    bubble: float = 0.0,
    beside: Mapping[Transfer, Overlap] | None = None,
) -> StepTime:
    """Predicts the seconds of one training step of a partitioned graph.

    Args:
        flow: communication of the plan.
        cuts: cuts of its operators.
        micro_batches: number of micro-batches per step; the graph is of one.
        bubble: fraction of the step in which a pipeline stage is idle.
        beside: computation that overlaps redistributions; by default none.
    """
    forward, backward = _summed(model.operator(op, cuts.get(op.name, {})) for op in graph.ops)
    recomputed = [op for op in graph.ops if op.name in flow.recomputed_ops]
    backward += sum(model.recompute_seconds(op, cuts.get(op.name, {})) for op in recomputed)
    there, back = _summed(seconds for *_, seconds in activation_seconds(graph, flow, cuts, model))
    hidden = _summed(hidden_seconds(beside, cuts, model).values()) if beside else (0.0, 0.0)
    buckets: dict[tuple[bool, int], float] = defaultdict(float)
    for _, _, once, way, seconds in bucket_seconds(flow, model):
        buckets[once, way] += seconds
    trained = [value for value in graph.parameters if value.requires_grad]
    stored = sum(_stored_bytes(flow, value) for value in trained)
    return StepTime(
        forward=forward,
        backward=backward,
        forward_redistributions=there,
        backward_redistributions=back,
        gathers=buckets[True, 0],
        gradients=buckets[True, 1],
        update=model.update(stored, len(trained)),
        gathers_per_micro_batch=buckets[False, 0],
        gradients_per_micro_batch=buckets[False, 1],
        micro_batches=micro_batches,
        bubble=bubble,
        forward_hidden=hidden[0],
        backward_hidden=hidden[1],
        slowdown=model.slowdown,
    )


def hidden_seconds(
    beside: Mapping[Transfer, Overlap], cuts: Mapping[str, Cuts], model: TimeModel
) -> dict[Transfer, ForwardBackward]:
    """Overlapped seconds of each redistribution of an activation, forward and backward. An operator
    that several of them overlap hides its own seconds once in total."""
    delayed = {op for overlap in beside.values() for op in overlap.linears}
    spare: dict[tuple[str, str], float] = {}

    def hide(seconds: float, part: str, ops: Sequence[Op]) -> float:
        left = seconds
        for op in ops:
            if (op.name, part) not in spare:
                forward, backward = model.operator(op, cuts.get(op.name, {}))
                # A delayed weight gradient is half of a linear layer's backward pass.
                half = backward / 2 if op in delayed else backward
                spare[op.name, part] = {"forward": forward, "weight": backward - half}.get(
                    part, half
                )
            used = min(left, spare[op.name, part])
            spare[op.name, part] -= used
            left -= used
        return seconds - left

    hidden = {}
    for transfer, overlap in beside.items():
        sent, returned = model.step(transfer.step, transfer.value, transfer.trained)
        there = hide(sent, "forward", overlap.beside)
        back = hide(returned, "weight", overlap.linears)
        back += hide(returned - back, "backward", overlap.beside)
        hidden[transfer] = there, back + (there if transfer.is_repeated else 0.0)
    return hidden


def activation_seconds(
    graph: Graph, flow: Communication, cuts: Mapping[str, Cuts], model: TimeModel
) -> Iterator[tuple[Transfer | None, Axes, ForwardBackward]]:
    """Redistributions of activations, and collectives inside operators (with transfer None), each
    with axes and seconds of one micro-batch, forward and backward."""
    for name, inner in flow.reductions.items():
        differentiable = any(value.requires_grad for value in graph.by_name[name].outputs)
        beside = model.operator(graph.by_name[name], cuts.get(name, {}))
        for one in inner:
            there, back = model.inner_collective(one.reduction, one.axes, differentiable, beside)
            repeated = there if name in flow.recomputed_ops else 0.0
            yield None, tuple(one.axes), (there, back + repeated)
    bucketed = {id(t) for b in flow.buckets for member in b.members for t in member.transfers}
    for transfer in flow.transfers:
        if id(transfer) not in bucketed:
            there, back = model.step(transfer.step, transfer.value, transfer.trained)
            repeated = there if transfer.is_repeated else 0.0
            yield transfer, transfer.step.axes, (there, back + repeated)


def bucket_seconds(
    flow: Communication, model: TimeModel
) -> Iterator[tuple[Bucket, str, bool, int, float]]:
    """Gathers of each bucket and reductions of its gradients, as tuples of: bucket; `parameters` or
    `gradients`; whether once per step instead of per micro-batch; forward (0) or backward (1);
    seconds."""
    for bucket in flow.buckets:
        gather, reduce = _bucket(bucket, model)
        yield bucket, "parameters", bucket.level != "level3", 0, gather
        yield bucket, "gradients", bucket.reduces_once, 1, reduce
        if bucket.regathers:
            yield bucket, "parameters", False, 1, gather


def _summed(pairs: Iterable[ForwardBackward]) -> ForwardBackward:
    forward = backward = 0.0
    for there, back in pairs:
        forward, backward = forward + there, backward + back
    return forward, backward


def _bucket(bucket: Bucket, model: TimeModel) -> ForwardBackward:
    """Seconds of gathering a bucket once, and of reducing its gradients once."""
    gather = reduce = 0.0
    joining = model.host_seconds(MEMBER_OPERATORS * len(bucket.members))
    local = bucket.numel * bucket.members[0].value.itemsize
    for step in bucket.steps:
        if step.kind == "all_gather":
            local *= step.group_size
            gather += model.links.seconds("all_gather", step.axes, local)
        if step.backward is not None and bucket.trained:
            reduce += model.links.seconds(step.backward, step.axes, local)
    return gather and gather + joining, reduce and reduce + joining


def _stored_bytes(flow: Communication, value: Value) -> int:
    return prod(flow.initial_layouts[value].shard_shape(value.shape)) * value.stored_dtype.itemsize
