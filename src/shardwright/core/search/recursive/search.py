"""The symbolic search, MindSpore's double recursion: axis by axis, then operator by operator.

The outer recursion divides the devices, one axis of the device matrix after another, outermost
first. The inner recursion visits the main operators. Each operator takes the choice with the least
cost: elements of the tensors that the choice does not cut, plus redistributions to neighbors whose
choice on this axis is decided. All other operators follow their neighbors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.cost.symbolic import IMPOSSIBLE, cut_cost, no_cut_cost, redistribution_cost
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.search.cost_log import CutAlternative, log_choice
from shardwright.core.search.indexed_graph import NO_CUT, IndexedGraph, OpType, index_graph
from shardwright.core.search.recursive.axis_level import UNDECIDED, AxisLevel
from shardwright.core.search.request import CutsOfGraph, SearchRequest
from shardwright.errors import IndivisibleError, StrategyError

logger = logging.getLogger("shardwright.search")


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """Symbolic costs of cutting one operator over one axis, without redistributions.

    Args:
        elements: number of elements of a shard of each input, then of each output.
        cuts: cost of each choice in `OpType.choices`; `IMPOSSIBLE` for an invalid choice.
        no_cut: cost of replicating the operator over the axis.
        weight: largest cost of the choices that divide the sizes; the sort key of `order="weight"`.
    """

    elements: tuple[int, ...]
    cuts: tuple[float, ...]
    no_cut: float
    weight: float


def search_recursively(request: SearchRequest) -> CutsOfGraph:
    """Decide the cuts of all operators by the symbolic cost.

    Raises:
        StrategyError: if there are several devices and no operator can be cut on any number of
            devices.
        IndivisibleError: if there are several devices and no dimension of a main operator is
            divisible.
    """
    mesh, pinned = request.mesh, request.pinned
    indexed = index_graph(request.graph)
    pins = {op: pinned[name] for op, name in enumerate(indexed.names) if name in pinned}
    log = logger.info if request.log_costs else None
    recursion = Recursion(indexed, request.mem_coeff, request.order, log)
    cuts: CutsOfGraph = {}
    # Outermost axis first: costs on an axis are those of the shards over all earlier axes, as in
    # MindSpore's published logs, whose figures depend on this order.
    for axis, axis_size in enumerate(mesh.device_matrix):
        if axis_size > 1:
            choices = recursion.decide_axis(axis, axis_size, _pinned_choices(indexed, pins, axis))
            record_axis(indexed, choices, axis, cuts)
    # A pin may list the axes of a factor in another order than that of decisions.
    cuts.update({name: dict(factors) for name, factors in pinned.items() if factors})
    # A result without cuts is valid if replicating was cheapest (a tiny `mem_coeff`), and an error
    # if no size was divisible.
    if not cuts and not pins and mesh.num_devices > 1 and not recursion.had_valid_choice:
        raise _make_no_valid_cut_error(indexed, mesh)
    return cuts


class Recursion:
    """Recursive search over mesh axes, with the shard counts of earlier axes and cached costs.

    Args:
        order: order in which main operators are decided, one of `VISIT_ORDERS`.
        log: function that logs one line of the costs; None for no log.

    Attributes:
        shard_counts: number of shards of each factor of each operator over the axes decided so far.
        had_valid_choice: whether any main operator could be cut on any axis.
    """

    def __init__(
        self,
        graph: IndexedGraph,
        mem_coeff: float,
        order: str,
        log: Callable[[str], None] | None,
    ) -> None:
        self.graph = graph
        self.mem_coeff = mem_coeff
        self.order = order
        self.log = log
        self.shard_counts = [(1,) * len(op_type.factors) for op_type in graph.op_types]
        self.had_valid_choice = False
        # Layers of equal shapes and cuts share their costs.
        self._costs: dict[tuple[OpType, tuple[int, ...], int], OperatorCosts] = {}

    def decide_axis(self, axis: int, axis_size: int, pinned: Mapping[int, int]) -> list[int]:
        """Decide all operators on one axis, and return the choice of each.

        Args:
            pinned: choices of pinned operators on this axis, by operator index.
        """
        level = AxisLevel(self.graph, self.shard_counts, axis_size)
        for op, choice in pinned.items():
            level.choices[op] = choice
        # Pins first, so that they are decided neighbors of all other operators.
        level.propagate(pinned)
        for op in self._undecided_ops_in_order(level):
            alternatives = self.alternatives(level, op)
            # `min` takes the first of equal totals; `alternatives` is in the order that breaks
            # ties.
            chosen = min(alternatives, key=lambda alternative: alternative.total)
            level.choices[op] = chosen.factor
            level.propagate((op,))
            if self.log is not None:
                log_choice(self.log, self.graph.names[op], axis, axis_size, alternatives, chosen)
        level.decide_remaining()
        self.shard_counts = level.next_shard_counts()
        return level.choices

    def _undecided_ops_in_order(self, level: AxisLevel) -> list[int]:
        """Return the undecided main operators in the order of decision.

        Embeddings come last, since their cost does not include the operators that would follow
        their choice.
        """
        op_types = self.graph.op_types
        undecided = [op for op in self.graph.main if level.choices[op] == UNDECIDED]
        if self.order == "weight":
            weights = {op: self._operator_costs(level, op).weight for op in undecided}
            # The operator with the largest costs first, since later operators take redistributions
            # from its layouts into account. Both sorts are stable, so ties are in graph order.
            undecided.sort(key=lambda op: -weights[op])
        return sorted(undecided, key=lambda op: op_types[op].is_lookup)

    def _operator_costs(self, level: AxisLevel, op: int) -> OperatorCosts:
        op_type, shard_counts = self.graph.op_types[op], self.shard_counts[op]
        key = (op_type, shard_counts, level.axis_size)
        if key not in self._costs:
            self._costs[key] = operator_costs(
                op_type, shard_counts, level.axis_size, self.mem_coeff
            )
        return self._costs[key]

    def alternatives(self, level: AxisLevel, op: int) -> list[CutAlternative]:
        """Return all choices of `op` with their costs, no cut last; ties go to the first."""
        op_type, costs = self.graph.op_types[op], self._operator_costs(level, op)
        neighbors = _tensors_shared_with_decided_ops(level, op, costs.elements)

        def redistribution(factor: int) -> float:
            dims = (op_type.input_dims[factor], op_type.output_dims[factor])
            return sum(
                redistribution_cost(elements)
                for side, tensor_index, neighbor_dim, elements in neighbors
                if _needs_redistribution(dims[side][tensor_index], neighbor_dim)
            )

        alternatives = [
            CutAlternative(
                factor, label, cost, redistribution(factor) if cost < IMPOSSIBLE else 0.0
            )
            for factor, label, cost in zip(op_type.choices, op_type.labels, costs.cuts, strict=True)
        ]
        self.had_valid_choice |= any(cost < IMPOSSIBLE for cost in costs.cuts)
        return [
            *alternatives,
            CutAlternative(NO_CUT, "no_cut", costs.no_cut, redistribution(NO_CUT)),
        ]


def operator_costs(
    op_type: OpType, shard_counts: tuple[int, ...], axis_size: int, mem_coeff: float
) -> OperatorCosts:
    """Return the symbolic costs of the choices of an operator on one axis.

    Args:
        shard_counts: number of shards of each factor over the axes decided so far.
        axis_size: number of devices along the axis to decide.
    """
    costed = [tensor.elements(shard_counts) for tensor in op_type.costed_tensors]
    costs = [
        cut_cost(
            costed,
            [f in tensor.factors for tensor in op_type.costed_tensors],
            op_type.weight,
            mem_coeff,
        )
        for f in op_type.choices
    ]
    divides = [op_type.divides(factor, shard_counts, axis_size) for factor in op_type.choices]
    excluded = [
        any(shard_counts[other] > 1 for other in op_type.exclusive[f]) for f in op_type.choices
    ]
    # MindSpore's published figures count excluded cuts in the weight, and a batch cut in the cost
    # of no cut even if its size is not divisible.
    divisible = [cost for cost, ok in zip(costs, divides, strict=True) if ok]
    batch = [cost for cost, label in zip(costs, op_type.labels, strict=True) if label[0] == "I"]
    return OperatorCosts(
        elements=tuple(tensor.elements(shard_counts) for tensor in op_type.tensors),
        cuts=tuple(
            cost if ok and not is_excluded else IMPOSSIBLE
            for cost, ok, is_excluded in zip(costs, divides, excluded, strict=True)
        ),
        no_cut=no_cut_cost([*divisible, *batch]),
        weight=max(divisible, default=0.0),
    )


_INPUT, _OUTPUT = 0, 1
# Neither a dim nor `NO_CUT` nor `UNDECIDED`.
_ANY_DIM = -3
"""Sentinel dim of a model input whose batch size the axis does not divide. Only a choice that
replicates the input then costs a redistribution."""


def _needs_redistribution(dim: int, neighbor_dim: int) -> bool:
    return dim == NO_CUT if neighbor_dim == _ANY_DIM else dim != neighbor_dim


def _tensors_shared_with_decided_ops(
    level: AxisLevel, op: int, elements: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Return the tensors that `op` shares with operators that are decided on this axis.

    A model input that `op` reads counts as sharded along the batch if its batch size is divisible
    by the axis, else as `_ANY_DIM`.

    Args:
        elements: number of elements of a shard of each input, then of each output.

    Returns:
        (`_INPUT` or `_OUTPUT`, index among inputs or outputs, dim that the neighbor shards, number
        of elements) for each tensor.
    """
    graph, choice = level.graph, level.choices
    inputs, neighbors = graph.inputs[op], []
    for input_index, value in enumerate(inputs):
        if (producer_output := graph.producer[value]) is not None:
            producer, output_index = producer_output
            if graph.depends_on_input[value] and choice[producer] != UNDECIDED:
                dim = graph.op_types[producer].output_dims[choice[producer]][output_index]
                neighbors.append((_INPUT, input_index, dim, elements[input_index]))
        elif (batch_dim := graph.batch_dims[value]) != NO_CUT:
            # The batch arrives sharded, so that reading it in another layout costs a
            # redistribution, as in the published figures.
            divides = level.choice_from_input(op, input_index, batch_dim) >= 0
            dim = batch_dim if divides else _ANY_DIM
            neighbors.append((_INPUT, input_index, dim, elements[input_index]))
    for output_index, value in enumerate(graph.outputs[op]):
        # A set: an operator that reads a value twice in one layout needs one redistribution.
        reads = {
            (consumer, graph.op_types[consumer].input_dims[choice[consumer]][input_index])
            for consumer, input_index in graph.consumers[value]
            if choice[consumer] != UNDECIDED
        }
        # `elements` has the sizes of the inputs first.
        size = elements[len(inputs) + output_index]
        neighbors.extend((_OUTPUT, output_index, dim, size) for _, dim in reads)
    return neighbors


