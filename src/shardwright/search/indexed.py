"""The graph as plain integers: what a search reads thousands of times a second.

Operators and values are numbers, factors are positions in the rule's `factors`. Operators with the
same rule share one `OpKind`, so that the tables of a deep model are those of one of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from shardwright.graph.graph import Graph, Op, Value
from shardwright.rules import rule as rule_of
from shardwright.rules.rule import Dims, ShardingRule

NO_CUT = -1
"""The choice of an operator that is not cut on an axis, and the dim of a tensor that is whole."""


@dataclass(frozen=True, eq=False, slots=True)
class OpKind:
    """One sharding rule in numbers.

    Args:
        factors: names of the factors that may be cut, and of those that a main operator would
            choose if they had size.
        limits: for each factor the number that its number of parts must divide.
        inputs, outputs: for each tensor the factor of each dim, `NO_CUT` where it stays whole.
        read, left: `read[factor][i]` is the dim of input i that cutting `factor` cuts, `NO_CUT` if
            none; the last row is that of no cut, which `read[NO_CUT]` therefore finds.
        sizes: elements of the whole tensors, inputs, then outputs.
        choices: factors that a main operator chooses among, in the order that breaks ties.
        labels: for each choice its name in the log.
        weight: index of the input that `mem_coeff` weighs.
        exclusive: for each factor the factors that must be whole for it to be cut.
    """

    factors: tuple[str, ...]
    limits: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    read: tuple[tuple[int, ...], ...]
    left: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    choices: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    weight: int | None = None
    exclusive: tuple[tuple[int, ...], ...] = ()
    is_main: bool = False

    def divides(self, factor: int, parts: Sequence[int], axis_size: int) -> bool:
        """Whether `factor`, in `parts` already, can be cut once more by `axis_size`."""
        return self.limits[factor] % (parts[factor] * axis_size) == 0

    def elements(self, parts: Sequence[int]) -> tuple[int, ...]:
        """Elements of the current shard of each tensor, inputs, then outputs."""
        found = []
        for size, dims in zip(self.sizes, (*self.inputs, *self.outputs), strict=True):
            for factor in dims:
                if factor != NO_CUT:
                    size //= parts[factor]
            found.append(size)
        return tuple(found)

    def carries(self, factor: int) -> tuple[bool, ...]:
        """For each tensor, inputs, then outputs, whether cutting `factor` cuts it."""
        return tuple(dim != NO_CUT for dim in (*self.read[factor], *self.left[factor]))


def op_kind(rule: ShardingRule | None, op: Op) -> OpKind:
    """The numbers of `rule`; without a rule those of an operator that cannot be cut."""
    tensors = (*op.inputs, *op.outputs)
    sizes = tuple(value.numel for value in tensors)
    if rule is None:
        whole = tuple((NO_CUT,) * len(value.shape) for value in tensors)
        num_inputs = len(op.inputs)
        no_input, no_output = (NO_CUT,) * num_inputs, (NO_CUT,) * len(op.outputs)
        return OpKind(
            (), (), whole[:num_inputs], whole[num_inputs:], (no_input,), (no_output,), sizes
        )
    main = rule.main
    labels = tuple(main.labels) if main is not None else ()
    factors = tuple(dict.fromkeys((*rule.factors, *labels)))
    index = {factor: i for i, factor in enumerate(factors)}

    def numbered(dims: Dims) -> tuple[int, ...]:
        return tuple(index.get(f, NO_CUT) if f is not None else NO_CUT for f in dims)

    inputs = tuple(numbered(dims) for dims in rule.inputs)
    outputs = tuple(numbered(dims) for dims in rule.outputs)
    rows = (*range(len(index)), None)
    barred: list[list[int]] = [[] for _ in index]
    for one, other in main.exclusive if main is not None else ():
        barred[index[one]].append(index[other])
        barred[index[other]].append(index[one])
    return OpKind(
        factors=factors,
        limits=_limits(rule, factors, tensors),
        inputs=inputs,
        outputs=outputs,
        read=tuple(tuple(_dim_of(row, dims) for dims in inputs) for row in rows),
        left=tuple(tuple(_dim_of(row, dims) for dims in outputs) for row in rows),
        sizes=sizes,
        choices=tuple(index[f] for f in labels),
        labels=_axis_names(main.labels) if main is not None else (),
        weight=main.weight if main is not None else None,
        exclusive=tuple(tuple(others) for others in barred),
        is_main=main is not None,
    )


def _dim_of(factor: int | None, dims: tuple[int, ...]) -> int:
    return dims.index(factor) if factor is not None and factor in dims else NO_CUT


def _limits(
    rule: ShardingRule, factors: Sequence[str], tensors: Sequence[Value]
) -> tuple[int, ...]:
    """For each factor the greatest number that divides its capacity and every dim that has it."""
    limits = {f: rule.capacity[f] if rule.may_cut(f) else 1 for f in factors}
    for value, dims in zip(tensors, (*rule.inputs, *rule.outputs), strict=True):
        for size, factor in zip(value.shape, dims, strict=True):
            if factor in limits:
                limits[factor] = gcd(limits[factor], size)
    return tuple(limits.values())


def _axis_names(labels: Mapping[str, str]) -> tuple[str, ...]:
    """`I-axis`, or `I-axis (b)` where the operator has several factors with that letter."""
    letters = list(labels.values())
    return tuple(
        f"{letter}-axis ({factor})" if letters.count(letter) > 1 else f"{letter}-axis"
        for factor, letter in labels.items()
    )


@dataclass(frozen=True, eq=False, slots=True)
class IndexedGraph:
    """Operators and values by number, operators in the order of the graph.

    Args:
        names: of the operators.
        kinds: of the operators.
        main: the operators that are decided by cost.
        inputs, outputs: for each operator the values that it reads and makes.
        producer: for each value the operator and the place among its outputs; None for what no
            operator makes.
        consumers: for each value the operators that read it and the places among their inputs.
        data: for each value whether it depends on an input of the model (else it is made of
            parameters, buffers and constants alone).
        batch: for each value whether it is an input of the model whose dim 0 is the batch.
        speaks: for each operator and input whether the operator should be whole if that input is:
            false for a broadcast operand and, beside data, for what is not data.
        batch_size: dim 0 of the first tensor input of the model; None without one.
    """

    names: tuple[str, ...]
    kinds: tuple[OpKind, ...]
    main: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    producer: tuple[tuple[int, int] | None, ...]
    consumers: tuple[tuple[tuple[int, int], ...], ...]
    data: tuple[bool, ...]
    batch: tuple[bool, ...]
    speaks: tuple[tuple[bool, ...], ...]
    batch_size: int | None


def index_graph(graph: Graph) -> IndexedGraph:
    """Numbers the operators and values of `graph` and looks up the rules."""
    number: dict[Value, int] = {value: i for i, value in enumerate(graph.values())}
    inputs = tuple(tuple(number[v] for v in op.inputs) for op in graph.ops)
    outputs = tuple(tuple(number[v] for v in op.outputs) for op in graph.ops)
    batch_size = next((v.shape[0] for v in graph.input_values if v.shape), None)
    batch = [False] * len(number)
    data = [False] * len(number)
    for value in graph.input_values:
        data[number[value]] = True
        batch[number[value]] = bool(value.shape) and value.shape[0] == batch_size
    producer: list[tuple[int, int] | None] = [None] * len(number)
    consumers: list[list[tuple[int, int]]] = [[] for _ in number]
    for op, (read, made) in enumerate(zip(inputs, outputs, strict=True)):
        depends = any(data[v] for v in read)
        for place, v in enumerate(read):
            consumers[v].append((op, place))
        for place, v in enumerate(made):
            producer[v] = (op, place)
            data[v] = depends
    kinds = _kinds(graph)
    return IndexedGraph(
        names=tuple(op.name for op in graph.ops),
        kinds=kinds,
        main=tuple(op for op, kind in enumerate(kinds) if kind.is_main),
        inputs=inputs,
        outputs=outputs,
        producer=tuple(producer),
        consumers=tuple(tuple(uses) for uses in consumers),
        data=tuple(data),
        batch=tuple(batch),
        speaks=_speaking(kinds, inputs, data),
        batch_size=batch_size,
    )


def _kinds(graph: Graph) -> tuple[OpKind, ...]:
    """One kind for each rule object (equal operators share one) and each operator without."""
    rules = [rule_of(op) for op in graph.ops]
    known: dict[int, OpKind] = {}
    found = []
    for op, rule in zip(graph.ops, rules, strict=True):
        if rule is None:
            found.append(op_kind(None, op))
            continue
        if id(rule) not in known:
            known[id(rule)] = op_kind(rule, op)
        found.append(known[id(rule)])
    return tuple(found)


def _speaking(
    kinds: Sequence[OpKind], inputs: Sequence[tuple[int, ...]], data: Sequence[bool]
) -> tuple[tuple[bool, ...], ...]:
    known: dict[tuple[object, ...], tuple[bool, ...]] = {}
    found = []
    for kind, read in zip(kinds, inputs, strict=True):
        is_data = tuple(data[v] for v in read)
        key = (id(kind), is_data)
        if key not in known:
            known[key] = _speaks(kind, is_data)
        found.append(known[key])
    return tuple(found)


def _speaks(kind: OpKind, is_data: tuple[bool, ...]) -> tuple[bool, ...]:
    counted = is_data if any(is_data) else (True,) * len(is_data)
    carried = [{f for f in dims if f != NO_CUT and kind.limits[f] > 1} for dims in kind.inputs]
    everything = set().union(*(c for c, counts in zip(carried, counted, strict=True) if counts))
    return tuple(
        counts and factors == everything for factors, counts in zip(carried, counted, strict=True)
    )
