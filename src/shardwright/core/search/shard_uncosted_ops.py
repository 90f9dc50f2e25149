"""Shard operators without a cost model like their neighbors where communication does not grow.

The symbolic search decides main operators by cost; each other operator follows one neighbor. A norm
between a replicated residual stream and a product cut along the batch is then replicated like the
stream. If the stream is sliced before the norm instead, each device computes only its shard, as in
Megatron's sequence parallelism.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import sub

from shardwright.core.cost.symbolic import REDISTRIBUTION_PER_ELEMENT
from shardwright.core.graph.graph import Op, Origin
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.rules.rule import Cuts, ShardingRule
from shardwright.core.search.decided_layouts import (
    DecidedLayouts,
    kernel_collectives,
    tensor_context,
    without_partial,
)
from shardwright.core.search.nearby_cuts import (
    FactorOfAxis,
    NearbyCuts,
    SharedTensor,
    factor_of_axis,
    unjoined_limits,
)
from shardwright.core.search.request import CutsOfGraph, SearchRequest

BYTES_PER_MESSAGE = 2**20
"""Cost of an additional message in bytes: about the bytes that a link sends within the latency of a
message (0.4 MB for 0.8 μs at 450 GB/s, 0.9 MB for 3 μs at 300 GB/s)."""


def with_uncosted_ops_sharded(request: SearchRequest, cuts: CutsOfGraph) -> list[CutsOfGraph]:
    """Return the result of `shard_uncosted_ops` and, if different, `cuts`.

    The predictor of full plans, which counts communication more precisely, picks one.
    """
    sharded = shard_uncosted_ops(request, cuts)
    return [sharded] if sharded == cuts else [sharded, cuts]


def shard_uncosted_ops(request: SearchRequest, cuts: Mapping[str, Cuts]) -> CutsOfGraph:
    """Return `cuts` with operators that have no cost model cut over further axes like a neighbor.

    Operators are first tried one by one, forward and backward. Then, for each axis, connected
    operators that are replicated over the axis are tried together, since the output of a single
    operator in a chain would be gathered right after the operator. Pinned operators keep their
    cuts.
    """
    ops, uncosted = request.graph.ops, _UncostedOps(request, cuts)
    free_ops = [op for op in ops if op.name not in request.pinned and uncosted.is_uncosted(op)]
    # Forward, then backward: an operator may follow its consumer only once the consumer is cut.
    for op in (*free_ops, *reversed(free_ops)):
        uncosted.shard_further(op)
    unchanged_columns = set()
    for axis in uncosted.axes:
        # If no cuts changed on an axis, none will on another axis that cuts all operators equally.
        factors_on_axis = tuple(cut.get(axis) for cut in uncosted.factors_by_axis.values())
        regions = () if factors_on_axis in unchanged_columns else uncosted.regions(free_ops, axis)
        # A list, not a generator: every region is tried, also after the first that changes.
        sharded_any = [uncosted.shard_region(region, axis) for region in regions]
        if not any(sharded_any):
            unchanged_columns.add(factors_on_axis)
    return {op.name: uncosted.cuts[op.name] for op in ops if uncosted.cuts[op.name]}


class _UncostedOps(DecidedLayouts):
    """Cuts and layouts of all operators, in which operators without a cost model are changed.

    Attributes:
        factors_by_axis: the factor that each axis cuts, for each operator, by name.
        neighbor_names: names of the operators that share a tensor with each operator, by name.
        axes: mesh axes with more than one device.
        existing_gradient_axes: groups of axes over which gradients are reduced with the given cuts.
    """

    def __init__(self, request: SearchRequest, cuts: Mapping[str, Cuts]) -> None:
        super().__init__(request)
        self.factors_by_axis: dict[str, FactorOfAxis] = {}
        self.neighbor_names = {
            op.name: tuple(dict.fromkeys(self._neighbor_names(op))) for op in self.graph.ops
        }
        for op in self.graph.ops:
            self.decide(op, cuts.get(op.name, {}))
        self.axes = tuple(axis for axis, size in enumerate(self.mesh.device_matrix) if size > 1)
        # The empty group is that of gradients which need no reduction.
        self.existing_gradient_axes = {
            frozenset(),
            *self._axes_of_gradient_reductions(self.graph.ops),
        }

    def _neighbor_names(self, op: Op) -> Iterator[str]:
        """Yield names of the producers and consumers of `op`, and of other consumers of its
        inputs."""
        for value in op.inputs:
            # Without a gradient, as of a mask, consumers in all layers would be neighbors.
            if value.requires_grad and value.origin is not Origin.PARAMETER:
                yield from (
                    consumer.name
                    for consumer, _ in self.graph.consumers[value]
                    if consumer is not op
                )
        yield from (other.name for _, other in self.neighbors(op))

    def decide(self, op: Op, cuts: Cuts) -> None:
        super().decide(op, cuts)
        self.factors_by_axis[op.name] = factor_of_axis(cuts)

    def is_uncosted(self, op: Op) -> bool:
        """Whether `op` may be cut, but has no cost model by which the symbolic search decides
        it."""
        rule = self.rules[op.name]
        return rule is not None and rule.main is None and bool(rule.factors)

    def shard_further(self, op: Op) -> None:
        """Cut `op` over further axes like the first neighbor for which communication does not
        grow."""
        for more_cuts in self._extend_cuts_to_neighbor_layouts(op, self.axes):
            if self._change_cuts_if_cheaper([op], partial(self.decide, op, more_cuts)):
                return

    def regions(self, ops: Sequence[Op], axis: int) -> Iterator[list[Op]]:
        """Yield maximal connected sets of the `ops` that are replicated over `axis`.

        Sets without a neighbor that is cut over `axis` are omitted.
        """
        replicated = {op.name: op for op in ops if axis not in self.factors_by_axis[op.name]}
        while replicated:
            region = [replicated.pop(next(iter(replicated)))]
            has_cut_neighbor = False
            # The loop appends to the list that it traverses: a breadth-first search without a
            # queue.
            for op in region:
                has_cut_neighbor |= any(
                    axis in self.factors_by_axis[name] for name in self.neighbor_names[op.name]
                )
                region += [
                    replicated.pop(name)
                    for name in self.neighbor_names[op.name]
                    if name in replicated
                ]
            if has_cut_neighbor:
                yield region

    def shard_region(self, region: Sequence[Op], axis: int) -> bool:
        """Cut `region` over `axis` from its borders inwards, unless communication grows.

        Returns:
            Whether any cuts changed.
        """

        def spread() -> None:
            members = {op.name: op for op in region}
            # The neighbors of an operator that has been cut may follow it, so they are visited
            # again.
            queue = deque(region)
            while queue:
                op = queue.popleft()
                # The first that fits: whether communication grows is only known for the region as a
                # whole.
                for more_cuts in islice(self._extend_cuts_to_neighbor_layouts(op, (axis,)), 1):
                    self.decide(op, more_cuts)
                    queue.extend(
                        members[name] for name in self.neighbor_names[op.name] if name in members
                    )

        return self._change_cuts_if_cheaper(region, spread)

    def _change_cuts_if_cheaper(self, ops: Sequence[Op], change: Callable[[], None]) -> bool:
        """Call `change`, which replaces the cuts of `ops`, and undo it if communication grows.

        Three conditions must hold to leave the change in place:

        - The communication volume of redistributing activations does not grow, with and without
          `BYTES_PER_MESSAGE` for each message.
        - Gradients are reduced over existing groups of axes, so that they share buckets.
        - The additional bytes of gradients cost at most the saved activation memory.

        Args:
            ops: operators whose cuts `change` may replace.

        Returns:
            Whether any cuts changed.
        """
        previous_cuts = {op: self.cuts[op.name] for op in ops}
        previous_costs = self._communication_costs(ops)
        change()
        messages, sent_bytes, gradient_bytes, activation_bytes = map(
            sub, self._communication_costs(ops), previous_costs
        )
        # Fewer bytes in more messages can take longer: small tensors are bound by latency.
        sends_more = (
            sent_bytes > 0
            or sent_bytes + BYTES_PER_MESSAGE * messages > 0
            or self._axes_of_gradient_reductions(ops) - self.existing_gradient_axes
        )
        if sends_more or gradient_bytes * REDISTRIBUTION_PER_ELEMENT + activation_bytes > 0:
            for op, cuts in previous_cuts.items():
                self.decide(op, cuts)
        return any(self.cuts[op.name] != cuts for op, cuts in previous_cuts.items())

    def _communication_costs(self, ops: Sequence[Op]) -> tuple[int, int, int, int]:
        """Return the communication and the activation memory of `ops` on one device.

        Returns:
            (number of consecutive messages that redistribute activations, communication volume of
            these messages, communication volume of reducing gradients of parameters, bytes of the
            operators' inputs and outputs).
        """
        calls: list[tuple[str, int]] = []
        sent_bytes = gradient_bytes = activation_bytes = 0
        # Each value once, though several of `ops` may share it.
        for value in dict.fromkeys(value for op in ops for value in (*op.inputs, *op.outputs)):
            context = tensor_context(value, ())
            redistributions = self.redistributions(value)
            for step, size in (
                each for layouts in redistributions for each in context.steps(*layouts)
            ):
                collectives = step.forward, step.backward if context.differentiable else None
                calls += [(name, step.group_size) for name in collectives if name is not None]
                sent_bytes += size
        for op in ops:
            if (rule := self.rules[op.name]) is not None:
                for inner, size in kernel_collectives(op, rule, self.mesh, self.cuts[op.name]):
                    calls.append((inner.reduction.collective, self.mesh.size(inner.axes)))
                    sent_bytes += size
            for index, value in enumerate(op.inputs):
                layout = self.consumer_layouts[value][op.name, index]
                context = tensor_context(value, ())
                # From the layout without varying axes to the layout itself: only the gradient is
                # reduced.
                if context.is_parameter:
                    gradient_bytes += context.communication_volume(
                        without_partial(layout), layout, ()
                    )
                else:
                    activation_bytes += context.local_bytes(layout)
            activation_bytes += sum(
                tensor_context(v, ()).local_bytes(self.initial_layouts[v]) for v in op.outputs
            )
        # A collective counts as one message to start it, and log2 of its devices for each round.
        messages = sum(
            1 + COLLECTIVES[name].rounds * (devices - 1).bit_length()
            for name, devices in calls
            # A collective of one device sends no message.
            if devices > 1
        )
        return messages, sent_bytes, gradient_bytes, activation_bytes

    def _axes_of_gradient_reductions(self, ops: Sequence[Op]) -> set[frozenset[int]]:
        """Return the groups of axes over which gradients of the parameters that `ops` read are
        reduced."""
        return {
            self.consumer_layouts[value][op.name, index].varying
            for op in ops
            for index, value in enumerate(op.inputs)
            if value.origin is Origin.PARAMETER and value.requires_grad
        }

    def _extend_cuts_to_neighbor_layouts(self, op: Op, axes: Axes) -> Iterator[Cuts]:
        """Yield the cuts of `op` extended over unused `axes` to match the layout of a shared tensor
        at a neighbor, for each shared tensor."""
        cuts, rule = self.cuts[op.name], self.rules[op.name]
        own_factors, neighbors = self.factors_by_axis[op.name], self.neighbor_names[op.name]
        free_axes = [
            axis
            for axis in axes
            if axis not in own_factors
            and any(axis in self.factors_by_axis[name] for name in neighbors)
        ]
        if rule is None or not free_axes:
            return
        limits = unjoined_limits(rule)
        for tensor in self._tensors_shared_with_neighbors(op, rule):
            nearby = NearbyCuts(self.mesh, limits, (tensor,))
            (factors,) = nearby.matching_neighbors()
            added = {axis: factor for axis, factor in factors.items() if axis in free_axes}
            # The neighbor's order of axes: another order would be another layout, which needs a
            # redistribution.
            order = {f: a for f, a in zip(tensor.dims, tensor.layout.axes, strict=True) if f}
            more_cuts = nearby.divisible({**own_factors, **added}, order) if added else cuts
            # `divisible` drops axes, and the rest may be no more than the operator has already.
            if sum(map(len, more_cuts.values())) > len(own_factors):
                yield more_cuts

    def _tensors_shared_with_neighbors(self, op: Op, rule: ShardingRule) -> Iterator[SharedTensor]:
        """Yield the inputs and outputs of `op`, each in every layout that it has at a neighbor."""
        tensors = (*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs)
        for value, dims in zip(*tensors, strict=True):
            if value.origin is not Origin.PARAMETER:
                initial = () if value in op.outputs else (self.initial_layouts[value],)
                # By id: many consumers share few layout objects.
                targets = {id(layout): layout for layout in self.consumer_layouts[value].values()}
                yield from (SharedTensor(dims, layout) for layout in (*initial, *targets.values()))
