"""The double recursion: axis after axis, and on each axis operator after operator.

The first recursion halves the devices (one axis of the device matrix after the other, the outermost
first); the second walks over the operators that have a cost. Each takes the cut that costs least:
what the cut leaves whole plus the redistribution to neighbors already decided on this axis. All
others follow their neighbors.
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
    """Costs of one operator on its current shard, without redistribution.

    Args:
        elements: of each tensor, inputs, then outputs.
        cuts: for each of the op_type's choices, `IMPOSSIBLE` where it cannot be cut.
        no_cut: of computing it on every device.
        weight: the largest of the costs for which sizes divide: heavy operators are decided first.
    """

    elements: tuple[int, ...]
    cuts: tuple[float, ...]
    no_cut: float
    weight: float


def search_recursively(request: SearchRequest) -> CutsOfGraph:
    """Decides what every operator cuts on every axis by the symbolic cost.

    Raises:
        StrategyError: there are several devices and no operator can be cut at all.
        IndivisibleError: there are several devices, and no operator has a dimension that they
            divide.
    """
    mesh, pinned = request.mesh, request.pinned
    indexed = index_graph(request.graph)
    pins = {op: pinned[name] for op, name in enumerate(indexed.names) if name in pinned}
    log = logger.info if request.log_costs else None
    recursion = Recursion(indexed, request.mem_coeff, request.order, log)
    cuts: CutsOfGraph = {}
    for axis, axis_size in enumerate(mesh.device_matrix):
        if axis_size > 1:
            choices = recursion.descend(axis, axis_size, _pinned_on(indexed, pins, axis))
            record(indexed, choices, axis, cuts)
    # Axes of a pinned operator may stand in another order than the one in which they are decided.
    cuts.update({name: dict(factors) for name, factors in pinned.items() if factors})
    if not cuts and not pins and mesh.num_devices > 1 and not recursion.had_a_choice:
        raise _nothing_divides(indexed, mesh)
    return cuts


class Recursion:
    """What the levels share: how far each operator is cut already, and tables of costs."""

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
        self.had_a_choice = False
        self._costs: dict[tuple[OpType, tuple[int, ...], int], OperatorCosts] = {}

    def descend(self, axis: int, axis_size: int, pinned: Mapping[int, int]) -> list[int]:
        """Decides every operator on one axis and makes the shards smaller accordingly."""
        level = AxisLevel(self.graph, self.shard_counts, axis_size)
        for op, choice in pinned.items():
            level.choice[op] = choice
        level.propagate(pinned)
        for op in self._in_order(level):
            alternatives = self.alternatives(level, op)
            chosen = min(alternatives, key=lambda alternative: alternative.total)
            level.choice[op] = chosen.factor
            level.propagate((op,))
            if self.log is not None:
                log_choice(self.log, self.graph.names[op], axis, axis_size, alternatives, chosen)
        level.decide_remaining()
        self.shard_counts = level.next_shard_counts()
        return level.choice

    def _in_order(self, level: AxisLevel) -> list[int]:
        """Contractions first, then what looks up rows: it weighs its cut, not those that follow."""
        op_types = self.graph.op_types
        undecided = [op for op in self.graph.main if level.choice[op] == UNDECIDED]
        if self.order == "weight":
            weights = {op: self._operator_costs(level, op).weight for op in undecided}
            undecided.sort(key=lambda op: -weights[op])
        return sorted(undecided, key=lambda op: op_types[op].looks_up)

    def _operator_costs(self, level: AxisLevel, op: int) -> OperatorCosts:
        op_type, shard_counts = self.graph.op_types[op], self.shard_counts[op]
        key = (op_type, shard_counts, level.axis_size)
        if key not in self._costs:
            self._costs[key] = operator_costs(
                op_type, shard_counts, level.axis_size, self.mem_coeff
            )
        return self._costs[key]

    def alternatives(self, level: AxisLevel, op: int) -> list[CutAlternative]:
        """Every choice of `op` with its cost, in the order that breaks ties."""
        op_type, costs = self.graph.op_types[op], self._operator_costs(level, op)
        neighbors = _decided_neighbors(level, op, costs.elements)

        def redistribution(factor: int) -> float:
            dims = (op_type.input_dims[factor], op_type.output_dims[factor])
            return sum(
                redistribution_cost(elements)
                for side, place, dim, elements in neighbors
                if _differs(dims[side][place], dim)
            )

        alternatives = [
            CutAlternative(
                factor, label, cost, redistribution(factor) if cost < IMPOSSIBLE else 0.0
            )
            for factor, label, cost in zip(op_type.choices, op_type.labels, costs.cuts, strict=True)
        ]
        self.had_a_choice |= any(cost < IMPOSSIBLE for cost in costs.cuts)
        return [
            *alternatives,
            CutAlternative(NO_CUT, "no_cut", costs.no_cut, redistribution(NO_CUT)),
        ]


def operator_costs(
    op_type: OpType, shard_counts: tuple[int, ...], axis_size: int, mem_coeff: float
) -> OperatorCosts:
    """The costs of an operator whose factors are cut in `shard_counts` already."""
    priced = [tensor.elements(shard_counts) for tensor in op_type.priced]
    costs = [
        cut_cost(
            priced, [f in tensor.factors for tensor in op_type.priced], op_type.weight, mem_coeff
        )
        for f in op_type.choices
    ]
    divides = [op_type.divides(factor, shard_counts, axis_size) for factor in op_type.choices]
    excluded = [
        any(shard_counts[other] > 1 for other in op_type.exclusive[f]) for f in op_type.choices
    ]
    # What exclusion rules out counts here all the same, and so does a batch that does not divide
    # where nothing is cut: so do the published figures.
    divisible = [cost for cost, ok in zip(costs, divides, strict=True) if ok]
    batch = [cost for cost, label in zip(costs, op_type.labels, strict=True) if label[0] == "I"]
    return OperatorCosts(
        elements=tuple(tensor.elements(shard_counts) for tensor in op_type.tensors),
        cuts=tuple(
            cost if ok and not ruled_out else IMPOSSIBLE
            for cost, ok, ruled_out in zip(costs, divides, excluded, strict=True)
        ),
        no_cut=no_cut_cost([*divisible, *batch]),
        weight=max(divisible, default=0.0),
    )


_INPUT, _OUTPUT = 0, 1
_CUT_SOMEWHERE = -3
"""The dim of a batch that no longer divides: what leaves it whole is charged for it."""


def _differs(dim: int, neighbor: int) -> bool:
    return dim == NO_CUT if neighbor == _CUT_SOMEWHERE else dim != neighbor


def _decided_neighbors(
    level: AxisLevel, op: int, elements: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Tensors that `op` shares with operators decided on this level.

    Returns:
        For each the side (`_INPUT` or `_OUTPUT`) and the place there, the dim along which the
        neighbor cuts it and its elements. The batch that `op` reads directly counts as cut on
        dim 0 as long as that divides, then on any.
    """
    graph, choice = level.graph, level.choice
    inputs, neighbors = graph.inputs[op], []
    for place, value in enumerate(inputs):
        if (source := graph.producer[value]) is not None:
            producer, slot = source
            if graph.data[value] and choice[producer] != UNDECIDED:
                dim = graph.op_types[producer].output_dims[choice[producer]][slot]
                neighbors.append((_INPUT, place, dim, elements[place]))
        elif graph.batch[value]:
            dim = 0 if level.choice_from_input(op, place, 0) >= 0 else _CUT_SOMEWHERE
            neighbors.append((_INPUT, place, dim, elements[place]))
    for slot, value in enumerate(graph.outputs[op]):
        reads = {
            (consumer, graph.op_types[consumer].input_dims[choice[consumer]][place])
            for consumer, place in graph.consumers[value]
            if choice[consumer] != UNDECIDED
        }
        size = elements[len(inputs) + slot]
        neighbors.extend((_OUTPUT, slot, dim, size) for _, dim in reads)
    return neighbors


