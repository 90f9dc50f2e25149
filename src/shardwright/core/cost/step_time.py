"""Seconds of one training step: computation by a roofline, collectives by the α-β model.

An operator takes the longer of its operations at the rate that the device reaches with matrices of
that size and its bytes at the device's memory bandwidth, and an overhead. A collective takes what
`Links` says. What overlaps:

- Redistributions of activations with what the program computes beside them, as listed in
  `core/partition/overlap.py`: operators between where a value is made and where it is read, and the
  gradients of the weights that its readers delay. For the rest of each the next operator waits.
- Gradients of parameters overlap the backward computation, as their buckets are reduced while
  earlier operators are differentiated. Only what exceeds it counts.
- Parameters that are stored sharded are gathered while earlier operators compute: likewise, against
  the forward computation.
- Computation takes longer with communication beside it: of what is hidden, a share of it counts.
- Where devices are processes that share a processor nothing overlaps: what one sends is copied by
  the cores that the others compute on.
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
"""How often AdamW moves each stored parameter: it reads parameter, gradient and two moments, and
writes parameter and moments."""

PARAMETER_OPERATORS, MEMBER_OPERATORS, AGAIN_OPERATORS = 4.5, 2.5, 1.7
"""What takes a CPU as long as so many operators, and goes on beside the work of an accelerator:
AdamW's update of a parameter; putting a parameter or its gradient into a bucket and taking it out
again; what `torch.utils.checkpoint` keeps of an operator that is computed again. As measured with
steps of a small model on 8 processes."""

RING_OPERATORS = 20
"""Of each step of attention round a ring: two parts of it, and what merges each with the others."""

ComputeAndExposed = tuple[float, float]
"""Forward and backward."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step on one device, by what takes them.

    Args:
        forward, backward: computation of one micro-batch.
        forward_redistributions, backward_redistributions: of activations, of one micro-batch.
        gathers: of parameters that are stored sharded, once a step.
        gradients: reductions of parameters' gradients, once a step.
        gathers_each, gradients_each: likewise, but in every micro-batch (gradients with what is
            gathered again for them).
        update: the optimizer's.
        micro_batches: how many follow each other.
        bubble: the share of the step in which a pipeline stage waits.
        forward_hidden, backward_hidden: of the redistributions, what goes on beside computation.
        slowdown: of what goes on beside computation the share by which both together take longer
            than the computation; 1: nothing is gained.
    """

    forward: float
    backward: float
    forward_redistributions: float
    backward_redistributions: float
    gathers: float
    gradients: float
    update: float
    gathers_each: float = 0.0
    gradients_each: float = 0.0
    micro_batches: int = 1
    bubble: float = 0.0
    forward_hidden: float = 0.0
    backward_hidden: float = 0.0
    slowdown: float = 0.0

    @property
    def forward_seconds(self) -> float:
        """One micro-batch forward, with all that it waits for."""
        gained = (1 - self.slowdown) * self.forward_hidden
        return self.forward + self.forward_redistributions - gained + self.waits_each[0]

    @property
    def backward_seconds(self) -> float:
        """One micro-batch backward, with all that it waits for."""
        gained = (1 - self.slowdown) * self.backward_hidden
        return self.backward + self.backward_redistributions - gained + self.waits_each[1]

    @property
    def computation(self) -> float:
        """What all micro-batches and the optimizer compute."""
        return self.micro_batches * (self.forward + self.backward) + self.update

    @property
    def waits_each(self) -> ComputeAndExposed:
        """What no computation hides of the communication of parameters and gradients in every
        micro-batch, forward and backward."""
        return (
            self._waits(self.gathers_each, self.forward - self.forward_hidden),
            self._waits(self.gradients_each, self.backward - self.backward_hidden),
        )

    @property
    def waits_once(self) -> ComputeAndExposed:
        """Likewise of what is made once a step: with the first micro-batch forward, with the last
        one backward."""
        forward = max(0.0, self.forward - self.forward_hidden - self.gathers_each)
        backward = max(0.0, self.backward - self.backward_hidden - self.gradients_each)
        return self._waits(self.gathers, forward), self._waits(self.gradients, backward)

    @property
    def exposed(self) -> float:
        """What a step waits for the communication that is made once."""
        return sum(self.waits_once)

    def _waits(self, communication: float, computation: float) -> float:
        """What `computation` does not hide, and what it takes longer for what it does."""
        return communication - (1 - self.slowdown) * min(communication, computation)

    @property
    def communication(self) -> float:
        """Communication that the step waits for."""
        each = self.forward_seconds + self.backward_seconds - self.forward - self.backward
        # Sums of the same terms in two orders differ in their last digits.
        return max(0.0, self.micro_batches * each + self.exposed)

    @property
    def seconds(self) -> float:
        """The whole step."""
        busy = self.micro_batches * (self.forward_seconds + self.backward_seconds)
        return busy / (1 - self.bubble) + self.exposed + self.update


class TimeModel:
    """Seconds of operators and redistributions on a device matrix of a cluster; equal ones once.

    Args:
        stages: number of pipeline stages, each with such a matrix.
        sharing: over how many devices optimizer state is sharded, of those that use a parameter
            alike; -1 for all of them, None if it is not.
        parameter_weight: what a second counts in which parameters are gathered or updated, or their
            gradients reduced, to a search; 1 for a prediction.

    Raises:
        ConfigError: if the cluster has not so many devices.
    """

    def __init__(
        self,
        cluster: Cluster,
        mesh: DeviceMatrix,
        stages: int = 1,
        sharing: int | None = None,
        parameter_weight: float = 1.0,
    ) -> None:
        self.mesh = mesh
        self.parameter_weight = parameter_weight
        self.links = Links(cluster, mesh, stages)
        devices = mesh.num_devices * stages
        self.device = self.links.cluster.device
        self.shared = cluster.device.shared(devices)
        self.slowdown = 1.0 if self.shared else self.device.overlap_slowdown
        self.sharing = sharing
        self._operators: dict[tuple[object, ...], ComputeAndExposed] = {}
        self._steps: dict[tuple[RedistributionStep, Shape, int], ComputeAndExposed] = {}

    def operator(self, op: Op, cuts: Cuts) -> ComputeAndExposed:
        """Computation of one device's shard of `op`, forward and backward."""
        work = work_of(op)
        key = (id(work), *cuts.items())
        if (known := self._operators.get(key)) is None:
            rule = rule_of(op)
            counts = rule.shard_counts(self.mesh, cuts) if rule is not None else {}
            known = self._operators[key] = self.work(work, counts)
        return known

    def again(self, op: Op, cuts: Cuts) -> float:
        """Computation of one device's shard of `op` once more, in the backward pass."""
        count = AGAIN_OPERATORS if work_of(op).forward_bytes else 0
        return self.operator(op, cuts)[0] + self.on_host(count)

    def on_host(self, operators: float) -> float:
        """Seconds of what takes a CPU as long as so many operators do at least."""
        return 0.0 if self.device.at_full_rate is None else operators * self.device.overhead

    def work(self, work: Work, shard_counts: Mapping[str, int]) -> ComputeAndExposed:
        """Seconds of `work` on one device, where each factor is cut into so many shards."""
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

    def step(
        self, step: RedistributionStep, value: Value, differentiable: bool
    ) -> ComputeAndExposed:
        """One redistribution step of `value`, forward and backward."""
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

    def inside(
        self,
        reduction: Reduction,
        axes: Axes,
        differentiable: bool,
        beside: ComputeAndExposed = (0.0, 0.0),
    ) -> ComputeAndExposed:
        """What is waited for one collective inside an operator, forward and backward.

        Args:
            beside: computation of the operator. Round a ring goes what it computes with next.
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
        """A collective that is joined with others into buckets, so that it pays its share of the
        latency of one."""
        whole = self.links.seconds(collective, axes, num_bytes, joined=True)
        latency = self.links.seconds(collective, axes, 0, joined=True)
        saved = latency * max(0.0, 1 - num_bytes / BUCKET_BYTES)
        return self.parameter_weight * (whole - saved)

    def parameter(self, varying: Axes, whole: Axes, num_bytes: float) -> tuple[float, float]:
        """Gathering a parameter and reducing its gradient, once a step, in buckets.

        Optimizer state that is sharded is so over all axes on which devices use a parameter alike,
        also where they compute alike: of those the parameter is gathered too.

        Args:
            varying: the axes over which its gradient is a partial sum.
            whole: those over which its uses are alike.
            num_bytes: of the shard that a device uses.
        """
        if self.sharing is None:
            return 0.0, self.bucketed(varying, num_bytes)
        gather = self.bucketed((*varying, *whole), num_bytes, "all_gather")
        return gather, self.bucketed(varying, num_bytes, "reduce_scatter")

    def update(self, num_bytes: float, count: int = 0) -> float:
        """The optimizer's step over so many stored parameters of together so many bytes."""
        moving = UPDATE_PASSES * num_bytes / self.device.stream
        return moving + self.on_host(PARAMETER_OPERATORS * count)

    def update_of(self, num_bytes: float, num_shards: int) -> float:
        """The optimizer's step over a parameter that is used in so many bytes, cut into
        `num_shards`; the devices that use the same shard share it as `sharing` says."""
        if self.sharing is None:
            return self.parameter_weight * self.update(num_bytes)
        sharers = self.mesh.num_devices // num_shards
        if self.sharing > 0:
            sharers = min(sharers, self.sharing)
        return self.parameter_weight * self.update(num_bytes / sharers)


