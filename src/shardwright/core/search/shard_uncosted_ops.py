"""Shard operators without a cost model like their neighbors where communication does not grow.

The symbolic search decides main operators by cost; the others follow one neighbor. A norm between a
replicated residual stream and a product cut along the batch is then replicated like the stream. But
the stream can be sliced before the norm just as well, and each device then computes only its shard:
what sequence parallelism does in Megatron.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import sub

from shardwright.core.cost.symbolic import REDISTRIBUTION_PER_ELEMENT
from shardwright.core.graph.graph import Kind, Op
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.rules.rule import Cuts, ShardingRule
from shardwright.core.search.decided_layouts import (
    DecidedLayouts,
    inner_reductions,
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
"""Bytes that one more message counts as: about what a link sends within the latency of a message
(0.4 MB for 0.8 μs at 450 GB/s, 0.9 MB for 3 μs at 300 GB/s)."""


def with_uncosted_ops_sharded(request: SearchRequest, cuts: CutsOfGraph) -> list[CutsOfGraph]:
    """Return the cuts with operators without a cost sharded further and, if different, `cuts`.

    Both are returned because the predictor of whole plans counts communication more precisely.
    """
    sharded = shard_uncosted_ops(request, cuts)
    return [sharded] if sharded == cuts else [sharded, cuts]


def shard_uncosted_ops(request: SearchRequest, cuts: Mapping[str, Cuts]) -> CutsOfGraph:
    """Return `cuts` with operators that have no cost cut over further axes like a neighbor.

    First operator by operator, forward and backward. Then, for each axis, connected operators that
    are replicated over it together: one of a chain alone would be gathered again right behind it.
    Pinned operators keep their cuts.
    """
    ops, uncosted = request.graph.ops, _UncostedOps(request, cuts)
    free = [op for op in ops if op.name not in request.pinned and uncosted.is_uncosted(op)]
    # Forward, then backward: an operator may follow its reader only once that one is cut.
    for op in (*free, *reversed(free)):
        uncosted.shard_further(op)
    exhausted = set()
    for axis in uncosted.axes:
        # If nothing changed on an axis, nothing will on another that cuts all operators equally.
        column = tuple(cut.get(axis) for cut in uncosted.factors_by_axis.values())
        regions = () if column in exhausted else uncosted.regions(free, axis)
        sharded_any = [uncosted.shard_region(region, axis) for region in regions]
        if not any(sharded_any):
            exhausted.add(column)
    return {op.name: uncosted.cuts[op.name] for op in ops if uncosted.cuts[op.name]}


class _UncostedOps(DecidedLayouts):
    """The decisions on all operators, and changes of those without a cost."""

    def __init__(self, request: SearchRequest, cuts: Mapping[str, Cuts]) -> None:
        super().__init__(request.graph, request.mesh, request.outputs)
        for value in self.graph.input_values:
            if value.name in request.arrivals:
                self.sources[value] = TensorLayout(self.mesh, request.arrivals[value.name])
        self.factors_by_axis: dict[str, FactorOfAxis] = {}
        self.neighbor_names = {
            op.name: tuple(dict.fromkeys(self._neighbor_names(op))) for op in self.graph.ops
        }
        for op in self.graph.ops:
            self.decide(op, cuts.get(op.name, {}))
        self.axes = tuple(axis for axis, size in enumerate(self.mesh.device_matrix) if size > 1)
        self.existing_gradient_axes = {frozenset(), *self._gradient_axes(self.graph.ops)}

    def _neighbor_names(self, op: Op) -> Iterator[str]:
        """Names of the producers and consumers of `op`, and of other readers of its inputs."""
        for value in op.inputs:
            if value.requires_grad and value.kind is not Kind.PARAMETER:
                yield from (
                    reader.name for reader, _ in self.graph.consumers[value] if reader is not op
                )
        yield from (other.name for _, other in self.neighbors(op))

    def decide(self, op: Op, cuts: Cuts) -> None:
        super().decide(op, cuts)
        self.factors_by_axis[op.name] = factor_of_axis(cuts)

    def is_uncosted(self, op: Op) -> bool:
        """Whether no search decides `op` by cost, and it has dimensions that may be cut."""
        rule = self.rules[op.name]
        return rule is not None and rule.main is None and bool(rule.factors)

    def shard_further(self, op: Op) -> None:
        """Cut `op` over further axes like the first neighbor for which that costs no more."""
        for more_cuts in self._further_cuts(op, self.axes):
            if self._apply_if_cheaper([op], partial(self.decide, op, more_cuts)):
                return

    def regions(self, ops: Sequence[Op], axis: int) -> Iterator[list[Op]]:
        """Connected operators that are replicated over `axis`, next to one that is cut over it."""
        replicated = {op.name: op for op in ops if axis not in self.factors_by_axis[op.name]}
        while replicated:
            region = [replicated.pop(next(iter(replicated)))]
            borders = False
            for op in region:
                borders |= any(
                    axis in self.factors_by_axis[name] for name in self.neighbor_names[op.name]
                )
                region += [
                    replicated.pop(name)
                    for name in self.neighbor_names[op.name]
                    if name in replicated
                ]
            if borders:
                yield region

    def shard_region(self, region: Sequence[Op], axis: int) -> bool:
        """Cut a region over `axis` from its borders inwards, unless that costs more.

        Returns:
            Whether any cuts changed.
        """

        def spread() -> None:
            members = {op.name: op for op in region}
            # An operator that has been cut enables its neighbors, so these are visited again.
            queue = deque(region)
            while queue:
                op = queue.popleft()
                for more_cuts in islice(self._further_cuts(op, (axis,)), 1):
                    self.decide(op, more_cuts)
                    queue.extend(
                        members[name] for name in self.neighbor_names[op.name] if name in members
                    )

        return self._apply_if_cheaper(region, spread)

    def _apply_if_cheaper(self, ops: Sequence[Op], change: Callable[[], None]) -> bool:
        """Call `change`, and undo it if communication grows.

        Kept only if all hold: activations send no more bytes, also with each message counted as
        `BYTES_PER_MESSAGE`; gradients are reduced over groups that already exist, so that they
        share buckets; and additional gradient bytes cost less than the saved activation bytes.

        Returns:
            Whether any cuts changed.
        """
        before, costs = {op: self.cuts[op.name] for op in ops}, self._communication_costs(ops)
        change()
        messages, sent_bytes, gradient_bytes, activation_bytes = map(
            sub, self._communication_costs(ops), costs
        )
        # Fewer bytes in more messages can take longer: small tensors are bound by latency.
        sends_more = (
            sent_bytes > 0
            or sent_bytes + BYTES_PER_MESSAGE * messages > 0
            or self._gradient_axes(ops) - self.existing_gradient_axes
        )
        if sends_more or gradient_bytes * REDISTRIBUTION_PER_ELEMENT + activation_bytes > 0:
            for op, cuts in before.items():
                self.decide(op, cuts)
        return any(self.cuts[op.name] != cuts for op, cuts in before.items())

    def _communication_costs(self, ops: Sequence[Op]) -> tuple[int, int, int, int]:
        """Costs of these operators on one device.

        Returns:
            Consecutive messages for activations, bytes sent for activations, bytes sent for
            gradients of parameters, and bytes of activations held.
        """
        calls: list[tuple[str, int]] = []
        sent_bytes = gradient_bytes = activation_bytes = 0
        for value in dict.fromkeys(value for op in ops for value in (*op.inputs, *op.outputs)):
            context = tensor_context(value, ())
            for step, size in (each for path in self.paths(value) for each in context.steps(*path)):
                kinds = step.forward, step.backward if context.differentiable else None
                calls += [(kind, step.group_size) for kind in kinds if kind is not None]
                sent_bytes += size
        for op in ops:
            if (rule := self.rules[op.name]) is not None:
                for inner, size in inner_reductions(op, rule, self.mesh, self.cuts[op.name]):
                    calls.append((inner.reduction.collective, self.mesh.size(inner.axes)))
                    sent_bytes += size
            for index, value in enumerate(op.inputs):
                layout = self.reads[value][op.name, index]
                context = tensor_context(value, ())
                if context.is_parameter:
                    gradient_bytes += context.traffic(without_partial(layout), layout, ())
                else:
                    activation_bytes += context.local_bytes(layout)
            activation_bytes += sum(
                tensor_context(v, ()).local_bytes(self.sources[v]) for v in op.outputs
            )
        messages = sum(
            1 + COLLECTIVES[kind].rounds * (devices - 1).bit_length()
            for kind, devices in calls
            if devices > 1
        )
        return messages, sent_bytes, gradient_bytes, activation_bytes

    def _gradient_axes(self, ops: Sequence[Op]) -> set[frozenset[int]]:
        """The groups of axes over which gradients of these operators' parameters are reduced."""
        return {
            self.reads[value][op.name, index].varying
            for op in ops
            for index, value in enumerate(op.inputs)
            if value.kind is Kind.PARAMETER and value.requires_grad
        }

    def _further_cuts(self, op: Op, axes: Axes) -> Iterator[Cuts]:
        """The cuts of `op` extended by those of each neighbor over `axes` that do not cut it."""
        cuts, rule = self.cuts[op.name], self.rules[op.name]
        taken, neighbors = self.factors_by_axis[op.name], self.neighbor_names[op.name]
        free = [
            axis
            for axis in axes
            if axis not in taken and any(axis in self.factors_by_axis[name] for name in neighbors)
        ]
        if rule is None or not free:
            return
        limits = unjoined_limits(rule)
        for tensor in self._shared_tensors(op, rule):
            nearby = NearbyCuts(self.mesh, limits, (tensor,))
            (factors,) = nearby.matching_neighbors()
            taken_over = {axis: factor for axis, factor in factors.items() if axis in free}
            order = {f: a for f, a in zip(tensor.dims, tensor.layout.axes, strict=True) if f}
            more_cuts = nearby.divisible({**taken, **taken_over}, order) if taken_over else cuts
            if sum(map(len, more_cuts.values())) > len(taken):
                yield more_cuts

    def _shared_tensors(self, op: Op, rule: ShardingRule) -> Iterator[SharedTensor]:
        """The tensors of `op` in the layouts of its neighbors."""
        tensors = (*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs)
        for value, dims in zip(*tensors, strict=True):
            if value.kind is not Kind.PARAMETER:
                source = () if value in op.outputs else (self.sources[value],)
                # By id: many readers share few layout objects.
                reads = {id(layout): layout for layout in self.reads[value].values()}
                yield from (SharedTensor(dims, layout) for layout in (*source, *reads.values()))
