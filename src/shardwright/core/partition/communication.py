"""All communication of a plan: the redistribution steps of each value from producer to consumers.

Search and cost count the bytes of these steps, and lowering emits them. As both read the same list,
predicted bytes equal the bytes sent.

Consumers of a value share steps: the projections of `q`, `k` and `v` read the result of one
replicated → varying step, whose gradient is one all-reduce. Steps of parameters from storage to use
are coalesced into buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout, interned_layout
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.partition.decisions import Decisions, Recompute, Storage
from shardwright.core.partition.join_transfers import join_transfers
from shardwright.core.partition.parameter_buckets import Bucket, buckets
from shardwright.core.partition.recompute_segments import (
    OperatorTransfers,
    Segment,
    assign_recomputed_transfers,
    recompute_segments,
)
from shardwright.core.partition.transfer import Transfer
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts, Reduction, ShardingRule, no_reductions


@dataclass(frozen=True)
class InnerReduction:
    """A collective inside the kernel of an operator.

    Args:
        reduction: collective that the rule of the operator declares.
        axes: axes of the device matrix over which the collective communicates.
    """

    reduction: Reduction
    axes: tuple[int, ...]

    def bytes(self, mesh: DeviceMatrix, differentiable: bool) -> tuple[int, int]:
        """Return the bytes that one device sends in the collective, (forward, backward).

        Args:
            differentiable: whether the operator has a backward pass.
        """
        reduction, group_size = self.reduction, mesh.size(self.axes)
        num_bytes = prod(reduction.shape) * reduction.dtype.itemsize
        sent_bytes = COLLECTIVES[reduction.collective].sent_volume(num_bytes, group_size)
        forward, backward = reduction.num_collectives(group_size, differentiable)
        return forward * sent_bytes, backward * sent_bytes


@dataclass
class Communication:
    """All communication of a program.

    Args:
        mesh: device matrix of the program.
        initial_layouts: layout in which each value is computed, a parameter is stored, or an input
            is passed in.
        leading_transfers: transfers of each pinned output to its pinned layout, with which all
            routes to consumers begin.
        input_layouts: layouts in which each operator reads its inputs, by operator name.
        routes: transfers to each input of an operator, by (operator name, input index).
        output_routes: transfers of each graph output to the layout in which it is returned.
        update_routes: transfers of the new value of each updated parameter or buffer to the layout
            of the old value.
        reductions: collectives inside kernels, by operator name.
        segments: groups of operators that are recomputed together in the backward pass.
        buckets: groups of parameters whose first transfers are coalesced.
        transfers: all transfers, including the transfers of buckets.
        forward_bytes, backward_bytes: bytes that one device sends in one run of the program.
    """

    mesh: DeviceMatrix
    initial_layouts: dict[Value, TensorLayout] = field(default_factory=dict)
    leading_transfers: dict[Value, tuple[Transfer, ...]] = field(default_factory=dict)
    input_layouts: dict[str, tuple[TensorLayout, ...]] = field(default_factory=dict)
    routes: dict[tuple[str, int], tuple[Transfer, ...]] = field(default_factory=dict)
    output_routes: dict[Value, tuple[Transfer, ...]] = field(default_factory=dict)
    update_routes: dict[Value, tuple[Transfer, ...]] = field(default_factory=dict)
    reductions: dict[str, tuple[InnerReduction, ...]] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    transfers: list[Transfer] = field(default_factory=list)
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in a training step of one micro-batch."""
        return self.forward_bytes + self.backward_bytes

    def step_bytes(self, micro_batches: int) -> tuple[int, int]:
        """Return the bytes that one device sends per training step, (forward, backward).

        Activations are redistributed for each micro-batch; parameters are gathered, and their
        gradients reduced, as often as the ZeRO level requires.
        """
        # As if parameters were gathered and reduced for each micro-batch too; the loop corrects
        # them.
        forward, backward = self.forward_bytes * micro_batches, self.backward_bytes * micro_batches
        for bucket in self.buckets:
            # Replaces the bytes of buckets, which `forward_bytes` counts for each micro-batch.
            per_run, per_step = bucket.step_bytes(1), bucket.step_bytes(micro_batches)
            forward += per_step[0] - micro_batches * per_run[0]
            backward += per_step[1] - micro_batches * per_run[1]
        return forward, backward

    @cached_property
    def segment_of(self) -> dict[str, Segment]:
        """Segment of each recomputed operator, by operator name."""
        return {name: segment for segment in self.segments for name in segment.ops}

    @cached_property
    def recomputed_ops(self) -> frozenset[str]:
        """Names of the operators that the backward pass from `Graph.trained` recomputes."""
        return frozenset(name for name, segment in self.segment_of.items() if segment.trained)

    @cached_property
    def repeated_ops(self) -> frozenset[str]:
        """Names of the recomputed operators whose kernels run again.

        Other operators of a segment do not, as recomputation stops once all saved tensors exist.
        """
        return frozenset(
            name for segment in self.segments if segment.trained for name in segment.repeated_ops
        )

    def layout(self, value: Value) -> TensorLayout:
        """Return the layout from which all consumers of `value` redistribute it: its pinned layout,
        or the layout in which it is computed."""
        route = self.leading_transfers.get(value)
        return route[-1].step.target if route else self.initial_layouts[value]

    def returned_layout(self, value: Value) -> TensorLayout:
        """Return the layout in which the program returns `value`, one of its outputs."""
        route = self.output_routes[value]
        return route[-1].step.target if route else self.layout(value)