def record_axis(
    indexed: IndexedGraph, choices: Sequence[int], axis: int, cuts: CutsOfGraph
) -> None:
    """Add `axis` to `cuts`, in place, at the factor that the axis cuts in each operator.

    Args:
        choices: index of the factor that `axis` cuts, or `NO_CUT`, for each operator.
        cuts: cuts of each operator, by name, changed in place; operators without cuts are omitted.
    """
    for name, op_type, choice in zip(indexed.names, indexed.op_types, choices, strict=True):
        if choice != NO_CUT:
            op_cuts, factor = cuts.setdefault(name, {}), op_type.factors[choice]
            # Axes are decided outermost first, so that appending keeps them in order of
            # significance.
            op_cuts[factor] = (*op_cuts.get(factor, ()), axis)


def _pinned_choices(
    indexed: IndexedGraph, pins: Mapping[int, Mapping[str, tuple[int, ...]]], axis: int
) -> dict[int, int]:
    choices = {}
    for op, cuts in pins.items():
        factors = indexed.op_types[op].factors
        factors_on_axis = [factors.index(factor) for factor, axes in cuts.items() if axis in axes]
        # An axis cuts at most one factor of an operator; a pin without the axis replicates the
        # operator over it.
        choices[op] = factors_on_axis[0] if factors_on_axis else NO_CUT
    return choices


