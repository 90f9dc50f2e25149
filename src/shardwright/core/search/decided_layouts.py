"""The layouts of values between decided operators, and the bytes of their redistributions."""

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
"""A redistribution: source, target, and targets of other readers that may share its first steps."""


@dataclass(frozen=True, slots=True)
class TensorContext:
    """One tensor of an operator that is to be decided, with the layouts at decided neighbors.

    Args:
        dims: the factor of each dim in the operator's rule.
        is_parameter: whether it is a parameter, which is stored in the layout in which it is read.
        source: the layout in which its producer leaves it; None if that is not decided, and for
            outputs of the operator.
        reads: the layouts in which other decided operators read it.
    """

    dims: Dims
    shape: tuple[int, ...]
    itemsize: int
    differentiable: bool
    is_parameter: bool = False
    source: TensorLayout | None = None
    reads: tuple[TensorLayout, ...] = ()

    @property
    def known_layouts(self) -> tuple[TensorLayout, ...]:
        return self.reads if self.source is None else (self.source, *self.reads)

    def redistribution(
        self, source: TensorLayout, target: TensorLayout, other_reads: Sequence[TensorLayout]
    ) -> int:
        """Return the bytes of `traffic`, without reductions of partial sums."""
        return self.traffic(
            without_partial(source),
            without_partial(target),
            [without_partial(layout) for layout in other_reads],
        )

    def traffic(
        self, source: TensorLayout, target: TensorLayout, other_reads: Sequence[TensorLayout]
    ) -> int:
        """Return the bytes of the steps that redistributions to `other_reads` do not share."""
        return sum(size for _, size in self.steps(source, target, other_reads))

    def steps(
        self, source: TensorLayout, target: TensorLayout, other_reads: Sequence[TensorLayout]
    ) -> list[tuple[RedistributionStep, int]]:
        """Return the steps that redistributions to `other_reads` do not share, with bytes."""
        path, sizes = self._steps_and_bytes(source, target)
        if not path:
            return []
        # A program runs equal first steps of several redistributions of a value once.
        shared = max(
            (_num_common_steps(path, self._steps_and_bytes(source, o)[0]) for o in other_reads),
            default=0,
        )
        return list(zip(path, sizes, strict=True))[shared:]

    def _steps_and_bytes(
        self, source: TensorLayout, target: TensorLayout
    ) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
        return _steps_and_bytes(source, target, self.shape, self.itemsize, self.differentiable)

    def local_bytes(self, layout: TensorLayout) -> int:
        return prod(self.shape) * self.itemsize // prod(layout.shard_counts)


@lru_cache(maxsize=1 << 14)
def without_partial(layout: TensorLayout) -> TensorLayout:
    """Return the layout after all partial sums are reduced."""
    return replace(layout, partial=frozenset(), varying=frozenset())


@lru_cache(maxsize=1 << 16)
def _steps_and_bytes(
    source: TensorLayout,
    target: TensorLayout,
    shape: tuple[int, ...],
    itemsize: int,
    differentiable: bool,
) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
    """The steps of a redistribution, and the bytes that a device sends for each, forward plus
    backward."""
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
    source: TensorLayout | None = None,
    reads: tuple[TensorLayout, ...] = (),
) -> TensorContext:
    """Return the context of a value as a tensor of an operator with these `dims`."""
    is_parameter = value.kind is Kind.PARAMETER
    return TensorContext(
        dims, value.shape, value.itemsize, value.requires_grad, is_parameter, source, reads
    )


class DecidedLayouts:
    """The cuts decided so far, and the layouts of each value at its source and its readers."""

    def __init__(self, graph: Graph, mesh: DeviceMatrix, outputs: Outputs) -> None:
        self.graph = graph
        self.mesh = mesh
        self.outputs = outputs
        self.cuts: CutsOfGraph = {}
        self.rules = {op.name: rule_of(op) for op in graph.ops}
        # Every rank receives whole inputs, buffers and constants; callers replace the layouts of
        # inputs that arrive sharded.
        arriving = (*graph.input_values, *graph.buffers, *graph.constants)
        self.sources = {value: mesh.replicated(len(value.shape)) for value in arriving}
        self.reads: dict[Value, dict[tuple[str, int], TensorLayout]] = {
            value: {} for value in graph.values()
        }
        # Replicated outputs of the model and new values of buffers have one more reader.
        updates = (value for _, value in graph.updates)
        for value in (*replicated_outputs(graph), *updates):
            self.reads[value]["", 0] = mesh.replicated(len(value.shape))

    def decide(self, op: Op, cuts: Cuts) -> None:
        """Set the cuts of an operator, replacing earlier ones."""
        self.cuts[op.name] = {factor: tuple(axes) for factor, axes in cuts.items() if axes}
        reads, outputs = layouts_of(op, self.rules[op.name], self.mesh, self.cuts[op.name])
        for index, (value, layout) in enumerate(zip(op.inputs, reads, strict=True)):
            self.reads[value][op.name, index] = layout
        fixed = self.outputs.get(op.name, (None,) * len(outputs))
        for value, layout, axes in zip(op.outputs, outputs, fixed, strict=True):
            self.sources[value] = layout if axes is None else TensorLayout(self.mesh, axes)

    def neighbors(self, op: Op) -> Iterator[tuple[Value, Op]]:
        """Yield the producers of inputs and the readers of outputs, each with the value."""
        for value in op.inputs:
            if value in self.graph.producer:
                yield value, self.graph.producer[value]
        for value in op.outputs:
            for consumer, _ in self.graph.consumers[value]:
                yield value, consumer

    def other_reads(self, op: Op, value: Value) -> tuple[TensorLayout, ...]:
        """Return the layouts in which other operators read `value`; none for parameters."""
        # Each use of a parameter may have its own layout; how it is stored follows from the uses.
        if value.kind is Kind.PARAMETER:
            return ()
        reads = self.reads[value].items()
        return tuple(dict.fromkeys(layout for (name, _), layout in reads if name != op.name))

    def paths(self, value: Value) -> Iterator[SharedRedistribution]:
        """Yield the redistributions from the source of a value to its readers; none for
        parameters."""
        if value in self.sources:
            reads = tuple(dict.fromkeys(self.reads[value].values()))
            for number, target in enumerate(reads):
                # Each redistribution is charged only for the steps that earlier readers do not
                # have.
                yield self.sources[value], target, reads[:number]


def inner_reductions(
    op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts
) -> Iterator[tuple[InnerReduction, int]]:
    """Yield the collectives inside an operator's kernel, with bytes of forward plus backward."""
    differentiable = any(value.requires_grad for value in op.outputs)
    for reduction in rule.reductions(op, rule.shard_counts(mesh, cuts)):
        axes = tuple(axis for factor in reduction.factors for axis in cuts.get(factor, ()))
        inner = InnerReduction(reduction, axes)
        yield inner, sum(inner.bytes(mesh, differentiable))
