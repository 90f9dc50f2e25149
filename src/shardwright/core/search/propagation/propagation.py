"""Sharding propagation: from pinned operators outwards, each operator follows its neighbors.

Breadth first from the pinned operators, over the tensors that operators share, in both directions.
Each next operator takes the cut with the least redistribution to what is decided already: bytes
sent for the tensors that it shares, forward and backward. Of equal ones it takes the one whose own
partial sums take the fewest bytes to sum up, then that with the least memory (bytes of its tensors
on one device), then with the least communication of any kind, gradients of parameters included,
then the first in a fixed order.

Then operators are decided again with all their neighbors known, so that between regions that grew
from different pins the redistribution comes to lie where it is cheapest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import Outputs
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.baselines import semi_auto
from shardwright.core.search.decided_layouts import DecidedLayouts, tensor_context
from shardwright.core.search.propagation.local_choice import LocalProblem
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.core.search.shard_uncosted_ops import with_uncosted_ops_sharded
from shardwright.errors import StrategyError


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
        return self.searches(request)[0]

    def searches(self, request: SearchRequest) -> Sequence[CutsOfGraph]:
        return with_uncosted_ops_sharded(request, propagate(request))


ROUNDS = 4
"""At most so many times all operators are decided again, forward and backward."""


class _Propagation(DecidedLayouts):
    """What is decided from the pinned operators outwards."""

    def __init__(self, graph: Graph, mesh: DeviceMatrix, outputs: Outputs) -> None:
        super().__init__(graph, mesh, outputs)
        self.data = _of_inputs(graph)
        self._known: dict[tuple[object, ...], dict[str, Axes]] = {}

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
        for value, other in self.neighbors(op):
            if other.name not in self.cuts:
                (near if value.requires_grad and value in self.data else far).append(other)

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
        return sum(
            tensor_context(value, ()).redistribution(*path)
            for value in self.reads
            for path in self.paths(value)
        )

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
            tensor_context(value, dims, self.sources.get(value), self.others(op, value))
            for value, dims in zip(op.inputs, rule.inputs, strict=True)
        )
        outputs = tuple(
            tensor_context(value, dims, None, self.others(op, value))
            for value, dims in zip(op.outputs, rule.outputs, strict=True)
        )
        return LocalProblem(op, rule, self.mesh, inputs, outputs)


def _of_inputs(graph: Graph) -> set[Value]:
    """The values that depend on the model's inputs."""
    values = set(graph.input_values)
    for op in graph.ops:
        if any(value in values for value in op.inputs):
            values.update(op.outputs)
    return values
