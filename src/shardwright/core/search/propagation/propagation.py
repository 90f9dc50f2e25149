"""Sharding propagation: decide operators outwards from pinned ones, to match their neighbors.

1. Visit operators breadth first from the pinned ones, along shared tensors in both directions. Each
   operator takes the cuts that minimize, in this order: bytes of redistributions to decided
   neighbors, forward and backward, and of the elements among which the operator selects
   (`selection_bytes`); bytes to reduce its own partial sums; bytes of its inputs and
   outputs on one device; bytes of all communication, gradients of parameters included. Further ties
   go to the cuts that are enumerated first.
2. Decide operators again after all neighbors are decided, so that the redistributions between
   regions that grew from different pins move to where they are cheapest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.baselines import semi_auto
from shardwright.core.search.decided_layouts import (
    DecidedLayouts,
    selection_bytes,
    tensor_context,
)
from shardwright.core.search.propagation.local_choice import LocalProblem
from shardwright.core.search.request import CutsOfGraph, SearchMode, SearchRequest
from shardwright.core.search.shard_uncosted_ops import with_uncosted_ops_sharded
from shardwright.errors import StrategyError


def propagate(request: SearchRequest) -> CutsOfGraph:
    """Decide the cuts of all operators by propagation from the pinned operators.

    Returns:
        The cuts of each operator, by name. Operators without a path to a pinned operator are data
        parallel, over as many axes as divide the batch size.

    Raises:
        StrategyError: if no operator is pinned.
    """
    graph, pinned = request.graph, request.pinned
    if not pinned:
        raise StrategyError(
            'mode="sharding_propagation" starts from pinned operators, but none are pinned\n'
            "pin operators with `sw.shard(module, strategy)`, or use"
            ' mode="recursive_programming", which needs no pins'
        )
    propagation = _CutsPropagation(request)
    for op in graph.ops:
        if op.name in pinned:
            propagation.decide(op, pinned[op.name])
    # All pins are decided by now: an operator between two pins takes both into account.
    propagation.propagate()
    propagation.refine(pinned)
    cuts = propagation.cuts
    unreached = [op.name for op in graph.ops if op.name not in cuts]
    if unreached:
        # Pins are in `cuts` already.
        data_parallel_cuts = semi_auto(graph, request.mesh, {})
        cuts.update({name: data_parallel_cuts.get(name, {}) for name in unreached})
    return {op.name: cuts[op.name] for op in graph.ops if cuts[op.name]}


class ShardingPropagation(SearchMode):
    """Search mode that propagates the cuts of pinned operators to all other operators."""

    name: ClassVar[str] = "sharding_propagation"

    def search(self, request: SearchRequest) -> CutsOfGraph:
        return self.candidate_cuts(request)[0]

    def candidate_cuts(self, request: SearchRequest) -> Sequence[CutsOfGraph]:
        return with_uncosted_ops_sharded(request, propagate(request))


MAX_ROUNDS = 4
"""Maximum number of rounds in which cuts are decided again, each a forward and a backward sweep
over all operators."""


class _CutsPropagation(DecidedLayouts):
    """Cuts and layouts of the decided operators, to which propagation adds further operators."""

    def __init__(self, request: SearchRequest) -> None:
        super().__init__(request)
        self.data_values = _values_that_depend_on_inputs(request.graph)
        self._cached_cuts: dict[tuple[object, ...], dict[str, Axes]] = {}

    def propagate(self) -> None:
        """Decide operators breadth first, starting at the neighbors of the decided operators.

        Operators connected by values with gradients come first. Otherwise a mask or a table of
        positions that all layers share would pass the cuts of the first layer to the last.
        """
        gradient_queue: deque[Op] = deque()
        other_queue: deque[Op] = deque()
        for op in self.graph.ops:
            if op.name in self.cuts:
                self._enqueue_neighbors(op, gradient_queue, other_queue)
        while gradient_queue or other_queue:
            # An operator may be queued by several neighbors; the first visit decides it.
            op = (gradient_queue or other_queue).popleft()
            if op.name not in self.cuts:
                self.decide(op, self._cheapest_cuts(op))
                self._enqueue_neighbors(op, gradient_queue, other_queue)

    def _enqueue_neighbors(self, op: Op, gradient_queue: deque[Op], other_queue: deque[Op]) -> None:
        for value, neighbor in self.neighbors(op):
            if neighbor.name not in self.cuts:
                # A parameter that layers share has a gradient too, but is no path for the batch.
                has_gradient = value.requires_grad and value in self.data_values
                (gradient_queue if has_gradient else other_queue).append(neighbor)

    def refine(self, pinned: Mapping[str, Cuts]) -> None:
        """Decide operators again until the bytes of redistributions stop decreasing."""
        # Operators without a path to a pin are not in `cuts` yet, and are not decided by neighbors.
        free_ops = [op for op in self.graph.ops if op.name in self.cuts and op.name not in pinned]
        previous_bytes = self._total_redistribution_bytes()
        for _ in range(MAX_ROUNDS):
            # A redistribution moves only along the direction of a sweep: towards the outputs in a
            # forward sweep, towards the inputs in a backward sweep.
            for ops, forward in ((free_ops, True), (free_ops[::-1], False)):
                for op in ops:
                    cuts = self._choose_cuts_near_neighbors(op, forward)
                    if cuts != self.cuts[op.name]:
                        self.decide(op, cuts)
            redistribution_bytes = self._total_redistribution_bytes()
            # Ties could move redistributions forever, so sweeps end once the total bytes do not
            # decrease.
            if redistribution_bytes >= previous_bytes:
                return
            previous_bytes = redistribution_bytes

    def _total_redistribution_bytes(self) -> int:
        redistribution_bytes = sum(
            # No factors are needed for the bytes between two given layouts.
            tensor_context(value, ()).redistribution_bytes(*layouts)
            for value in self.consumer_layouts
            for layouts in self.redistributions(value)
        )
        rules = ((op, rule_of(op)) for op in self.graph.ops if op.name in self.cuts)
        return redistribution_bytes + sum(
            selection_bytes(op, rule, self.mesh, self.cuts[op.name])
            for op, rule in rules
            if rule is not None
        )

    def _cheapest_cuts(self, op: Op) -> dict[str, Axes]:
        problem = self._build_local_problem(op)
        return (
            {} if problem is None else self._cached_cuts_of_problem(problem, (), problem.cheapest)
        )

    def _choose_cuts_near_neighbors(self, op: Op, forward: bool) -> dict[str, Axes]:
        problem, cuts = self._build_local_problem(op), self.cuts[op.name]
        if problem is None:
            return {}
        return self._cached_cuts_of_problem(
            problem,
            (tuple(cuts.items()), forward),
            lambda: problem.cuts_given_neighbors(cuts, forward),
        )

    def _cached_cuts_of_problem(
        self,
        problem: LocalProblem,
        extra_key: tuple[object, ...],
        decide: Callable[[], dict[str, Axes]],
    ) -> dict[str, Axes]:
        """Return `decide()`, or its earlier result for an equal rule, equal layouts of decided
        neighbors and an equal `extra_key`."""
        # Equal operators share one rule object, so that its id identifies shapes and arguments.
        key = (id(problem.rule), problem.inputs, problem.outputs, *extra_key)
        if key not in self._cached_cuts:
            self._cached_cuts[key] = decide()
        return self._cached_cuts[key]

    def _build_local_problem(self, op: Op) -> LocalProblem | None:
        """Return the problem of choosing the cuts of `op`, or None if `op` cannot be cut."""
        rule = self.rules[op.name]
        if rule is None or not rule.factors:
            return None
        inputs = tuple(
            tensor_context(
                value,
                dims,
                self.initial_layouts.get(value),
                self.other_consumer_layouts(op, value),
            )
            for value, dims in zip(op.inputs, rule.inputs, strict=True)
        )
        outputs = tuple(
            # The operator is not decided yet, so nothing fixes the layout in which it computes its
            # outputs.
            tensor_context(value, dims, None, self.other_consumer_layouts(op, value))
            for value, dims in zip(op.outputs, rule.outputs, strict=True)
        )
        return LocalProblem(op, rule, self.mesh, inputs, outputs)


def _values_that_depend_on_inputs(graph: Graph) -> set[Value]:
    values = set(graph.input_values)
    for op in graph.ops:
        if any(value in values for value in op.inputs):
            values.update(op.outputs)
    return values
