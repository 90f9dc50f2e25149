"""What an operator would cost if it were cut otherwise over one axis, all others as they are.

Symbolic costs are those of the operator if it were the last to decide, so that operators without a
cost follow it where they follow no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from shardwright.core.cost.step_time import TimeModel
from shardwright.core.cost.symbolic import IMPOSSIBLE
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.decisions import Decisions
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.objective import Objective, ObjectiveCost
from shardwright.core.search.by_time.problem import OpVariable, search_problem
from shardwright.core.search.indexed_graph import NO_CUT, IndexedGraph, OpType, index_graph
from shardwright.core.search.nearby_cuts import axes_of_factors, factor_of_axis
from shardwright.core.search.recursive.axis_level import UNDECIDED, AxisLevel
from shardwright.core.search.recursive.search import Recursion
from shardwright.core.search.request import Pricing

COMMUNICATION, BATCH, MEM_COEFF = "communication", "batch", "mem_coeff"
KNOBS = (COMMUNICATION, BATCH, MEM_COEFF)

FARTHEST = 64.0
"""A knob is turned by at most this factor, up and down."""


@dataclass(frozen=True)
class OtherChoice:
    """Another choice.

    Args:
        factor: that is cut over the axis; empty for none.
        cost: what it costs more than what was chosen: seconds of a step, with `mem_coeff` for the
            parameters kept, or the symbolic cost. Below 0 if it costs less.
        turns: by what the time of all communication, the batch or `mem_coeff` is multiplied where
            it costs as much as what was chosen: the least change, if one of up to `FARTHEST` does.
    """

    factor: str
    cost: float
    turns: dict[str, float]


@dataclass(frozen=True)
class AxisChoice:
    """What equal operators cut over one axis, and what else they could.

    Args:
        operators: their names; seconds are those of all of them together, symbolic costs of one.
        chosen: the factor; empty for none.
        symbolic: whether costs are symbolic, rather than seconds.
    """

    operators: tuple[str, ...]
    axis: str
    chosen: str
    alternatives: tuple[OtherChoice, ...]
    symbolic: bool


Cost = Callable[[str, Mapping[str, float]], float]
"""Of cutting a factor, with knobs turned; those that are missing are not."""


def choices(
    graph: Graph,
    mesh: DeviceMatrix,
    decisions: Decisions,
    pricing: Pricing | None,
    mem_coeff: float,
) -> tuple[AxisChoice, ...]:
    """The choices of all operators that have a cost: by seconds with `pricing`, else symbolic."""
    if pricing is None:
        return tuple(_symbolic(graph, mesh, decisions, mem_coeff))
    return tuple(_timed(graph, mesh, decisions, pricing, mem_coeff))


def _choice(
    names: tuple[str, ...], axis: str, chosen: str, others: list[str], cost: Cost, symbolic: bool
) -> AxisChoice:
    own = cost(chosen, {})
    knobs = (MEM_COEFF,) if symbolic else KNOBS
    alternatives = []
    for factor in others:
        added = cost(factor, {}) - own
        turns = {knob: _turn(cost, chosen, factor, knob) for knob in knobs} if added > 0 else {}
        known = {knob: turn for knob, turn in turns.items() if turn is not None}
        alternatives.append(OtherChoice(factor, added, known))
    ranked = sorted(alternatives, key=lambda each: each.cost)
    return AxisChoice(names, axis, chosen, tuple(ranked), symbolic)


def _turn(cost: Cost, chosen: str, factor: str, knob: str) -> float | None:
    """Where `factor` begins to cost less than what was chosen, found by halving."""

    def wins(scale: float) -> bool:
        return cost(factor, {knob: scale}) < cost(chosen, {knob: scale})

    step = 1.0
    while step < FARTHEST:
        step *= 2
        for low, high in ((step / 2, step), (2 / step, 1 / step)):
            if wins(high):
                for _ in range(12):
                    middle = (low * high) ** 0.5
                    low, high = (low, middle) if wins(middle) else (middle, high)
                return high
    return None


def _moves(
    op_type: OpType, cuts: Cuts, mesh: DeviceMatrix, axis: int
) -> Iterator[tuple[str, Cuts]]:
    """Each factor that may be cut over `axis`, or none, with the cuts of the operator then."""
    current = factor_of_axis(cuts)
    rest = {a: factor for a, factor in current.items() if a != axis}
    yield "", axes_of_factors(rest)
    for factor, limit in zip(op_type.factors, op_type.limits, strict=True):
        moved = axes_of_factors({**rest, axis: factor})
        pairs = ({op_type.factors[n] for n in pair} for pair in op_type.joined)
        if any(pair <= {*moved} for pair in pairs):
            continue
        if limit % mesh.size(moved[factor]) == 0:
            yield factor, cuts if current.get(axis) == factor else moved


def _timed(
    graph: Graph, mesh: DeviceMatrix, decisions: Decisions, pricing: Pricing, mem_coeff: float
) -> Iterator[AxisChoice]:
    every = {op.name: decisions.cuts.get(op.name, {}) for op in graph.ops}
    problem = search_problem(graph, every, decisions.outputs, decisions.arrivals)
    weight = pricing.parameter_weight(mem_coeff)
    model = TimeModel(pricing.cluster, mesh, pricing.stages, pricing.sharing, weight)
    objective, edges = Objective(problem, model), problem.edges_around()
    names: dict[int, list[str]] = {}
    for op, number in zip(graph.ops, problem.variable_of, strict=True):
        names.setdefault(number, []).append(op.name)
    cuts: list[Cuts] = [every[variable.op.name] for variable in problem.variables]
    whole = objective.cost(cuts)
    kept = pricing.seconds_per_parameter_byte(mem_coeff)

    def around(number: int, variable: OpVariable, moved: Cuts) -> ObjectiveCost:
        changed = [*cuts[:number], moved, *cuts[number + 1 :]]
        cost = ObjectiveCost().plus(objective.operator(variable, moved), variable.count)
        for edge in edges[number]:
            cost = cost.plus(objective.edge(edge, changed), edge.count)
        return cost

    def total(cost: ObjectiveCost, knobs: Mapping[str, float]) -> float:
        links, batch = knobs.get(COMMUNICATION, 1.0), knobs.get(BATCH, 1.0)
        turned = knobs.get(MEM_COEFF, 1.0)
        once = pricing.parameter_weight(mem_coeff * turned) / weight
        scaled = replace(
            cost,
            forward=cost.forward * batch,
            backward=cost.backward * batch,
            redistributions=cost.redistributions * batch * links,
            gathers=cost.gathers * links * once,
            gradients=cost.gradients * links * once,
            update=cost.update * once,
        )
        return scaled.total(pricing.micro_batches, kept * turned, model.slowdown)

    for number, variable in enumerate(problem.variables):
        if not variable.op_type.is_main:
            continue
        rest = whole.plus(around(number, variable, cuts[number]), -1)
        for axis, name in enumerate(mesh.alias_names):
            moves = dict(_moves(variable.op_type, cuts[number], mesh, axis))
            costs = {f: rest.plus(around(number, variable, m), 1) for f, m in moves.items()}
            chosen = factor_of_axis(cuts[number]).get(axis, "")
            others = [factor for factor in costs if factor != chosen]
            if chosen not in costs:  # A pin may cut what a search does not.
                continue

            def cost(
                factor: str, knobs: Mapping[str, float], costs: dict[str, ObjectiveCost] = costs
            ) -> float:
                return total(costs[factor], knobs)

            yield _choice(tuple(names[number]), name, chosen, others, cost, symbolic=False)


def _symbolic(
    graph: Graph, mesh: DeviceMatrix, decisions: Decisions, mem_coeff: float
) -> Iterator[AxisChoice]:
    indexed = index_graph(graph)
    recursions: dict[float, Recursion] = {}
    for axis, name in enumerate(mesh.alias_names):
        shard_counts, choice = _before(indexed, mesh, decisions, axis)
        level = AxisLevel(indexed, shard_counts, mesh.device_matrix[axis])
        level.choice = choice
        alike: dict[object, list[int]] = {}

        def costs(op: int, scale: float, level: AxisLevel = level) -> dict[str, float]:
            if scale not in recursions:
                recursions[scale] = Recursion(indexed, mem_coeff * scale, "weight", None)
            recursion, factors = recursions[scale], indexed.op_types[op].factors
            recursion.shard_counts = list(level.shard_counts)
            return {
                "" if each.factor == NO_CUT else factors[each.factor]: each.total
                for each in recursion.alternatives(level, op)
                if each.operator < IMPOSSIBLE
            }

        for op in indexed.main:
            key = (
                id(indexed.op_types[op]),
                shard_counts[op],
                choice[op],
                tuple(costs(op, 1.0).items()),
            )
            alike.setdefault(key, []).append(op)
        for ops in alike.values():
            first, factors = ops[0], indexed.op_types[ops[0]].factors
            level.choice = _without(level, choice, first)
            chosen = "" if choice[first] == NO_CUT else factors[choice[first]]
            known = costs(first, 1.0)
            if chosen not in known:
                continue

            def cost(factor: str, knobs: Mapping[str, float], op: int = first) -> float:
                return costs(op, knobs.get(MEM_COEFF, 1.0))[factor]

            others = [factor for factor in known if factor != chosen]
            names = tuple(indexed.names[op] for op in ops)
            yield _choice(names, name, chosen, others, cost, symbolic=True)


def _without(level: AxisLevel, choice: list[int], op: int) -> list[int]:
    """The choices on one axis as if `op` were the last to decide: it and those that would follow it
    have not, but where they follow others."""
    graph = level.graph
    region, borders, queue = {op}, set[int](), deque([op])
    while queue:
        at = queue.popleft()
        makers = (graph.producer[value] for value in graph.inputs[at])
        near = [source[0] for source in makers if source is not None]
        near += [reader for value in graph.outputs[at] for reader, _ in graph.consumers[value]]
        for other in near:
            if graph.op_types[other].is_main:
                borders.add(other)
            elif other not in region:
                region.add(other)
                queue.append(other)
    level.choice = [UNDECIDED if at in region else each for at, each in enumerate(choice)]
    level.propagate(sorted(borders - region))
    return level.choice


def _before(
    indexed: IndexedGraph, mesh: DeviceMatrix, decisions: Decisions, axis: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """In how many parts each factor is cut over the other axes, and what is cut over this one."""
    shard_counts, choice = [], []
    for name, op_type in zip(indexed.names, indexed.op_types, strict=True):
        cuts = decisions.cuts.get(name, {})
        sizes = (
            prod(mesh.device_matrix[a] for a in cuts.get(factor, ()) if a != axis)
            for factor in op_type.factors
        )
        shard_counts.append(tuple(sizes))
        on = [factor for factor, axes in cuts.items() if axis in axes]
        choice.append(op_type.factors.index(on[0]) if on else NO_CUT)
    return shard_counts, choice