def record(indexed: IndexedGraph, choices: Sequence[int], axis: int, cuts: CutsOfGraph) -> None:
    """Appends `axis` to the axes of the factor that each operator cuts on it."""
    for name, op_type, choice in zip(indexed.names, indexed.op_types, choices, strict=True):
        if choice != NO_CUT:
            cut, factor = cuts.setdefault(name, {}), op_type.factors[choice]
            cut[factor] = (*cut.get(factor, ()), axis)


def _pinned_on(
    indexed: IndexedGraph, pins: Mapping[int, Mapping[str, tuple[int, ...]]], axis: int
) -> dict[int, int]:
    choices = {}
    for op, cuts in pins.items():
        factors = indexed.op_types[op].factors
        cut = [factors.index(factor) for factor, axes in cuts.items() if axis in axes]
        choices[op] = cut[0] if cut else NO_CUT
    return choices


def _nothing_divides(indexed: IndexedGraph, mesh: DeviceMatrix) -> StrategyError:
    devices = mesh.num_devices
    if not any(limit > 1 for op_type in indexed.op_types for limit in op_type.limits):
        return StrategyError(
            f"none of the {len(indexed.names)} operators can be cut at all: none has a sharding"
            " rule with a dimension greater than 1"
        )
    sizes = " · ".join(map(str, mesh.device_matrix))
    where = f"nothing can be cut over {devices} devices ({sizes})"
    others = "no matrix product or other main operator has a dimension that is a multiple of them"
    if indexed.batch_size is None:
        return IndivisibleError(
            f"{where}: {others}, and the model has no tensor input with a batch dimension"
        )
    if indexed.batch_size % devices == 0:
        return IndivisibleError(
            f"{where}: {others}; dim 0 of the inputs ({indexed.batch_size}) would do, but those"
            " operators have none of that size: let the batch come first, or use fewer devices"
        )
    valid = " or ".join(map(str, nearest_multiples(indexed.batch_size, devices)))
    return IndivisibleError(
        f"{where}: the batch size {indexed.batch_size} is not divisible, and {others};"
        f" use for example a batch size of {valid}"
    )


def nearest_multiples(size: int, of: int) -> tuple[int, ...]:
    """The positive multiples of `of` just below and above `size`: (7, 4) → (4, 8)."""
    below = size // of * of
    return (below, below + of) if below else (of,)
