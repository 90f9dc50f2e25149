"""Sharding propagation: from pinned operators outwards, each operator follows its neighbors.

Breadth first from the pinned operators, over the tensors that operators share, in both directions.
Each next operator takes the cut with the least redistribution to what is decided already: bytes
sent for the tensors that it shares, forward and backward. Of equal ones it takes the one
with the least memory (bytes of its tensors on one device), then with the least communication of any
kind, gradients of parameters included, then the first in a fixed order.

Then operators are decided again with all their neighbors known, so that between regions that grew
from different pins the redistribution comes to lie where it is cheapest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.layout.axes import Axes
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.partition.decisions import Outputs
from shardwright.rules import rule_of as rule_of
from shardwright.rules.rule import Cuts, Dims
from shardwright.search.baselines import semi_auto
from shardwright.search.cut_moves import layouts_of
from shardwright.search.indexed_graph import whole_outputs
from shardwright.search.propagation.local_choice import LocalProblem, TensorContext
from shardwright.search.request import CutsOfGraph, SearchMode, SearchRequest


def propagate(request: SearchRequest) -> CutsOfGraph:
    """Decides every operator from those that are pinned.

    Returns:
        For each operator that is cut the axes that cut each factor. Operators that no path joins
        with a pinned one follow the batch as far as it divides.

    Raises:
        StrategyError: nothing is pinned.
    """
    graph, pinned = request.graph, request.pinned
    if not pinned:
        raise StrategyError(
            "sharding propagation starts from pinned operators and there are none: pin some with"
            ' `sw.shard(module, strategy)`, or use mode="recursive_programming", which needs none'
        )
    propagation = _Propagation(graph, request.mesh, request.outputs)
    for op in graph.ops:
        if op.name in pinned:
            propagation.decide(op, pinned[op.name])
    propagation.spread()
    propagation.settle(pinned)
    cuts = propagation.cuts
    apart = [op.name for op in graph.ops if op.name not in cuts]
    if apart:
        following = semi_auto(graph, request.mesh, {})
        cuts.update({name: following.get(name, {}) for name in apart})
    return {op.name: cuts[op.name] for op in graph.ops if cuts[op.name]}


class ShardingPropagation(SearchMode):
    """Each operator as the pinned operators next to it, and so on outwards."""

    name: ClassVar[str] = "sharding_propagation"

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return propagate(request)


ROUNDS = 4
"""At most so many times all operators are decided again, forward and backward."""


class _Propagation:
    """The decisions so far, with the layout of each value at its source and at its readers."""

    def __init__(self, graph: Graph, mesh: Layout, outputs: Outputs) -> None:
        self.graph = graph
        self.mesh = mesh
        self.outputs = outputs
        self.cuts: CutsOfGraph = {}
        self.rules = {op.name: rule_of(op) for op in graph.ops}
        self.data = _of_inputs(graph)
        arriving = (*graph.input_values, *graph.buffers, *graph.constants)
        self.sources = {value: mesh.replicated(len(value.shape)) for value in arriving}
        self.reads: dict[Value, dict[tuple[str, int], TensorLayout]] = {
            value: {} for value in graph.values()
        }
        self._returned()
        self._known: dict[tuple[object, ...], dict[str, Axes]] = {}

    def _returned(self) -> None:
        """Counts what the model returns whole, and new values of buffers, as read so."""
        updates = (value for _, value in self.graph.updates)
        for value in (*whole_outputs(self.graph), *updates):
            self.reads[value]["", 0] = self.mesh.replicated(len(value.shape))

    def decide(self, op: Op, cuts: Cuts) -> None:
        self.cuts[op.name] = {factor: tuple(axes) for factor, axes in cuts.items() if axes}
        reads, outputs = layouts_of(op, self.rules[op.name], self.mesh, self.cuts[op.name])
        for index, (value, layout) in enumerate(zip(op.inputs, reads, strict=True)):
            self.reads[value][op.name, index] = layout
        fixed = self.outputs.get(op.name, (None,) * len(outputs))
        for value, layout, axes in zip(op.outputs, outputs, fixed, strict=True):
            self.sources[value] = layout if axes is None else TensorLayout(self.mesh, axes)

    def spread(self) -> None:
        """Decides operator after operator, breadth first.

        Paths of data that carry gradients come before others: a mask or a table of positions that
        all layers share is no short cut from the first layer to the last.
        """
        near: deque[Op] = deque()
        far: deque[Op] = deque()
        for op in self.graph.ops:
            if op.name in self.cuts:
                self._enqueue(op, near, far)
        while near or far:
            op = (near or far).popleft()
            if op.name not in self.cuts:
                self.decide(op, self._cheapest(op))
                self._enqueue(op, near, far)

    def _enqueue(self, op: Op, near: deque[Op], far: deque[Op]) -> None:
        for value, other in self._neighbors(op):
            if other.name not in self.cuts:
                (near if value.requires_grad and value in self.data else far).append(other)

    def _neighbors(self, op: Op) -> Iterator[tuple[Value, Op]]:
        for value in op.inputs:
            if value in self.graph.producer:
                yield value, self.graph.producer[value]
        for value in op.outputs:
            for consumer, _ in self.graph.consumers[value]:
                yield value, consumer

    def settle(self, pinned: Mapping[str, Cuts]) -> None:
        """Decides operators again that redistribute, until that no longer makes it less."""
        free = [op for op in self.graph.ops if op.name in self.cuts and op.name not in pinned]
        before = self._redistribution()
        for _ in range(ROUNDS):
            for ops, forward in ((free, True), (free[::-1], False)):
                for op in ops:
                    cuts = self._redecide(op, forward)
                    if cuts != self.cuts[op.name]:
                        self.decide(op, cuts)
            now = self._redistribution()
            if now >= before:
                return
            before = now

    def _redistribution(self) -> int:
        total = 0
        for value, layouts in self.reads.items():
            if value in self.sources:
                context = _context(value, ())
                reads = tuple(dict.fromkeys(layouts.values()))
                for place, target in enumerate(reads):
                    total += context.redistribution(self.sources[value], target, reads[:place])
        return total

    def _cheapest(self, op: Op) -> dict[str, Axes]:
        problem = self._problem(op)
        return {} if problem is None else self._cached(problem, (), problem.cheapest)

    def _redecide(self, op: Op, forward: bool) -> dict[str, Axes]:
        problem, cuts = self._problem(op), self.cuts[op.name]
        if problem is None:
            return {}
        return self._cached(
            problem,
            (tuple(cuts.items()), forward),
            lambda: problem.again(cuts, forward),
        )

    def _cached(
        self,
        problem: LocalProblem,
        more: tuple[object, ...],
        decide: Callable[[], dict[str, Axes]],
    ) -> dict[str, Axes]:
        """Operators alike among neighbors alike are cut alike."""
        key = (id(problem.rule), problem.inputs, problem.outputs, *more)
        if key not in self._known:
            self._known[key] = decide()
        return self._known[key]

    def _problem(self, op: Op) -> LocalProblem | None:
        """What is decided around `op`; None if there is nothing to decide about it."""
        rule = self.rules[op.name]
        if rule is None or not rule.factors:
            return None
        inputs = tuple(
            _context(value, dims, self.sources.get(value), self._others(op, value))
            for value, dims in zip(op.inputs, rule.inputs, strict=True)
        )
        outputs = tuple(
            _context(value, dims, None, self._others(op, value))
            for value, dims in zip(op.outputs, rule.outputs, strict=True)
        )
        return LocalProblem(op, rule, self.mesh, inputs, outputs)

    def _others(self, op: Op, value: Value) -> tuple[TensorLayout, ...]:
        """The layouts in which others than `op` read `value`; a parameter is no tie to them."""
        if value.kind is Kind.PARAMETER:
            return ()
        reads = self.reads[value].items()
        return tuple(dict.fromkeys(layout for (name, _), layout in reads if name != op.name))


def _context(
    value: Value,
    dims: Dims,
    source: TensorLayout | None = None,
    reads: tuple[TensorLayout, ...] = (),
) -> TensorContext:
    stored = value.kind is Kind.PARAMETER
    return TensorContext(
        dims, value.shape, value.itemsize, value.requires_grad, stored, source, reads
    )


def _of_inputs(graph: Graph) -> set[Value]:
    """The values that depend on the model's inputs."""
    values = set(graph.input_values)
    for op in graph.ops:
        if any(value in values for value in op.inputs):
            values.update(op.outputs)
    return values
