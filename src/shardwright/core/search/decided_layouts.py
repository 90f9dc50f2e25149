"""The layouts of values as far as operators are decided, and the bytes sent between them."""

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

Between = tuple[TensorLayout, TensorLayout, Sequence[TensorLayout]]
"""A redistribution: its source, its target, and other targets that may share its first steps."""


@dataclass(frozen=True, slots=True)
class TensorContext:
    """What is decided about one tensor of an operator that is still to be decided.

    Args:
        dims: the factors that it carries in the operator's rule.
        stored: whether it is a parameter, which is stored as it is used.
        source: the layout in which it reaches the operator; None if that is not decided, and for
            the operator's outputs.
        reads: the layouts in which decided operators read it.
    """

    dims: Dims
    shape: tuple[int, ...]
    itemsize: int
    differentiable: bool
    stored: bool = False
    source: TensorLayout | None = None
    reads: tuple[TensorLayout, ...] = ()

    @property
    def decided(self) -> tuple[TensorLayout, ...]:
        return self.reads if self.source is None else (self.source, *self.reads)

    def redistribution(
        self, source: TensorLayout, target: TensorLayout, others: Sequence[TensorLayout]
    ) -> int:
        """Bytes from `source` to `target`, once partial sums are summed up, as `traffic`."""
        return self.traffic(bare(source), bare(target), [bare(layout) for layout in others])

    def traffic(
        self, source: TensorLayout, target: TensorLayout, others: Sequence[TensorLayout]
    ) -> int:
        """Bytes from `source` to `target` of the steps that no path to one of `others` shares."""
        return sum(size for _, size in self.steps(source, target, others))

    def steps(
        self, source: TensorLayout, target: TensorLayout, others: Sequence[TensorLayout]
    ) -> list[tuple[RedistributionStep, int]]:
        """These steps, each with its bytes."""
        path, sizes = self._priced(source, target)
        if not path:
            return []
        shared = max((_common(path, self._priced(source, o)[0]) for o in others), default=0)
        return list(zip(path, sizes, strict=True))[shared:]

    def _priced(
        self, source: TensorLayout, target: TensorLayout
    ) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
        return _priced(source, target, self.shape, self.itemsize, self.differentiable)

    def local_bytes(self, layout: TensorLayout) -> int:
        return prod(self.shape) * self.itemsize // prod(layout.shard_counts)


@lru_cache(maxsize=1 << 14)
def bare(layout: TensorLayout) -> TensorLayout:
    """Only where the tensor is cut, partial sums summed up."""
    return replace(layout, partial=frozenset(), varying=frozenset())


@lru_cache(maxsize=1 << 16)
def _priced(
    source: TensorLayout,
    target: TensorLayout,
    shape: tuple[int, ...],
    itemsize: int,
    differentiable: bool,
) -> tuple[tuple[RedistributionStep, ...], tuple[int, ...]]:
    """The steps of a redistribution, and the bytes that one device sends for each, both forward and
    backward."""
    path = redistribution_steps(source, target, shape, differentiable)
    return path, tuple(
        step.forward_bytes(shape, itemsize)
        + (step.backward_bytes(shape, itemsize) if differentiable else 0)
        for step in path
    )


def _common(one: Sequence[RedistributionStep], other: Sequence[RedistributionStep]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
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
    """A tensor of an operator, with what is decided about the value."""
    stored = value.kind is Kind.PARAMETER
    return TensorContext(
        dims, value.shape, value.itemsize, value.requires_grad, stored, source, reads
    )


class DecidedLayouts:
    """The decisions so far, with the layout of each value at its source and at its readers."""

    def __init__(self, graph: Graph, mesh: DeviceMatrix, outputs: Outputs) -> None:
        self.graph = graph
        self.mesh = mesh
        self.outputs = outputs
        self.cuts: CutsOfGraph = {}
        self.rules = {op.name: rule_of(op) for op in graph.ops}
        arriving = (*graph.input_values, *graph.buffers, *graph.constants)
        self.sources = {value: mesh.replicated(len(value.shape)) for value in arriving}
        self.reads: dict[Value, dict[tuple[str, int], TensorLayout]] = {
            value: {} for value in graph.values()
        }
        # What the model returns whole, and new values of buffers, count as read so.
        updates = (value for _, value in graph.updates)
        for value in (*replicated_outputs(graph), *updates):
            self.reads[value]["", 0] = mesh.replicated(len(value.shape))

    def decide(self, op: Op, cuts: Cuts) -> None:
        """Cuts an operator so, whatever was decided of it before."""
        self.cuts[op.name] = {factor: tuple(axes) for factor, axes in cuts.items() if axes}
        reads, outputs = layouts_of(op, self.rules[op.name], self.mesh, self.cuts[op.name])
        for index, (value, layout) in enumerate(zip(op.inputs, reads, strict=True)):
            self.reads[value][op.name, index] = layout
        fixed = self.outputs.get(op.name, (None,) * len(outputs))
        for value, layout, axes in zip(op.outputs, outputs, fixed, strict=True):
            self.sources[value] = layout if axes is None else TensorLayout(self.mesh, axes)

    def neighbors(self, op: Op) -> Iterator[tuple[Value, Op]]:
        """Those that share a value with `op` which one of them makes, and the value."""
        for value in op.inputs:
            if value in self.graph.producer:
                yield value, self.graph.producer[value]
        for value in op.outputs:
            for consumer, _ in self.graph.consumers[value]:
                yield value, consumer

    def others(self, op: Op, value: Value) -> tuple[TensorLayout, ...]:
        """The layouts in which others than `op` read `value`; a parameter is no tie to them."""
        if value.kind is Kind.PARAMETER:
            return ()
        reads = self.reads[value].items()
        return tuple(dict.fromkeys(layout for (name, _), layout in reads if name != op.name))

    def paths(self, value: Value) -> Iterator[Between]:
        """From the source of a value to each layout in which it is read, if it is no parameter."""
        if value in self.sources:
            reads = tuple(dict.fromkeys(self.reads[value].values()))
            for place, target in enumerate(reads):
                yield self.sources[value], target, reads[:place]


def inner_reductions(
    op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts
) -> Iterator[tuple[InnerReduction, int]]:
    """The collectives inside the operator, each with its bytes, forward and backward."""
    differentiable = any(value.requires_grad for value in op.outputs)
    for reduction in rule.reductions(op, rule.shard_counts(mesh, cuts)):
        axes = tuple(axis for factor in reduction.factors for axis in cuts.get(factor, ()))
        inner = InnerReduction(reduction, axes)
        yield inner, sum(inner.bytes(mesh, differentiable))
