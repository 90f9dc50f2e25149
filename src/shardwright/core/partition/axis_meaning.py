"""Name mesh axes by the kind of parallelism that they serve.

Each tensor dimension has a *meaning*: the batch of the model's inputs, another input dimension (a
*position*), a dimension of a parameter, or a *feature*, a dimension of an activation that a
parameter introduced. An axis is named after the meanings of the dimensions that it shards:

| name of the axis | dimensions that the axis shards |
|---|---|
| `dp` | only the batch |
| `fsdp` | only the batch; the axis also shards the storage of parameters |
| `sp` | positions, and optionally features: attention heads between two all-to-alls |
| `tp` | parameters, and optionally features and positions, never the batch |
| `ep` | experts, and optionally any other dimension |

The storage of parameters alone does not name an axis. An axis that shards other combinations of
dimensions, or none, has a letter as its name. Several axes with the same name are numbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count, islice

from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.layout.axes import Axes, axis_names
from shardwright.core.micro_batches.batch_dims import sample_dims
from shardwright.core.partition.decisions import Decisions
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Dims, ShardingRule


class Meaning(Enum):
    """Meaning of a tensor dimension or of a factor.

    A factor whose dimensions have several meanings takes the first of them, in the order of this
    enumeration.
    """

    BATCH = auto()
    POSITION = auto()
    PARAMETER = auto()
    FEATURE = auto()
    EXPERT = auto()


Meanings = tuple[Meaning | None, ...]
"""Meaning of each dimension of a tensor; None for a dimension that is created inside the model,
such as a dimension of a mask."""


def name_axes(graph: Graph, num_axes: int, decisions: Decisions) -> tuple[str, ...]:
    """Return a name for each axis of a device matrix.

    Args:
        num_axes: number of axes of the device matrix.
        decisions: sharding decisions over the axes of this device matrix.
    """
    meanings: list[set[Meaning | None]] = [set() for _ in range(num_axes)]
    for meaning, axes in _iterate_sharded_meanings(graph, decisions):
        for axis in axes:
            meanings[axis].add(meaning)
    storage_axes = {axis for dims in decisions.storage.values() for axes in dims for axis in axes}
    # Dimensions without a meaning do not speak against any name.
    names = [
        _choose_axis_name(each - {None}, axis in storage_axes) for axis, each in enumerate(meanings)
    ]
    # A name that occurs once has no number: `tp`, not `tp0`.
    numbers = {name: count() for name in names if names.count(name) > 1}
    letters = islice(axis_names(), num_axes)
    return tuple(
        letter if name is None else f"{name}{next(numbers[name]) if name in numbers else ''}"
        for letter, name in zip(letters, names, strict=True)
    )


def _choose_axis_name(meanings: set[Meaning | None], shards_storage: bool) -> str | None:
    """Return the name of an axis that shards dimensions with `meanings`; None if the axis is to be
    named by a letter.

    Args:
        shards_storage: whether the axis shards the storage of a parameter.
    """
    # Experts first: their axis also shards tokens and the experts' parameters.
    if Meaning.EXPERT in meanings:
        return "ep"
    if meanings == {Meaning.BATCH}:
        return "fsdp" if shards_storage else "dp"
    # Mixed with other dimensions the batch is no data parallelism, and features alone may be either
    # tensor or sequence parallelism.
    if Meaning.BATCH in meanings or not meanings - {Meaning.FEATURE}:
        return None
    return "tp" if Meaning.PARAMETER in meanings else "sp"


def _iterate_sharded_meanings(
    graph: Graph, decisions: Decisions
) -> Iterator[tuple[Meaning | None, Axes]]:
    """Yield (meaning, mesh axes) for each sharded factor, and for each dimension of pinned outputs
    and sharded inputs."""
    trace = trace_meanings(graph)
    for op in graph.ops:
        for factor, axes in decisions.cuts.get(op.name, {}).items():
            yield trace.of_factor(op, factor), axes
        for value, dims in zip(op.outputs, decisions.outputs.get(op.name, ()), strict=False):
            yield from zip(trace.values[value], dims or (), strict=False)
    for value in graph.input_values:
        yield from zip(trace.values[value], decisions.arrivals.get(value.name, ()), strict=False)


def trace_meanings(graph: Graph) -> _InferredMeanings:
    """Return the inferred meanings of all dimensions and factors of `graph`.

    At first only the batch dimension of inputs and the dimensions of parameters have a meaning. A
    dimension that is contracted with a parameter is a feature; input dimensions that are neither
    batch nor feature are positions in the sequence.
    """
    # Twice: an input dimension that the first round leaves without a meaning is a position, which
    # the second round propagates.
    trace = _InferredMeanings.from_graph(graph)
    trace.propagate_to_outputs()
    trace.propagate_to_inputs()
    # After the propagation to inputs, which may find that dimensions of inputs are features.
    for value in graph.input_values:
        trace.values[value] = tuple(each or Meaning.POSITION for each in trace.values[value])
    trace.propagate_to_outputs()
    trace.propagate_to_inputs()
    return trace


@dataclass
class _InferredMeanings:
    """Meanings (batch, position, parameter or feature) inferred so far for dimensions and factors.

    Args:
        input_dependent: values that depend on the inputs of the model.
        values: meaning of each dimension of each value.
        factors: meaning of each factor of each operator, by operator name.
    """

    graph: Graph
    input_dependent: set[Value]
    values: dict[Value, Meanings]
    factors: dict[str, dict[str, Meaning]]

    def of_factor(self, op: Op, factor: str) -> Meaning | None:
        """Return the meaning of `factor` of `op`, or None if no meaning is inferred."""
        # `e` of `b s _, b s _, b s _, e _ i _, e _ i -> b s _`, the rule of `experts`.
        is_expert = op.target is experts and factor == "e"
        return Meaning.EXPERT if is_expert else self.factors[op.name].get(factor)

    @classmethod
    def from_graph(cls, graph: Graph) -> _InferredMeanings:
        """Return the meanings before propagation: only parameter dimensions and the batch dimension
        of inputs have one."""
        inputs = graph.input_values
        values: dict[Value, Meanings] = {
            value: (None,) * len(value.shape) for value in graph.values()
        }
        for value in graph.parameters:
            values[value] = (Meaning.PARAMETER,) * len(value.shape)
        for value, dim in sample_dims(graph).items():
            values[value] = (*(None,) * dim, Meaning.BATCH, *values[value][dim + 1 :])
        input_dependent = set(inputs)
        # One pass suffices, as operators follow the producers of their inputs.
        for op in graph.ops:
            if not input_dependent.isdisjoint(op.inputs):
                input_dependent.update(op.outputs)
        return cls(graph, input_dependent, values, {op.name: {} for op in graph.ops})

    def propagate_to_outputs(self) -> None:
        """Propagate meanings from the inputs of operators to their outputs, in graph order."""
        for op in self.graph.ops:
            rule = rule_of(op)
            if rule is not None:
                op_factors = self.factors[op.name]
                # Replaces what the previous round took from outputs: meanings of inputs take
                # precedence.
                op_factors.update(self._infer_factor_meanings(op, rule))
                for value, dims in zip(op.outputs, rule.outputs, strict=True):
                    self._copy_meanings_from_factors(value, dims, op_factors)

    def propagate_to_inputs(self) -> None:
        """Propagate meanings from the outputs of operators to their inputs, in reverse order.

        For example, a mask that is created inside the model gets its batch dimension from the
        attention scores to which it is added.
        """
        for op in reversed(self.graph.ops):
            rule = rule_of(op)
            if rule is not None:
                op_factors = self.factors[op.name]
                for value, dims in zip(op.outputs, rule.outputs, strict=True):
                    for factor, meaning in zip(dims, self.values[value], strict=True):
                        if factor is not None and meaning is not None:
                            # Meanings that inputs gave take precedence.
                            op_factors.setdefault(factor, meaning)
                for value, dims in zip(op.inputs, rule.inputs, strict=True):
                    self._copy_meanings_from_factors(value, dims, op_factors)

    def _copy_meanings_from_factors(
        self, value: Value, dims: Dims, factors: Mapping[str, Meaning]
    ) -> None:
        """Give each dimension of `value` without a meaning the meaning of its factor."""

        def meaning_of(factor: str | None) -> Meaning | None:
            meaning = None if factor is None else factors.get(factor)
            # An activation has features where the parameter has its own dimensions.
            is_feature = meaning is Meaning.PARAMETER and value in self.input_dependent
            return Meaning.FEATURE if is_feature else meaning

        # Meanings are only added: a dimension keeps the first one that it gets.
        meanings = self.values[value]
        self.values[value] = tuple(
            each or meaning_of(factor) for each, factor in zip(meanings, dims, strict=True)
        )

    def _infer_factor_meanings(self, op: Op, rule: ShardingRule) -> dict[str, Meaning]:
        """Return the meaning of each factor of `op`, derived from the input dimensions with this
        factor."""
        result = {}
        for factor in rule.factors:
            tensors = zip(op.inputs, rule.inputs, strict=True)
            factor_dims = [(value, dims.index(factor)) for value, dims in tensors if factor in dims]
            meanings = {self.values[value][dim] for value, dim in factor_dims}
            input_dependent_meanings = {
                self.values[value][dim]
                for value, dim in factor_dims
                if value in self.input_dependent
            }
            if Meaning.PARAMETER in meanings:
                # A factor that is contracted with a parameter is a feature, even of an input.
                if not any(factor in dims for dims in rule.outputs):
                    meanings.discard(Meaning.POSITION)
                elif input_dependent_meanings == {None}:
                    # The dimension will have the meaning of the data with which the parameter is
                    # combined, which is not inferred yet.
                    meanings.discard(Meaning.PARAMETER)
            # In the order of the enumeration: a dimension that is combined with the batch is batch.
            values = [each.value for each in meanings if each is not None]
            if values:
                result[factor] = Meaning(min(values))
        return result
