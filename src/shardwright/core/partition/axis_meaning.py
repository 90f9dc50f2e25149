"""Name mesh axes by the kind of parallelism that they serve.

Each tensor dimension is traced to its origin: the batch of the model's inputs, another input
dimension (a *position*), a parameter, or a *feature*, a dimension of an activation that a parameter
introduced. The axis over which an operator cuts a factor is named after the origin of its
dimensions:

| name of the axis | what is sharded over it |
|---|---|
| `dp` | the batch alone |
| `fsdp` | the batch alone, and parameters are stored in shards over it |
| `sp` | positions, and perhaps features: attention heads between two all-to-alls |
| `tp` | parameters, and perhaps features and positions, never the batch |
| `ep` | experts, and anything else |

Storage alone does not name an axis. An axis with any other mixture, or that shards nothing, keeps
its letter; several axes with the same name are numbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count, islice

from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes, axis_names
from shardwright.core.partition.decisions import Decisions
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Dims, ShardingRule


class Meaning(Enum):
    """Origin of a tensor dimension. A factor carried by several tensors has the first of these
    among their origins."""

    BATCH = auto()
    POSITION = auto()
    PARAMETER = auto()
    FEATURE = auto()
    EXPERT = auto()


Meanings = tuple[Meaning | None, ...]
"""Meaning of each dimension of a tensor; None for one created in the model, such as a mask's."""


def name_axes(graph: Graph, axes: int, decisions: Decisions) -> tuple[str, ...]:
    """Names for the axes `0` to `axes - 1` of a device matrix."""
    cut_meanings: list[set[Meaning | None]] = [set() for _ in range(axes)]
    for meaning, over in _sharded_meanings(graph, decisions):
        for axis in over:
            cut_meanings[axis].add(meaning)
    storage_axes = {axis for dims in decisions.storage.values() for over in dims for axis in over}
    names = [
        _axis_name(each - {None}, axis in storage_axes) for axis, each in enumerate(cut_meanings)
    ]
    numbers = {name: count() for name in names if names.count(name) > 1}
    letters = islice(axis_names(), axes)
    return tuple(
        letter if name is None else f"{name}{next(numbers[name]) if name in numbers else ''}"
        for letter, name in zip(letters, names, strict=True)
    )


def _axis_name(cut_meanings: set[Meaning | None], stores: bool) -> str | None:
    # Experts first: their factor is also a dimension of parameters.
    if Meaning.EXPERT in cut_meanings:
        return "ep"
    if cut_meanings == {Meaning.BATCH}:
        return "fsdp" if stores else "dp"
    if Meaning.BATCH in cut_meanings or not cut_meanings - {Meaning.FEATURE}:
        return None
    return "tp" if Meaning.PARAMETER in cut_meanings else "sp"


def _sharded_meanings(graph: Graph, decisions: Decisions) -> Iterator[tuple[Meaning | None, Axes]]:
    """Meaning and axes of everything that is sharded."""
    trace = trace_meanings(graph)
    for op in graph.ops:
        for factor, over in decisions.cuts.get(op.name, {}).items():
            yield trace.of_factor(op, factor), over
        for value, dims in zip(op.outputs, decisions.outputs.get(op.name, ()), strict=False):
            yield from zip(trace.values[value], dims or (), strict=False)
    for value in graph.input_values:
        yield from zip(trace.values[value], decisions.arrivals.get(value.name, ()), strict=False)


def trace_meanings(graph: Graph) -> _Trace:
    """Infer the meanings of all dimensions and factors.

    Only the batch dimension of inputs is known at first. A dimension that is contracted with a
    parameter is a feature dimension; the remaining input dimensions are positions (sequence).
    """
    # Twice: an input dimension that the first pass leaves neither batch nor feature is a position,
    # which the second pass propagates.
    trace = _Trace.begin(graph)
    trace.to_outputs()
    trace.to_inputs()
    for value in graph.input_values:
        trace.values[value] = tuple(each or Meaning.POSITION for each in trace.values[value])
    trace.to_outputs()
    trace.to_inputs()
    return trace