def operator_seconds(graph: Graph, model: TimeModel, cuts: Mapping[str, Cuts]) -> list[float]:
    """Computation of each operator on one device, forward and backward."""
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
    """Seconds of one training step of `graph` as it was decided.

    Args:
        flow: what the plan communicates.
        cuts: of its operators.
        model: of the cluster and the device matrix.
        micro_batches: how many of the graph's batches make up a step.
        bubble: the share of the step in which a pipeline stage waits.
        beside: what the program computes beside redistributions; by default nothing.
    """
    forward, backward = _summed(model.operator(op, cuts.get(op.name, {})) for op in graph.ops)
    again = [op for op in graph.ops if op.name in flow.computed_again]
    backward += sum(model.again(op, cuts.get(op.name, {})) for op in again)
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
        gathers_each=buckets[False, 0],
        gradients_each=buckets[False, 1],
        micro_batches=micro_batches,
        bubble=bubble,
        forward_hidden=hidden[0],
        backward_hidden=hidden[1],
        slowdown=model.slowdown,
    )


def hidden_seconds(
    beside: Mapping[Transfer, Overlap], cuts: Mapping[str, Cuts], model: TimeModel
) -> dict[Transfer, ComputeAndExposed]:
    """What goes on beside computation of each redistribution of an activation, forward and
    backward; an operator hides as much as it takes, of one or of several."""
    delayed = {op for overlap in beside.values() for op in overlap.linears}
    spare: dict[tuple[str, str], float] = {}

    def hide(seconds: float, part: str, ops: Sequence[Op]) -> float:
        left = seconds
        for op in ops:
            if (op.name, part) not in spare:
                forward, backward = model.operator(op, cuts.get(op.name, {}))
                # Of a linear layer whose weight is delayed half is computed there.
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
        hidden[transfer] = there, back + (there if transfer.again else 0.0)
    return hidden


