"""The layouts that decided operators give to values, and the bytes of their redistributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from shardwright.core.graph.graph import Graph, Kind, Op, Value
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.layout.redistribution import RedistributionStep, redistribution_steps
from shardwright.core.partition.communication import InnerReduction
from shardwright.core.partition.decisions import Outputs
from shardwright.core.rules import rule_of as rule_of
from shardwright.core.rules.rule import Cuts, Dims, ShardingRule
from shardwright.core.search.indexed_graph import replicated_outputs
from shardwright.core.search.nearby_cuts import layouts_of
from shardwright.core.search.request import CutsOfGraph

SharedRedistribution = tuple[TensorLayout, TensorLayout, Sequence[TensorLayout]]
"""A redistribution: source layout, target layout, and the targets of other consumers, which may
share its first steps."""


@dataclass(frozen=True, slots=True)
class TensorContext:
    """An input or output of an operator to decide, with its layouts at decided neighbors.

    Args:
        dims: the factor of each dim in the operator's rule.
        is_parameter: whether it is a parameter, which is stored in the layout in which it is read.
        initial_layout: the layout in which it is computed or passed in; None if that is not
            decided, and for outputs of the operator.
        consumer_layouts: the layouts in which other decided operators read it.
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
        """Return the bytes of `steps` without reductions of partial sums and of gradients.

        Partial and varying axes count as replicated: they follow from an operator's own cuts.
        """
        return self.communication_volume(
            without_partial(source),
            without_partial(target),
            [without_partial(layout) for layout in other_targets],
        )

    def communication_volume(
        self, source: TensorLayout, target: TensorLayout, other_targets: Sequence[TensorLayout]
    ) -> int:
        """Return the bytes that a device sends for `steps`, forward plus backward."""
        return sum(size for _, size in self.steps(source, target, other_targets))

    def steps(
        self, source: TensorLayout, target: TensorLayout, other_targets: Sequence[TensorLayout]
    ) -> list[tuple[RedistributionStep, int]]:
        """Return the steps not shared with redistributions from `source` to `other_targets`.

        Each step comes with the bytes that a device sends for it, forward plus backward.
        """
        path, sizes = self._steps_and_bytes(source, target)
        if not path:
            return []
        # A program runs equal first steps of several redistributions of a value once.
        num_shared = max(
            (_num_common_steps(path, self._steps_and_bytes(source, o)[0]) for o in other_targets),
            default=0,
        )
        return list(zip(path, sizes, strict=True))[num_shared:]

    def _steps_and_bytes(
        self, source: TensorLayout, target: TensorLayout
    ) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
        return _steps_and_bytes(source, target, self.shape, self.itemsize, self.differentiable)

    def local_bytes(self, layout: TensorLayout) -> int:
        return prod(self.shape) * self.itemsize // prod(layout.shard_counts)


@lru_cache(maxsize=1 << 14)
def without_partial(layout: TensorLayout) -> TensorLayout:
    """Return the layout with its partial and varying axes replicated."""
    return replace(layout, partial=frozenset(), varying=frozenset())


@lru_cache(maxsize=1 << 16)
def _steps_and_bytes(
    source: TensorLayout,
    target: TensorLayout,
    shape: tuple[int, ...],
    itemsize: int,
    differentiable: bool,
) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
    """Return the steps of a redistribution, and the bytes that a device sends for each, forward
    plus backward."""
    path = redistribution_steps(source, target, shape, differentiable)
    return path, tuple(
        step.forward_bytes(shape, itemsize)
        + (step.backward_bytes(shape, itemsize) if differentiable else 0)
        for step in path
    )


def _num_common_steps(
    first: Sequence[RedistributionStep], second: Sequence[RedistributionStep]
) -> int:
    length = 0
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
    """Return the context of a value as an input or output of an operator; see `TensorContext`."""
    return TensorContext(
        dims,
        value.shape,
        value.itemsize,
        value.requires_grad,
        value.kind is Kind.PARAMETER,
        initial_layout,
        consumer_layouts,
    )