@dataclass
class _Trace:
    """Meanings inferred so far.

    Args:
        data: values that depend on the inputs.
        values: meaning of each dimension of each value.
        factors: meaning of each factor, by operator name.
    """

    graph: Graph
    data: set[Value]
    values: dict[Value, Meanings]
    factors: dict[str, dict[str, Meaning]]

    def of_factor(self, op: Op, factor: str) -> Meaning | None:
        """Meaning of a factor of `op`."""
        is_expert = op.target is experts and factor == "e"
        return Meaning.EXPERT if is_expert else self.factors[op.name].get(factor)

    @classmethod
    def begin(cls, graph: Graph) -> _Trace:
        inputs = graph.input_values
        batch = next((value.shape[0] for value in inputs if value.shape), None)
        values: dict[Value, Meanings] = {
            value: (None,) * len(value.shape) for value in graph.values()
        }
        for value in graph.parameters:
            values[value] = (Meaning.PARAMETER,) * len(value.shape)
        for value in inputs:
            if value.shape[:1] == (batch,):
                values[value] = (Meaning.BATCH, *values[value][1:])
        data = set(inputs)
        for op in graph.ops:
            if not data.isdisjoint(op.inputs):
                data.update(op.outputs)
        return cls(graph, data, values, {op.name: {} for op in graph.ops})

    def to_outputs(self) -> None:
        """Propagate meanings from inputs of operators to outputs."""
        for op in self.graph.ops:
            rule = rule_of(op)
            if rule is not None:
                op_factors = self.factors[op.name]
                op_factors.update(self._factor_meanings(op, rule))
                for value, dims in zip(op.outputs, rule.outputs, strict=True):
                    self._learn(value, dims, op_factors)

    def to_inputs(self) -> None:
        """Propagate meanings from outputs of operators to inputs: a mask created inside the model
        gets the batch dimension from the scores it masks."""
        for op in reversed(self.graph.ops):
            rule = rule_of(op)
            if rule is not None:
                op_factors = self.factors[op.name]
                for value, dims in zip(op.outputs, rule.outputs, strict=True):
                    for factor, meaning in zip(dims, self.values[value], strict=True):
                        if factor is not None and meaning is not None:
                            op_factors.setdefault(factor, meaning)
                for value, dims in zip(op.inputs, rule.inputs, strict=True):
                    self._learn(value, dims, op_factors)

    def _learn(self, value: Value, dims: Dims, factors: Mapping[str, Meaning]) -> None:
        def meaning(factor: str | None) -> Meaning | None:
            each = None if factor is None else factors.get(factor)
            return Meaning.FEATURE if each is Meaning.PARAMETER and value in self.data else each

        meanings = self.values[value]
        self.values[value] = tuple(
            each or meaning(factor) for each, factor in zip(meanings, dims, strict=True)
        )

    def _factor_meanings(self, op: Op, rule: ShardingRule) -> dict[str, Meaning]:
        result = {}
        for factor in rule.factors:
            tensors = zip(op.inputs, rule.inputs, strict=True)
            carriers = [(value, dims.index(factor)) for value, dims in tensors if factor in dims]
            meanings = {self.values[value][dim] for value, dim in carriers}
            of_data = {self.values[value][dim] for value, dim in carriers if value in self.data}
            if Meaning.PARAMETER in meanings:
                # Contracted with a parameter: a feature dimension, even of an input.
                if not any(factor in dims for dims in rule.outputs):
                    meanings.discard(Meaning.POSITION)
                elif of_data == {None}:
                    # The dimension has the meaning of the data that the parameter is combined
                    # with, which is not known yet.
                    meanings.discard(Meaning.PARAMETER)
            # The order of the enumeration: what a batch dimension touches is batch.
            values = [each.value for each in meanings if each is not None]
            if values:
                result[factor] = Meaning(min(values))
        return result
