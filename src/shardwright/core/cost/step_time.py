"""Seconds of one training step: computation by a roofline, collectives by the α-β model.

An operator takes an overhead plus the longer of two times: its FLOPs at the rate that the device
reaches with matrices of that size, and its bytes at the device's memory bandwidth. `Links` predicts
collectives. Communication overlaps computation as follows:

- Redistributions of activations overlap the operators between producer and first consumer, and the
  weight gradients that linear consumers delay (`core/partition/overlap.py`). The rest is exposed.
- Reductions of parameter gradients overlap the backward computation, bucket by bucket. Only the
  seconds in excess of the computation are exposed.
- Gathers of sharded parameters overlap the forward computation in the same way.
- Overlapped communication slows computation down by a fraction of the seconds of the communication
  (`overlap_slowdown`).
- Nothing overlaps where devices are processes that share a processor: a core that copies the
  messages of one process does not compute for another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.core.cost.muon_time import orthogonalization_seconds
from shardwright.core.cost.time_model import MEMBER_OPERATORS, ForwardBackward, TimeModel
from shardwright.core.cost.token_routing import RoutedStep, routed_steps
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.overlap import Overlap
from shardwright.core.partition.parameter_buckets import Bucket
from shardwright.core.partition.transfer import Transfer
from shardwright.core.rules.rule import Cuts


@dataclass(frozen=True)
class StepTime:
    """Seconds of computation, communication and optimizer in one training step on one device.

    Args:
        forward, backward: seconds of computation per micro-batch.
        forward_redistributions, backward_redistributions: seconds of redistributing activations per
            micro-batch.
        gathers: seconds of gathering the sharded parameters that are gathered once per step.
        gradients: seconds of reducing the gradients that are reduced once per step.
        update: seconds of the optimizer step.
        gathers_per_micro_batch: seconds of gathering parameters in each forward pass.
        gradients_per_micro_batch: seconds of reducing gradients, and of gathering parameters again,
            in each backward pass.
        micro_batches: number of micro-batches per step.
        bubble: fraction of the step for which a pipeline stage is idle.
        forward_hidden, backward_hidden: seconds of redistributions that overlap computation, per
            micro-batch.
        slowdown: seconds by which one second of overlapped communication slows down computation; 1
            for no gain from overlap.
        overlaps_parameters: whether communicating parameters and gradients overlaps computation.
        accumulation: seconds of `backward` that add gradients to those of earlier micro-batches.
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
    overlaps_parameters: bool = True
    accumulation: float = 0.0

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward pass of one micro-batch, exposed communication included."""
        saved = (1 - self.slowdown) * self.forward_hidden
        return self.forward + self.forward_redistributions - saved + self.exposed_per_micro_batch[0]

    @property
    def backward_seconds(self) -> float:
        """Seconds of the backward pass of one micro-batch, exposed communication included."""
        saved = (1 - self.slowdown) * self.backward_hidden
        return (
            self.backward + self.backward_redistributions - saved + self.exposed_per_micro_batch[1]
        )

    @property
    def computation(self) -> float:
        """Seconds of computation of all micro-batches and of the optimizer step."""
        return self.micro_batches * (self.forward + self.backward) + self.update

    @property
    def exposed_per_micro_batch(self) -> ForwardBackward:
        """Exposed (forward, backward) seconds, in each micro-batch, of communicating parameters and
        gradients."""
        return (
            self._exposed_seconds(self.gathers_per_micro_batch, self.forward - self.forward_hidden),
            self._exposed_seconds(
                self.gradients_per_micro_batch, self.backward - self.backward_hidden
            ),
        )

    @property
    def exposed_per_step(self) -> ForwardBackward:
        """Exposed (forward, backward) seconds, once per step, of communicating parameters and
        gradients."""
        # Gathers overlap the forward pass of the first micro-batch, and reductions the backward
        # pass of the last.
        forward = max(0.0, self.forward - self.forward_hidden - self.gathers_per_micro_batch)
        backward = max(0.0, self.backward - self.backward_hidden - self.gradients_per_micro_batch)
        return (
            self._exposed_seconds(self.gathers, forward),
            self._exposed_seconds(self.gradients, backward),
        )

    @property
    def exposed(self) -> float:
        """Exposed seconds of gathering parameters and reducing gradients once per step."""
        return sum(self.exposed_per_step)

    def _exposed_seconds(self, communication: float, computation: float) -> float:
        """Return the seconds by which `communication` lengthens `computation`: its exposed seconds,
        plus the slowdown by overlapped seconds."""
        if not self.overlaps_parameters:
            return communication
        # max(0, G − B) + s · min(G, B) for G seconds beside B of computation and slowdown s.
        return communication - (1 - self.slowdown) * min(communication, computation)

    @property
    def communication(self) -> float:
        """Exposed seconds of communication in a training step of all micro-batches."""
        each = self.forward_seconds + self.backward_seconds - self.forward - self.backward
        # At least 0: sums of equal terms in two orders differ by rounding errors.
        return max(0.0, self.micro_batches * each + self.exposed)

    @property
    def seconds(self) -> float:
        """Predicted seconds of the training step."""
        # The optimizer and exposed reductions run after all micro-batches.
        busy = self.micro_batches * (self.forward_seconds + self.backward_seconds)
        # `bubble` is idle time over the whole step: step = busy / (1 − bubble).
        return busy / (1 - self.bubble) + self.exposed + self.update


def operator_seconds(graph: Graph, model: TimeModel, cuts: Mapping[str, Cuts]) -> list[float]:
    """Return the seconds of computation of each operator on one device, forward plus backward."""
    return [sum(model.operator_seconds(op, cuts.get(op.name, {}))) for op in graph.ops]


def step_time(
    graph: Graph,
    communication: Communication,
    cuts: Mapping[str, Cuts],
    model: TimeModel,
    *,
    micro_batches: int = 1,
    bubble: float = 0.0,
    overlaps: Mapping[Transfer, Overlap] | None = None,
    orthogonalized: Collection[str] = (),
    repeats_segments: bool = False,
) -> StepTime:
    """Return the predicted seconds of one training step of a partitioned graph.

    Args:
        graph: graph of one micro-batch.
        communication: communication of the plan.
        cuts: mesh axes that shard each factor of each operator of `graph`, by operator name.
        micro_batches: number of micro-batches per step.
        bubble: fraction of the step for which a pipeline stage is idle.
        overlaps: computation that overlaps each redistribution; by default none.
        orthogonalized: names of the parameters whose updates Muon orthogonalizes.
        repeats_segments: whether recomputed segments run to their end, instead of to the last
            tensor that autograd needs.
    """
    forward, backward = _sum_seconds(
        model.operator_seconds(op, cuts.get(op.name, {})) for op in graph.ops
    )
    # `torch.utils.checkpoint` stops at the last tensor that autograd needs (early stop).
    repeated = communication.recomputed_ops if repeats_segments else communication.repeated_ops
    recomputed = [op for op in graph.ops if op.name in repeated]
    backward += sum(model.recompute_seconds(op, cuts.get(op.name, {})) for op in recomputed)
    forward_part, backward_part = _sum_seconds(
        seconds for *_, seconds in activation_seconds(graph, communication, cuts, model)
    )
    hidden = (
        _sum_seconds(hidden_seconds(graph, communication, cuts, model, overlaps).values())
        if overlaps
        else (0.0, 0.0)
    )
    buckets: dict[tuple[bool, int], float] = defaultdict(float)
    for _, _, once_per_step, direction, seconds in bucket_seconds(communication, model):
        buckets[once_per_step, direction] += seconds
    trained = [value for value in graph.parameters if value.requires_grad]
    stored = sum(_stored_shard_bytes(communication, value) for value in trained)
    # The first micro-batch adds its gradients to nothing.
    added = (1 - 1 / micro_batches) * (stored + _unsharded_gradient_bytes(communication))
    accumulation = model.accumulation_seconds(added)
    return StepTime(
        forward=forward,
        backward=backward + accumulation,
        forward_redistributions=forward_part,
        backward_redistributions=backward_part,
        gathers=buckets[True, 0],
        gradients=buckets[True, 1],
        update=model.update_seconds(stored, len(trained))
        + orthogonalization_seconds(graph, communication, orthogonalized, model),
        gathers_per_micro_batch=buckets[False, 0],
        gradients_per_micro_batch=buckets[False, 1],
        micro_batches=micro_batches,
        bubble=bubble,
        forward_hidden=hidden[0],
        backward_hidden=hidden[1],
        slowdown=model.slowdown,
        overlaps_parameters=model.device.overlaps_parameters,
        accumulation=accumulation,
    )


def hidden_seconds(
    graph: Graph,
    communication: Communication,
    cuts: Mapping[str, Cuts],
    model: TimeModel,
    overlaps: Mapping[Transfer, Overlap],
) -> dict[Transfer, ForwardBackward]:
    """Return the (forward, backward) seconds of each redistribution that overlap computation.

    An operator hides at most its own seconds, even if it overlaps several redistributions.
    """
    delayed = {op for overlap in overlaps.values() for op in overlap.delayed_linears}
    spare_seconds: dict[tuple[str, str], float] = {}

    def hide(seconds: float, pass_part: str, ops: Sequence[Op]) -> float:
        remaining = seconds
        for op in ops:
            if (op.name, pass_part) not in spare_seconds:
                forward, backward = model.operator_seconds(op, cuts.get(op.name, {}))
                # A delayed weight gradient is half of a linear layer's backward pass.
                half = backward / 2 if op in delayed else backward
                spare_seconds[op.name, pass_part] = {
                    "forward": forward,
                    # 0 for other operators, whose full backward pass is in `half`.
                    "weight": backward - half,
                }.get(pass_part, half)
            hidden_by_op = min(remaining, spare_seconds[op.name, pass_part])
            spare_seconds[op.name, pass_part] -= hidden_by_op
            remaining -= hidden_by_op
        return seconds - remaining

    hidden = {}
    routed = _steps_of_routed_tokens(graph, communication, cuts, model)
    for transfer, overlap in overlaps.items():
        sent, returned = _transfer_seconds(transfer, routed, model)
        # Of a collective that is pipelined with a product the first or the last part stays exposed.
        sent, returned = overlap.fraction * sent, overlap.fraction * returned
        forward_part = hide(sent, "forward", overlap.overlapping_ops)
        backward_part = hide(returned, "weight", overlap.delayed_linears)
        # Weight gradients first, since linear layers delay them to hide this transfer.
        backward_part += hide(returned - backward_part, "backward", overlap.overlapping_ops)
        # The backward pass of a recomputed segment repeats the transfer beside the same operators.
        hidden[transfer] = (
            forward_part,
            backward_part + (forward_part if transfer.is_repeated else 0.0),
        )
    return hidden


def activation_seconds(
    graph: Graph, communication: Communication, cuts: Mapping[str, Cuts], model: TimeModel
) -> Iterator[tuple[Transfer | None, Axes, ForwardBackward]]:
    """Yield the predicted seconds per micro-batch of each redistribution of an activation and of
    each collective inside an operator.

    Yields:
        The transfer (None inside an operator), its axes, and its (forward, backward) seconds.
    """
    for name, op_reductions in communication.reductions.items():
        differentiable = any(value.requires_grad for value in graph.by_name[name].outputs)
        computation = model.operator_seconds(graph.by_name[name], cuts.get(name, {}))
        for inner_reduction in op_reductions:
            forward_part, backward_part = model.inner_collective_seconds(
                inner_reduction.reduction, inner_reduction.axes, differentiable, computation
            )
            repeated = forward_part if name in communication.recomputed_ops else 0.0
            yield None, tuple(inner_reduction.axes), (forward_part, backward_part + repeated)
    bucketed = {
        id(t) for b in communication.buckets for member in b.members for t in member.transfers
    }
    routed = _steps_of_routed_tokens(graph, communication, cuts, model)
    for transfer in communication.transfers:
        if id(transfer) not in bucketed:
            forward_part, backward_part = _transfer_seconds(transfer, routed, model)
            repeated = forward_part if transfer.is_repeated else 0.0
            yield transfer, transfer.step.axes, (forward_part, backward_part + repeated)


def _steps_of_routed_tokens(
    graph: Graph, communication: Communication, cuts: Mapping[str, Cuts], model: TimeModel
) -> Mapping[Transfer, RoutedStep]:
    """Return what each redistribution to or from a mixture of experts sends of its tensor; {} on
    devices that send every token to all experts."""
    device = model.device
    if not device.sends_routed_tokens:
        return {}
    return routed_steps(graph, communication, cuts, device.sends_tokens_once)


def _transfer_seconds(
    transfer: Transfer, routed: Mapping[Transfer, RoutedStep], model: TimeModel
) -> ForwardBackward:
    """Return the (forward, backward) seconds of one redistribution in one micro-batch.

    Args:
        routed: redistributions that send only routed tokens.
    """
    forward, backward = model.step_seconds(transfer.step, transfer.value, transfer.trained)
    step = routed.get(transfer)
    if step is None:
        return forward, backward
    if step.copies is None:
        return step.fraction * forward, step.fraction * backward
    # The gradients of tokens return the way that the tokens came.
    seconds = model.dispatch_seconds(transfer.step, transfer.value, step.copies)
    return (seconds if forward else 0.0, seconds if backward else 0.0)


def bucket_seconds(
    communication: Communication, model: TimeModel
) -> Iterator[tuple[Bucket, str, bool, int, float]]:
    """Yield the predicted seconds of each all-gather and each gradient reduction of a parameter
    bucket.

    Yields:
        (bucket, data, once_per_step, direction, seconds). `data` is "parameters" or "gradients".
        `once_per_step` is false for a collective that each micro-batch runs. `direction` is 0 for
        the forward pass and 1 for the backward pass.
    """
    for bucket in communication.buckets:
        gather, reduce = _collective_seconds_of_bucket(bucket, model)
        # ZeRO-3 frees gathered parameters after each pass, lower levels keep them for the step.
        yield bucket, "parameters", bucket.level != "level3", 0, gather
        yield bucket, "gradients", bucket.reduces_once, 1, reduce
        if bucket.regathers:
            gathers = 2 if model.device.gathers_to_recompute and bucket.segment else 1
            yield bucket, "parameters", False, 1, gathers * gather


def _sum_seconds(pairs: Iterable[ForwardBackward]) -> ForwardBackward:
    forward = backward = 0.0
    for forward_part, backward_part in pairs:
        forward, backward = forward + forward_part, backward + backward_part
    return forward, backward


def _collective_seconds_of_bucket(bucket: Bucket, model: TimeModel) -> ForwardBackward:
    """Return the (all-gather, gradient reduction) seconds of one parameter bucket; 0 for a
    collective that the bucket does not run."""
    # Each gather multiplies the size of the local tensor.
    gather = reduce = 0.0
    copy_seconds = model.host_seconds(MEMBER_OPERATORS * len(bucket.members))
    local = bucket.numel * bucket.members[0].value.itemsize
    for step in bucket.steps:
        if step.operation == "all_gather":
            local *= step.group_size
            gather += model.links.seconds("all_gather", step.axes, local)
            gather += step.group_size * model.device.part_overhead
        # `vary` comes first in a route, so the all-reduce of HSDP has the size of a shard.
        if step.backward is not None and bucket.trained:
            reduced = local * model.device.reduction_traffic
            reduce += model.links.seconds(step.backward, step.axes, reduced)
            # An all-reduce writes the tensor that it reads.
            if step.backward == "reduce_scatter":
                reduce += step.group_size * model.device.part_overhead
    # No copies for a bucket that is not gathered, or not reduced.
    return gather and gather + copy_seconds, reduce and reduce + copy_seconds


def _unsharded_gradient_bytes(communication: Communication) -> int:
    """Return the bytes of gradients beyond the stored shards of parameters, if micro-batches
    accumulate them unsharded."""
    num_bytes = 0
    for bucket in communication.buckets:
        if bucket.reduces_once and bucket.trained:
            shards = prod(s.group_size for s in bucket.steps if s.operation == "all_gather")
            values = (member.value for member in bucket.members)
            num_bytes += (shards - 1) * sum(_stored_shard_bytes(communication, v) for v in values)
    return num_bytes


def _stored_shard_bytes(communication: Communication, value: Value) -> int:
    return (
        prod(communication.initial_layouts[value].shard_shape(value.shape))
        * value.stored_dtype.itemsize
    )
