"""Layouts of values at operators with decided cuts, and communication volume between layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from shardwright.core.graph.graph import Op, Origin, Value
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.partition.communication import InnerReduction
from shardwright.core.rules import rule_of as rule_of
from shardwright.core.rules.rule import Cuts, Dims, ShardingRule
from shardwright.core.search.indexed_graph import replicated_outputs
from shardwright.core.search.nearby_cuts import layouts_of
from shardwright.core.search.request import CutsOfGraph, SearchRequest

SharedRedistribution = tuple[TensorLayout, TensorLayout, Sequence[TensorLayout]]
"""A redistribution of a value: its source layout, its target layout, and the target layouts of
other redistributions from the same source, whose first steps it may share."""


@dataclass(frozen=True, slots=True)
class TensorContext:
    """A tensor that an undecided operator reads or computes, with its layouts at decided neighbors.

    Args:
        dims: the factor of each dim in the operator's rule.
        differentiable: whether the tensor has a gradient.
        is_parameter: whether the tensor is a parameter, stored in the layout in which it is read.
        initial_layout: the layout in which the tensor is computed or passed in; None if the
            producer is undecided, and for outputs of the operator.
        consumer_layouts: the layouts in which other decided operators read the tensor.
    """

    dims: Dims
    shape: tuple[int, ...]
    itemsize: int
    differentiable: bool
    is_parameter: bool = False
    initial_layout: TensorLayout | None = None
    consumer_layouts: tuple[TensorLayout, ...] = ()

    @property
    def neighbor_layouts(self) -> tuple[TensorLayout, ...]:
        if self.initial_layout is None:
            return self.consumer_layouts
        return (self.initial_layout, *self.consumer_layouts)

    def redistribution_bytes(
        self, source: TensorLayout, target: TensorLayout, other_targets: Sequence[TensorLayout]
    ) -> int:
        """Return the bytes that a device sends to redistribute the tensor, without reductions.

        Forward plus backward. Reductions of partial sums and of their gradients do not count, since
        they follow from the cuts of a single operator. Steps that redistributions to
        `other_targets` share do not count either.
        """
        return self.communication_volume(
            without_partial(source),
            without_partial(target),
            [without_partial(layout) for layout in other_targets],
        )

    def communication_volume(
        self, source: TensorLayout, target: TensorLayout, other_targets: Sequence[TensorLayout]
    ) -> int:
        """Return the bytes that a device sends to redistribute the tensor, reductions included.

        Forward plus backward, without steps that redistributions to `other_targets` share.
        """
        return sum(size for _, size in self.steps(source, target, other_targets))

    def steps(
        self, source: TensorLayout, target: TensorLayout, other_targets: Sequence[TensorLayout]
    ) -> list[tuple[RedistributionStep, int]]:
        """Return the steps from `source` to `target`, each with its volume in bytes per device.

        Bytes are the sum of forward and backward. The leading steps that a redistribution to one of
        `other_targets` also runs are omitted.
        """
        path, sizes = self._redistribution_steps_with_volume(source, target)
        if not path:
            return []
        # A program runs leading steps that several redistributions of a value share only once.
        num_shared = max(
            (
                _num_common_leading_steps(
                    path, self._redistribution_steps_with_volume(source, o)[0]
                )
                for o in other_targets
            ),
            default=0,
        )
        return list(zip(path, sizes, strict=True))[num_shared:]

    def _redistribution_steps_with_volume(
        self, source: TensorLayout, target: TensorLayout
    ) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
        # Cached by layouts, not by tensor: repeated layers have the same few redistributions.
        return _redistribution_steps_with_volume(
            source, target, self.shape, self.itemsize, self.differentiable
        )

    def local_bytes(self, layout: TensorLayout) -> int:
        return prod(self.shape) * self.itemsize // prod(layout.shard_counts)


@lru_cache(maxsize=1 << 14)
def without_partial(layout: TensorLayout) -> TensorLayout:
    """Return `layout` with its partial and varying axes replicated."""
    return replace(layout, partial=frozenset(), varying=frozenset())


@lru_cache(maxsize=1 << 16)
def _redistribution_steps_with_volume(
    source: TensorLayout,
    target: TensorLayout,
    shape: tuple[int, ...],
    itemsize: int,
    differentiable: bool,
) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
    """Return the steps of a redistribution, each with its communication volume in bytes per device,
    forward plus backward."""
    path = redistribution_steps(source, target, shape, differentiable)
    return path, tuple(
        step.forward_bytes(shape, itemsize)
        + (step.backward_bytes(shape, itemsize) if differentiable else 0)
        for step in path
    )


def _num_common_leading_steps(
    first: Sequence[RedistributionStep], second: Sequence[RedistributionStep]
) -> int:
    length = 0
    # Not strict: either path may be longer.
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


def tensor_context(
    value: Value,
    dims: Dims,
    initial_layout: TensorLayout | None = None,
    consumer_layouts: tuple[TensorLayout, ...] = (),
) -> TensorContext:
    """Return the `TensorContext` of `value`, an input or output of an operator.

    Args:
        dims: the factor of each dim of `value` in the operator's rule.
        initial_layout, consumer_layouts: layout in which the value is computed or passed in, None
            if undecided; and layouts in which other decided operators read it.
    """
    return TensorContext(
        dims,
        value.shape,
        value.itemsize,
        value.requires_grad,
        value.origin is Origin.PARAMETER,
        initial_layout,
        consumer_layouts,
    )


class DecidedLayouts:
    """The cuts of the operators decided so far, and the layouts that follow from these cuts.

    Attributes:
        cuts: the cuts of each decided operator, by name.
        initial_layouts: the layout in which each value is computed or passed in.
        consumer_layouts: for each value the layouts in which decided operators read the value, by
            (operator name, input index).
    """

    def __init__(self, request: SearchRequest) -> None:
        graph, mesh = request.graph, request.mesh
        self.graph, self.mesh, self.outputs = graph, mesh, request.outputs
        self.cuts: CutsOfGraph = {}
        # Looked up once, as the layouts of an operator are computed many times.
        self.rules = {op.name: rule_of(op) for op in graph.ops}
        # Every rank receives full inputs, buffers and constants, except inputs that arrive sharded.
        passed_in = (*graph.input_values, *graph.buffers, *graph.constants)
        self.initial_layouts = {value: mesh.replicated(len(value.shape)) for value in passed_in}
        for value in graph.input_values:
            if value.name in request.arrivals:
                self.initial_layouts[value] = TensorLayout(mesh, request.arrivals[value.name])
        self.consumer_layouts: dict[Value, dict[tuple[str, int], TensorLayout]] = {
            value: {} for value in graph.values()
        }
        # Replicated outputs of the model and new values of buffers have one more consumer.
        updates = (value for _, value in graph.updates)
        for value in (*replicated_outputs(graph), *updates):
            self.consumer_layouts[value]["", 0] = mesh.replicated(len(value.shape))

    def decide(self, op: Op, cuts: Cuts) -> None:
        """Set the cuts of an operator, and the layouts of its inputs and outputs."""
        self.cuts[op.name] = {factor: tuple(axes) for factor, axes in cuts.items() if axes}
        inputs, outputs = layouts_of(op, self.rules[op.name], self.mesh, self.cuts[op.name])
        for index, (value, layout) in enumerate(zip(op.inputs, inputs, strict=True)):
            self.consumer_layouts[value][op.name, index] = layout
        fixed_axes = self.outputs.get(op.name, (None,) * len(outputs))
        for value, layout, axes in zip(op.outputs, outputs, fixed_axes, strict=True):
            # An output with a fixed layout is redistributed before any consumer reads it.
            self.initial_layouts[value] = layout if axes is None else TensorLayout(self.mesh, axes)

    def neighbors(self, op: Op) -> Iterator[tuple[Value, Op]]:
        """Yield (value, neighbor) for the producer of each input and for each consumer of an
        output."""
        # Parameters, buffers and inputs of the model have no producer to follow.
        for value in op.inputs:
            if value in self.graph.producer:
                yield value, self.graph.producer[value]
        for value in op.outputs:
            for consumer, _ in self.graph.consumers[value]:
                yield value, consumer

    def other_consumer_layouts(self, op: Op, value: Value) -> tuple[TensorLayout, ...]:
        """Return the layouts in which decided operators other than `op` read `value`; () for
        parameters."""
        # Each use of a parameter may have its own layout; the storage follows from the uses.
        if value.origin is Origin.PARAMETER:
            return ()
        layouts = self.consumer_layouts[value].items()
        return tuple(dict.fromkeys(layout for (name, _), layout in layouts if name != op.name))

    def redistributions(self, value: Value) -> Iterator[SharedRedistribution]:
        """Yield the redistribution of `value` to each distinct layout in which it is read.

        Yields nothing for parameters and for values without a decided producer.
        """
        if value in self.initial_layouts:
            # Distinct layouts in the order of consumers, as consumers with one layout share the
            # result.
            targets = tuple(dict.fromkeys(self.consumer_layouts[value].values()))
            for index, target in enumerate(targets):
                # Each redistribution counts only the steps that no earlier redistribution has.
                yield self.initial_layouts[value], target, targets[:index]


def kernel_collectives(
    op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts
) -> Iterator[tuple[InnerReduction, int]]:
    """Yield each collective inside the operator's kernel with its communication volume in bytes,
    forward plus backward."""
    differentiable = any(value.requires_grad for value in op.outputs)
    for reduction in rule.reductions(op, rule.shard_counts(mesh, cuts)):
        # Axes of all factors of the reduction together: one collective over their joined group.
        axes = tuple(axis for factor in reduction.factors for axis in cuts.get(factor, ()))
        inner = InnerReduction(reduction, axes)
        yield inner, sum(inner.bytes(mesh, differentiable))


def selection_bytes(op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts) -> int:
    """Return the bytes of the collectives in which an operator gathers the elements among which it
    selects, such as the candidates of `topk`.

    Unlike other collectives inside kernels they take the place of a redistribution: without them
    the operator would read a tensor that is not sharded along the dimension.
    """
    return sum(
        size
        for inner, size in kernel_collectives(op, rule, mesh, cuts)
        if inner.reduction.operation == "gather" and not inner.reduction.varying
    )