def communication(graph: Graph, mesh: DeviceMatrix, decisions: Decisions) -> Communication:
    """Return all communication of a program between the layouts that `decisions` imply.

    Inputs are replicated unless `decisions.arrivals` contains them. Outputs in
    `decisions.departures` or `decisions.local_outputs` are returned in that layout. Of the others,
    the loss, numbers and all outputs of a model without a loss are returned replicated, the rest as
    computed. Gradients may flow into every output, but bytes count only the gradients of
    `graph.trained`.
    """
    result = Communication(mesh)
    # Layouts of activations follow from the operators that compute them.
    for value in (*graph.input_values, *graph.buffers, *graph.constants, *graph.parameters):
        result.initial_layouts[value] = initial_layout(value, mesh, decisions)
    shared: dict[tuple[Value, tuple[RedistributionStep, ...]], Transfer] = {}
    # Values that the caller or the update of a buffer reads, even if no operator does.
    returned = {*graph.output_values, *(value for _, value in graph.updates)}
    for op in graph.ops:
        _add_operator_transfers(result, op, decisions.cuts.get(op.name, {}), shared)
        # Pinned outputs before their consumers, so that the routes of consumers begin at the pinned
        # layout.
        for value, axes in zip(op.outputs, decisions.outputs.get(op.name, ()), strict=False):
            # Nothing needs the pinned layout of an output that nothing reads.
            is_read = graph.consumers[value] or value in returned
            if axes is not None and is_read:
                target = TensorLayout(mesh, axes)
                route = _add_transfers(result, value, target, shared, True, True)
                result.leading_transfers[value] = route
    for value in graph.output_values:
        departure = decisions.departures.get(value.name)
        target = result.layout(value)
        returned_axes = departure or decisions.local_outputs.get(value.name)
        if returned_axes:
            target = TensorLayout(mesh, returned_axes)
        # Without a loss all outputs are returned in full; a number has no dimension to shard.
        elif graph.loss is None or not value.shape:
            target = mesh.replicated(len(value.shape))
        # A value with a departure is read by a later chunk, which sends its gradient back.
        trained = departure is not None or value in graph.trained
        result.output_routes[value] = _add_transfers(result, value, target, shared, True, trained)
    for old_value, value in graph.updates:
        # The new value is copied into the tensor of the old value, so it needs the same layout.
        target = result.initial_layouts[old_value]
        result.update_routes[old_value] = _add_transfers(
            result, value, target, shared, False, False
        )
    # Only once all routes are known, since another reader of the layout in between prevents
    # joining.
    result.transfers = join_transfers(
        result.transfers,
        (result.routes, result.output_routes, result.update_routes),
        result.leading_transfers,
    )
    transfers = OperatorTransfers(graph, result.routes, result.reductions)
    result.segments = recompute_segments(graph, decisions.recompute, transfers)
    assign_recomputed_transfers(result.segments, transfers, decisions)
    # The caller or an update may read a parameter too, which is then gathered outside of segments.
    returned_routes = [*result.output_routes.items()]
    returned_routes += [(value, result.update_routes[old]) for old, value in graph.updates]
    # Segments may have been divided, and a bucket belongs to one of the resulting segments.
    recomputed = {name: Recompute(s.name) for name, s in result.segment_of.items()}
    divided_decisions = replace(decisions, recompute=recomputed)
    result.buckets = buckets(
        graph, mesh, divided_decisions, result.routes, result.initial_layouts, returned_routes
    )
    _set_communication_bytes(result, graph)
    return result


def initial_layout(value: Value, mesh: DeviceMatrix, decisions: Decisions) -> TensorLayout:
    """Return the storage layout of a parameter, or the layout in which an input, buffer or constant
    is passed in."""
    axes = decisions.storage if value.origin is Origin.PARAMETER else decisions.arrivals
    return interned_layout(mesh, tuple(axes.get(value.name, ((),) * len(value.shape))))


def default_storage(graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts]) -> Storage:
    """Return the default storage of each parameter: the layout of its first use that shards it, or
    replicated if no use does."""
    return {
        value.name: _axes_of_sharded_use(graph, mesh, cuts, value) for value in graph.parameters
    }