def activation_seconds(
    graph: Graph, flow: Communication, cuts: Mapping[str, Cuts], model: TimeModel
) -> Iterator[tuple[Transfer | None, Axes, ComputeAndExposed]]:
    """Each redistribution of an activation, and each collective inside an operator (None), with its
    axes and its seconds in one micro-batch, forward and backward."""
    for name, inner in flow.reductions.items():
        differentiable = any(value.requires_grad for value in graph.by_name[name].outputs)
        beside = model.operator(graph.by_name[name], cuts.get(name, {}))
        for one in inner:
            there, back = model.inside(one.reduction, one.axes, differentiable, beside)
            again = there if name in flow.computed_again else 0.0
            yield None, tuple(one.axes), (there, back + again)
    bucketed = {id(t) for b in flow.buckets for member in b.members for t in member.transfers}
    for transfer in flow.transfers:
        if id(transfer) not in bucketed:
            there, back = model.step(transfer.step, transfer.value, transfer.trained)
            again = there if transfer.again else 0.0
            yield transfer, transfer.step.axes, (there, back + again)


def bucket_seconds(
    flow: Communication, model: TimeModel
) -> Iterator[tuple[Bucket, str, bool, int, float]]:
    """Each gather of a bucket of parameters and each reduction of its gradients: what is sent,
    whether once a step (or in each micro-batch), forward (0) or backward (1), and its seconds."""
    for bucket in flow.buckets:
        gather, reduce = _bucket(bucket, model)
        yield bucket, "parameters", bucket.level != "level3", 0, gather
        yield bucket, "gradients", bucket.once, 1, reduce
        if bucket.again:
            yield bucket, "parameters", False, 1, gather


def _summed(pairs: Iterable[ComputeAndExposed]) -> ComputeAndExposed:
    forward = backward = 0.0
    for there, back in pairs:
        forward, backward = forward + there, backward + back
    return forward, backward


def _bucket(bucket: Bucket, model: TimeModel) -> ComputeAndExposed:
    """Gathering a bucket once, and reducing its gradients once."""
    gather = reduce = 0.0
    joining = model.on_host(MEMBER_OPERATORS * len(bucket.members))
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
