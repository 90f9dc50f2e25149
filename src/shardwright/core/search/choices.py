"""Costs of the alternative choices of an operator on one axis, with all other operators fixed.

Symbolic costs are computed as if the operator were decided last among the main operators (those
with a cost model). Neighbors without a cost model follow the choice of another main operator if
propagation reaches them from it, else the choice of this operator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from shardwright.core.cost.symbolic import IMPOSSIBLE
from shardwright.core.cost.time_model import TimeModel
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
from shardwright.core.search.request import TimedStep

COMMUNICATION, BATCH, MEM_COEFF = "communication", "batch", "mem_coeff"
SCALED_QUANTITIES = (COMMUNICATION, BATCH, MEM_COEFF)
"""Inputs of the cost whose scaling may change a choice: the seconds of all communication, the batch
size and `mem_coeff`."""

MAX_SCALE = 64.0
"""Maximum multiplier of a quantity that is tried; the minimum is its inverse."""


@dataclass(frozen=True)
class OtherChoice:
    """An alternative to the factor that an operator cuts over an axis.

    Args:
        factor: name of the factor that is cut over the axis; empty for no cut.
        cost: cost of this choice minus that of the chosen factor, in seconds per step or as
            symbolic costs; below 0 if this choice is cheaper.
        multipliers: for each of `SCALED_QUANTITIES` the multiplier nearest to 1 that makes this
            choice cheaper than the chosen factor; missing if no multiplier between `1 / MAX_SCALE`
            and `MAX_SCALE` does.
    """

    factor: str
    cost: float
    multipliers: dict[str, float]


@dataclass(frozen=True)
class AxisChoice:
    """The factor that equal operators cut over one axis, with its alternatives.

    Args:
        operators: names of the operators. Costs in seconds are sums over all of these operators;
            symbolic costs are per operator.
        axis: name of the mesh axis.
        chosen: name of the factor that is cut over the axis; empty for no cut.
        alternatives: all other valid choices, the cheapest first.
        symbolic: whether costs are symbolic rather than seconds.
    """

    operators: tuple[str, ...]
    axis: str
    chosen: str
    alternatives: tuple[OtherChoice, ...]
    symbolic: bool


Cost = Callable[[str, Mapping[str, float]], float]
"""Function from the name of the cut factor (empty for no cut), and the multiplier of each of
`SCALED_QUANTITIES` (1 if missing), to the cost."""


def axis_choices(
    graph: Graph,
    mesh: DeviceMatrix,
    decisions: Decisions,
    timed_step: TimedStep | None,
    mem_coeff: float,
) -> tuple[AxisChoice, ...]:
    """Return the choices of all main operators on all axes, with their alternatives.

    Args:
        timed_step: cluster and settings for costs in seconds; None for symbolic costs.
        mem_coeff: weight of the memory of parameters.
    """
    if timed_step is None:
        return tuple(_axis_choices_by_symbolic_cost(graph, mesh, decisions, mem_coeff))
    return tuple(_axis_choices_by_time(graph, mesh, decisions, timed_step, mem_coeff))


def _build_axis_choice(
    names: tuple[str, ...],
    axis: str,
    chosen: str,
    other_factors: list[str],
    cost: Cost,
    symbolic: bool,
) -> AxisChoice:
    chosen_cost = cost(chosen, {})
    # Symbolic costs know neither links nor seconds of computation.
    quantities = (MEM_COEFF,) if symbolic else SCALED_QUANTITIES
    alternatives = []
    for factor in other_factors:
        added_cost = cost(factor, {}) - chosen_cost
        multipliers = (
            {
                quantity: _break_even_multiplier(cost, chosen, factor, quantity)
                for quantity in quantities
            }
            # Only a choice that costs more has a break-even.
            if added_cost > 0
            else {}
        )
        reached = {quantity: value for quantity, value in multipliers.items() if value is not None}
        alternatives.append(OtherChoice(factor, added_cost, reached))
    # Stable, so that equal costs stay in the order of the factors.
    ranked = sorted(alternatives, key=lambda each: each.cost)
    return AxisChoice(names, axis, chosen, tuple(ranked), symbolic)


def _break_even_multiplier(cost: Cost, chosen: str, factor: str, quantity: str) -> float | None:
    """Return the multiplier of `quantity` nearest to 1 that makes `factor` cheaper than `chosen`.

    Returns:
        None if no multiplier between `1 / MAX_SCALE` and `MAX_SCALE` does.
    """

    def is_cheaper(multiplier: float) -> bool:
        return cost(factor, {quantity: multiplier}) < cost(chosen, {quantity: multiplier})

    largest = 1.0
    while largest < MAX_SCALE:
        largest *= 2
        # Up and down by factors of two, so that the multiplier nearest to 1 is found.
        for low, high in ((largest / 2, largest), (2 / largest, 1 / largest)):
            if is_cheaper(high):
                # In log space: 12 halvings of a factor of two leave an error of 0.02%.
                for _ in range(12):
                    middle = (low * high) ** 0.5
                    low, high = (low, middle) if is_cheaper(middle) else (middle, high)
                return high
    return None


def _alternative_cuts(
    op_type: OpType, cuts: Cuts, mesh: DeviceMatrix, axis: int
) -> Iterator[tuple[str, Cuts]]:
    """Yield (factor, cuts) for each factor that `axis` may cut; first ("", cuts without `axis`).

    Args:
        cuts: the axes of each factor of the operator, as decided.
    """
    current_factors = factor_of_axis(cuts)
    other_axes = {a: factor for a, factor in current_factors.items() if a != axis}
    # Replicating over the axis is valid for every operator.
    yield "", axes_of_factors(other_axes)
    for factor, limit in zip(op_type.factors, op_type.limits, strict=True):
        new_cuts = axes_of_factors({**other_axes, axis: factor})
        pairs = ({op_type.factors[n] for n in pair} for pair in op_type.joined)
        # Joined factors cut the same dims, such as the sequence of attention and its ring.
        if any(pair <= {*new_cuts} for pair in pairs):
            continue
        if limit % mesh.size(new_cuts[factor]) == 0:
            # The chosen cuts are unchanged: a pin may order the axes of a factor otherwise than
            # outermost first.
            yield factor, cuts if current_factors.get(axis) == factor else new_cuts


def _axis_choices_by_time(
    graph: Graph, mesh: DeviceMatrix, decisions: Decisions, timed_step: TimedStep, mem_coeff: float
) -> Iterator[AxisChoice]:
    all_cuts = {op.name: decisions.cuts.get(op.name, {}) for op in graph.ops}
    problem = search_problem(graph, all_cuts, decisions.outputs, decisions.arrivals)
    weight = timed_step.parameter_weight(mem_coeff)
    model = TimeModel(
        timed_step.cluster, mesh, timed_step.stages, timed_step.optimizer_shard_size, weight
    )
    objective, edges = Objective(problem, model), problem.edges_around()
    names: dict[int, list[str]] = {}
    for op, index in zip(graph.ops, problem.variable_of, strict=True):
        # Repeated blocks share a variable, so that one choice stands for operators of many layers.
        names.setdefault(index, []).append(op.name)
    cuts: list[Cuts] = [all_cuts[variable.op.name] for variable in problem.variables]
    total_cost = objective.cost(cuts)
    byte_seconds = timed_step.seconds_per_parameter_byte(mem_coeff)

    def cost_around(index: int, variable: OpVariable, new_cuts: Cuts) -> ObjectiveCost:
        # Edges read the cuts of both ends, so they get those of all variables.
        changed = [*cuts[:index], new_cuts, *cuts[index + 1 :]]
        cost = ObjectiveCost().plus(objective.operator(variable, new_cuts), variable.count)
        for edge in edges[index]:
            cost = cost.plus(objective.edge(edge, changed), edge.count)
        return cost

    def total(cost: ObjectiveCost, multipliers: Mapping[str, float]) -> float:
        mem_coeff_scale = multipliers.get(MEM_COEFF, 1.0)
        # Terms of parameters contain `weight` already, hence the ratio.
        parameter_scale = timed_step.parameter_weight(mem_coeff * mem_coeff_scale) / weight
        return _scale_cost(cost, multipliers, parameter_scale).total(
            timed_step.micro_batches, byte_seconds * mem_coeff_scale, model.slowdown
        )

    for index, variable in enumerate(problem.variables):
        if not variable.op_type.is_main:
            continue
        # Because communication overlaps computation, the objective is no sum over operators and
        # edges. So costs of the whole model are compared, not those around the operator.
        other_cost = total_cost.plus(cost_around(index, variable, cuts[index]), -1)
        for axis, name in enumerate(mesh.alias_names):
            alternatives = dict(_alternative_cuts(variable.op_type, cuts[index], mesh, axis))
            costs = {
                factor: other_cost.plus(cost_around(index, variable, new_cuts), 1)
                for factor, new_cuts in alternatives.items()
            }
            chosen = factor_of_axis(cuts[index]).get(axis, "")
            other_factors = [factor for factor in costs if factor != chosen]
            if chosen not in costs:  # Pins may cut factors that a search may not.
                continue

            def cost(
                factor: str,
                multipliers: Mapping[str, float],
                costs: dict[str, ObjectiveCost] = costs,
            ) -> float:
                return total(costs[factor], multipliers)

            yield _build_axis_choice(
                tuple(names[index]), name, chosen, other_factors, cost, symbolic=False
            )


def _scale_cost(
    cost: ObjectiveCost, multipliers: Mapping[str, float], parameter_scale: float
) -> ObjectiveCost:
    """Return `cost` with multiplied communication time, batch size and parameter weight.

    Args:
        multipliers: multipliers of communication time and batch size, 1 if missing.
        parameter_scale: multiplier of the seconds of gathering, reducing and updating parameters.
    """
    links, batch = multipliers.get(COMMUNICATION, 1.0), multipliers.get(BATCH, 1.0)
    # A larger batch computes and sends more activations, but gathers, reduces and updates the same
    # parameters.
    return replace(
        cost,
        forward=cost.forward * batch,
        backward=cost.backward * batch,
        redistributions=cost.redistributions * batch * links,
        gathers=cost.gathers * links * parameter_scale,
        gradients=cost.gradients * links * parameter_scale,
        update=cost.update * parameter_scale,
    )


def _axis_choices_by_symbolic_cost(
    graph: Graph, mesh: DeviceMatrix, decisions: Decisions, mem_coeff: float
) -> Iterator[AxisChoice]:
    indexed = index_graph(graph)
    recursions: dict[float, Recursion] = {}
    for axis, name in enumerate(mesh.alias_names):
        shard_counts, choice = _axis_level_arguments(indexed, mesh, decisions, axis)
        level = AxisLevel(indexed, shard_counts, mesh.device_matrix[axis])
        level.choices = choice
        equal_ops: dict[object, list[int]] = {}

        def costs(op: int, scale: float, level: AxisLevel = level) -> dict[str, float]:
            # One recursion for each multiplier, since a recursion caches costs with its
            # `mem_coeff`.
            if scale not in recursions:
                recursions[scale] = Recursion(indexed, mem_coeff * scale, "weight", None)
            recursion, factors = recursions[scale], indexed.op_types[op].factors
            # Of all other axes, as if this axis were decided last.
            recursion.shard_counts = list(level.shard_counts)
            return {
                "" if each.factor == NO_CUT else factors[each.factor]: each.total
                for each in recursion.alternatives(level, op)
                # Impossible choices have a cost for the log only.
                if each.operator_cost < IMPOSSIBLE
            }

        for op in indexed.main:
            key = (
                # Equal operators may have other neighbors, so their costs are part of the key.
                id(indexed.op_types[op]),
                shard_counts[op],
                choice[op],
                tuple(costs(op, 1.0).items()),
            )
            equal_ops.setdefault(key, []).append(op)
        for ops in equal_ops.values():
            first, factors = ops[0], indexed.op_types[ops[0]].factors
            level.choices = _propagate_choices_without_op(level, choice, first)
            chosen = "" if choice[first] == NO_CUT else factors[choice[first]]
            op_costs = costs(first, 1.0)
            # Pins may cut factors that a search may not.
            if chosen not in op_costs:
                continue

            def cost(factor: str, multipliers: Mapping[str, float], op: int = first) -> float:
                return costs(op, multipliers.get(MEM_COEFF, 1.0))[factor]

            other_factors = [factor for factor in op_costs if factor != chosen]
            names = tuple(indexed.names[op] for op in ops)
            yield _build_axis_choice(names, name, chosen, other_factors, cost, symbolic=True)


def _propagate_choices_without_op(level: AxisLevel, choice: list[int], op: int) -> list[int]:
    """Return the choice of each operator on one axis as if `op` were not decided yet.

    Operators without a cost model that are connected to `op` copy the choice of another main
    operator that reaches them, and are undecided if none does.

    Args:
        choice: decided choice of each operator on the axis.
    """
    graph = level.graph
    # Region: operators that may follow `op`; borders: the main operators where their region ends.
    region, borders, queue = {op}, set[int](), deque([op])
    while queue:
        current = queue.popleft()
        producers = (graph.producer[value] for value in graph.inputs[current])
        neighbors = [producer[0] for producer in producers if producer is not None]
        neighbors += [
            consumer for value in graph.outputs[current] for consumer, _ in graph.consumers[value]
        ]
        for neighbor in neighbors:
            if graph.op_types[neighbor].is_main:
                borders.add(neighbor)
            elif neighbor not in region:
                region.add(neighbor)
                queue.append(neighbor)
    level.choices = [
        UNDECIDED if current in region else each for current, each in enumerate(choice)
    ]
    # Sorted, as an operator follows the first neighbor that reaches it.
    level.propagate(sorted(borders - region))
    return level.choices


def _axis_level_arguments(
    indexed: IndexedGraph, mesh: DeviceMatrix, decisions: Decisions, axis: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the shard counts and the choices of an `AxisLevel`, one entry for each operator.

    Shard counts are per factor, over all axes except `axis`; the choice is the index of the factor
    that `axis` cuts, or `NO_CUT`.
    """
    shard_counts, choice = [], []
    for name, op_type in zip(indexed.names, indexed.op_types, strict=True):
        cuts = decisions.cuts.get(name, {})
        sizes = (
            prod(mesh.device_matrix[a] for a in cuts.get(factor, ()) if a != axis)
            for factor in op_type.factors
        )
        shard_counts.append(tuple(sizes))
        factors_on_axis = [factor for factor, axes in cuts.items() if axis in axes]
        # The first suffices, as an axis cuts at most one factor of an operator.
        choice.append(op_type.factors.index(factors_on_axis[0]) if factors_on_axis else NO_CUT)
    return shard_counts, choice