def _axes_of_sharded_use(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts], value: Value
) -> tuple[tuple[int, ...], ...]:
    """Return the axes that shard each dimension of a parameter in its first use with a sharded
    layout."""
    # In graph order: the first operator to read the parameter needs it soonest.
    for op, index in graph.consumers[value]:
        rule = rule_of(op)
        if rule is not None:
            layout = rule.layouts(mesh, cuts.get(op.name, {}))[0][index]
            if layout.sharded:
                return layout.axes
    return ((),) * len(value.shape)


def _add_operator_transfers(
    result: Communication,
    op: Op,
    cuts: Cuts,
    shared: dict[tuple[Value, tuple[RedistributionStep, ...]], Transfer],
) -> None:
    mesh, rule = result.mesh, rule_of(op)
    if rule is None:
        # Without a rule nothing is known about the dimensions, so every device computes the full
        # operator.
        inputs = tuple(mesh.replicated(len(value.shape)) for value in op.inputs)
        outputs = tuple(mesh.replicated(len(value.shape)) for value in op.outputs)
    else:
        inputs, outputs = rule.layouts(mesh, cuts)
        if rule.reductions is not no_reductions and (
            inner := tuple(_iterate_kernel_reductions(rule, op, mesh, cuts))
        ):
            result.reductions[op.name] = inner
    result.input_layouts[op.name] = inputs
    for value, layout in zip(op.outputs, outputs, strict=True):
        result.initial_layouts[value] = layout
    # Two marks: the program needs every gradient that may flow, but bytes count those of the loss.
    differentiable = any(value.differentiable for value in op.outputs)
    trained = any(value.requires_grad for value in op.outputs)
    for index, (value, layout) in enumerate(zip(op.inputs, inputs, strict=True)):
        route = _add_transfers(result, value, layout, shared, differentiable, trained)
        result.routes[op.name, index] = route


def _iterate_kernel_reductions(
    rule: ShardingRule, op: Op, mesh: DeviceMatrix, cuts: Cuts
) -> Iterator[InnerReduction]:
    for reduction in rule.reductions(op, rule.shard_counts(mesh, cuts)):
        # Sorted unless the order of ranks matters, so that operators share process groups.
        axes = tuple(a for f in reduction.factors for a in cuts.get(f, ()))
        yield InnerReduction(reduction, axes if reduction.ordered else tuple(sorted(axes)))


def _add_transfers(
    result: Communication,
    value: Value,
    target: TensorLayout,
    shared: dict[tuple[Value, tuple[RedistributionStep, ...]], Transfer],
    differentiable: bool,
    trained: bool,
) -> tuple[Transfer, ...]:
    """Return the transfers that redistribute `value` to the layout `target`; existing transfers
    are reused.

    Args:
        result: communication of the program, to which new transfers are added.
        shared: existing transfers, by (value, steps from its initial layout); extended in place.
        differentiable: whether a gradient may flow back from this consumer.
        trained: whether the backward pass from `Graph.trained` sends a gradient back from this
            consumer.
    """
    # A gradient needs both ends: a consumer that sends it and a value that takes it.
    differentiable = differentiable and value.differentiable
    trained = trained and value.requires_grad
    leading, source = result.leading_transfers.get(value, ()), result.layout(value)
    # A fast path for equal layouts, which are interned: there are no redistribution steps.
    if source is target and not target.varying:
        target.shard_shape(value.shape)  # Raises if the layout does not divide the shape.
        return leading
    path = redistribution_steps(source, target, value.shape, differentiable)
    route = list(leading)
    # Routes of one value share their common first steps: `q`, `k` and `v` need one all-reduce.
    for length, step in enumerate(path, start=1):
        key = (value, path[:length])
        # The key has all steps so far: equal steps from different layouts are different transfers.
        if key not in shared:
            previous = route[-1] if route else None
            shared[key] = Transfer(value, step, previous, trained)
            result.transfers.append(shared[key])
        # Transfers are shared, so a gradient flows if any of the consumers sends one back.
        shared[key].trained |= trained
        route.append(shared[key])
    return tuple(route)


def _set_communication_bytes(result: Communication, graph: Graph) -> None:
    # The transfers of a bucket are one collective, whose bytes are rounded once.
    bucketed = {id(t) for bucket in result.buckets for m in bucket.members for t in m.transfers}
    for transfer in result.transfers:
        if id(transfer) not in bucketed:
            result.forward_bytes += transfer.forward_bytes
            result.backward_bytes += transfer.backward_bytes
    for bucket in result.buckets:
        forward, backward = bucket.step_bytes(1)
        result.forward_bytes += forward
        result.backward_bytes += backward
    for name, inner in result.reductions.items():
        # Not `Value.differentiable`: bytes count only the gradients of `trained` outputs.
        differentiable = any(value.requires_grad for value in graph.by_name[name].outputs)
        for reduction in inner:
            forward, backward = reduction.bytes(result.mesh, differentiable)
            # A recomputed operator runs its forward collectives again in the backward pass.
            repeated_bytes = forward if name in result.recomputed_ops else 0
            result.forward_bytes += forward
            result.backward_bytes += backward + repeated_bytes