class DecidedLayouts:
    """The cuts decided so far, and the layouts that follow from them.

    Attributes:
        cuts: the cuts of each decided operator, by name.
        initial_layouts: the layout in which each value is computed or passed in.
        consumer_layouts: for each value the layouts in which decided operators read it, by
            `(operator name, input index)`.
    """

    def __init__(self, graph: Graph, mesh: DeviceMatrix, outputs: Outputs) -> None:
        self.graph = graph
        self.mesh = mesh
        self.outputs = outputs
        self.cuts: CutsOfGraph = {}
        self.rules = {op.name: rule_of(op) for op in graph.ops}
        # Every rank receives whole inputs, buffers and constants; callers replace the layouts of
        # inputs that arrive sharded.
        arriving = (*graph.input_values, *graph.buffers, *graph.constants)
        self.initial_layouts = {value: mesh.replicated(len(value.shape)) for value in arriving}
        self.consumer_layouts: dict[Value, dict[tuple[str, int], TensorLayout]] = {
            value: {} for value in graph.values()
        }
        # Replicated outputs of the model and new values of buffers have one more consumer.
        updates = (value for _, value in graph.updates)
        for value in (*replicated_outputs(graph), *updates):
            self.consumer_layouts[value]["", 0] = mesh.replicated(len(value.shape))

    def decide(self, op: Op, cuts: Cuts) -> None:
        """Set the cuts of an operator, replacing earlier ones."""
        self.cuts[op.name] = {factor: tuple(axes) for factor, axes in cuts.items() if axes}
        inputs, outputs = layouts_of(op, self.rules[op.name], self.mesh, self.cuts[op.name])
        for index, (value, layout) in enumerate(zip(op.inputs, inputs, strict=True)):
            self.consumer_layouts[value][op.name, index] = layout
        fixed_axes = self.outputs.get(op.name, (None,) * len(outputs))
        for value, layout, axes in zip(op.outputs, outputs, fixed_axes, strict=True):
            self.initial_layouts[value] = layout if axes is None else TensorLayout(self.mesh, axes)

    def neighbors(self, op: Op) -> Iterator[tuple[Value, Op]]:
        """Yield the producers of inputs and the consumers of outputs, each with the value."""
        for value in op.inputs:
            if value in self.graph.producer:
                yield value, self.graph.producer[value]
        for value in op.outputs:
            for consumer, _ in self.graph.consumers[value]:
                yield value, consumer

    def other_consumer_layouts(self, op: Op, value: Value) -> tuple[TensorLayout, ...]:
        """Return the layouts in which operators other than `op` read `value`; () for parameters."""
        # Each use of a parameter may have its own layout; how it is stored follows from the uses.
        if value.kind is Kind.PARAMETER:
            return ()
        layouts = self.consumer_layouts[value].items()
        return tuple(dict.fromkeys(layout for (name, _), layout in layouts if name != op.name))

    def redistributions(self, value: Value) -> Iterator[SharedRedistribution]:
        """Yield the redistributions of a value to each layout in which it is read; none for
        parameters."""
        if value in self.initial_layouts:
            targets = tuple(dict.fromkeys(self.consumer_layouts[value].values()))
            for index, target in enumerate(targets):
                # Each redistribution is charged only for the steps that earlier consumers do not
                # have.
                yield self.initial_layouts[value], target, targets[:index]


def inner_reductions(
    op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts
) -> Iterator[tuple[InnerReduction, int]]:
    """Yield the collectives inside an operator's kernel, each with the bytes that a device sends
    for it, forward plus backward."""
    differentiable = any(value.requires_grad for value in op.outputs)
    for reduction in rule.reductions(op, rule.shard_counts(mesh, cuts)):
        axes = tuple(axis for factor in reduction.factors for axis in cuts.get(factor, ()))
        inner = InnerReduction(reduction, axes)
        yield inner, sum(inner.bytes(mesh, differentiable))