def _make_no_valid_cut_error(indexed: IndexedGraph, mesh: DeviceMatrix) -> StrategyError:
    devices = mesh.num_devices
    # No number of devices would help, so the remedy is not another number.
    if not any(limit > 1 for op_type in indexed.op_types for limit in op_type.limits):
        return StrategyError(
            f"none of the {len(indexed.names)} operators can be sharded: none has a sharding rule"
            " with a dimension greater than 1\n"
            "register rules with `sw.rules.register`, or use one device"
        )
    sizes = " · ".join(map(str, mesh.device_matrix))
    failure = f"no operator can be sharded over {devices} devices ({sizes})"
    reason = f"no matrix product or other main operator has a dimension divisible by {devices}"
    if indexed.batch_size is None:
        return IndivisibleError(
            f"{failure}: {reason}, and the model has no tensor input with a batch dimension\n"
            "use fewer devices"
        )
    if indexed.batch_size % devices == 0:
        return IndivisibleError(
            f"{failure}: {reason}; dim 0 of the inputs ({indexed.batch_size}) is divisible, but"
            " those operators have no dimension of that size\n"
            "make the batch dim 0 of the inputs, or use fewer devices"
        )
    valid = " or ".join(map(str, nearest_multiples(indexed.batch_size, devices)))
    return IndivisibleError(
        f"{failure}: the batch size {indexed.batch_size} is not divisible, and {reason}\n"
        f"use for example a batch size of {valid}"
    )


def nearest_multiples(size: int, divisor: int) -> tuple[int, ...]:
    """Return the positive multiples of `divisor` next to `size`, below and above: (7, 4) → (4,
    8)."""
    below = size // divisor * divisor
    return (below, below + divisor) if below else (divisor,)
