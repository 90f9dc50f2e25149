"""The graph as plain integers: what a search reads thousands of times a second.

Operators and values are numbers, factors are positions in the rule's `factors`. Operators with the
same rule share one `OpKind`, so that the tables of a deep model are those of one of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from weakref import WeakKeyDictionary

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.rules import rule_of as rule_of
from shardwright.core.rules.rule import Dims, ShardingRule, num_rules

NO_CUT = -1
"""The choice of an operator that is not cut on an axis, and the dim of a tensor that is whole."""


@dataclass(frozen=True, slots=True)
class PricedTensor:
    """A tensor as the cost of its operator counts it: its elements and the factors it carries."""

    size: int
    factors: frozenset[int]

    def elements(self, parts: Sequence[int]) -> int:
        """Elements of the current shard."""
        return self.size // prod(parts[factor] for factor in self.factors)


@dataclass(frozen=True, eq=False, slots=True)
class OpKind:
    """One sharding rule in numbers.

    Args:
        factors: names of the factors that may be cut, and of those that a main operator would
            choose if they had size.
        limits: for each factor the number that its number of parts must divide.
        inputs, outputs: for each tensor the factor of each dim, `NO_CUT` where it stays whole; of
            factors that are joined the other one.
        input_dims, output_dims: `input_dims[factor][i]` is the dim of input i that cutting `factor`
            cuts, `NO_CUT` if none; the last row is that of no cut, which is `input_dims[NO_CUT]`.
        choices: factors that a main operator chooses among, in the order that breaks ties.
        labels: for each choice its name in the log.
        weight: index of the input that `mem_coeff` weighs.
        exclusive: for each factor the factors that must be whole for a main operator to choose it.
        joined: pairs of factors that cut the same dims, of which only one may be cut.
        is_main: whether it is decided by cost.
        tensors: elements and factors of each tensor, inputs, then outputs.
        priced: the same as the cost of the operator counts them. Indices that look up rows count
            as the one-hot rows that they stand for: an embedding costs what the product
            `one_hot(ids) @ table` costs.
    """

    factors: tuple[str, ...]
    limits: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    input_dims: tuple[tuple[int, ...], ...]
    output_dims: tuple[tuple[int, ...], ...]
    tensors: tuple[PricedTensor, ...]
    choices: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    weight: int | None = None
    exclusive: tuple[tuple[int, ...], ...] = ()
    joined: tuple[tuple[int, int], ...] = ()
    is_main: bool = False
    priced: tuple[PricedTensor, ...] = ()

    @property
    def looks_up(self) -> bool:
        """Whether it looks up rows, as an embedding, rather than computing with all."""
        return self.priced != self.tensors and self.is_main

    def parts(self, choices: Sequence[int], sizes: Sequence[int], but: int) -> tuple[int, ...]:
        """In how many parts the choices on all axes `but` one cut each factor."""
        parts = [1] * len(self.factors)
        for axis, choice in enumerate(choices):
            if axis != but and choice != NO_CUT:
                parts[choice] *= sizes[axis]
        return tuple(parts)

    def divides(self, factor: int, parts: Sequence[int], axis_size: int) -> bool:
        """Whether `factor`, in `parts` already, can be cut once more by `axis_size`."""
        if self.limits[factor] % (parts[factor] * axis_size):
            return False
        pairs = (pair for pair in self.joined if factor in pair)
        return all(parts[one] == 1 for pair in pairs for one in pair if one != factor)


def op_kind(rule: ShardingRule | None, op: Op) -> OpKind:
    """The numbers of `rule`; without a rule those of an operator that cannot be cut."""
    if rule is None:
        rule = ShardingRule(
            tuple((None,) * len(value.shape) for value in op.inputs),
            tuple((None,) * len(value.shape) for value in op.outputs),
            capacity={},
        )
    values, main = (*op.inputs, *op.outputs), rule.main
    labels = main.labels if main is not None else {}
    factors = tuple(dict.fromkeys((*rule.factors, *labels)))
    index = {factor: i for i, factor in enumerate(factors)}

    def numbered(dims: Dims) -> tuple[int, ...]:
        return tuple(
            NO_CUT if f is None or f in rule.joined else index.get(f, NO_CUT) for f in dims
        )

    tensors = tuple(
        PricedTensor(value.numel, frozenset(index[f] for f in rule.carried(dims) if f in index))
        for value, dims in zip(values, (*rule.inputs, *rule.outputs), strict=True)
    )
    rows = (*factors, None)
    barred: list[list[int]] = [[] for _ in index]
    for one, other in main.exclusive if main is not None else ():
        barred[index[one]].append(index[other])
        barred[index[other]].append(index[one])
    return OpKind(
        factors=factors,
        limits=_limits(rule, factors, values),
        inputs=tuple(numbered(dims) for dims in rule.inputs),
        outputs=tuple(numbered(dims) for dims in rule.outputs),
        input_dims=tuple(tuple(_dim_of(rule, row, dims) for dims in rule.inputs) for row in rows),
        output_dims=tuple(tuple(_dim_of(rule, row, dims) for dims in rule.outputs) for row in rows),
        tensors=tensors,
        choices=tuple(index[f] for f in labels),
        labels=_axis_names(labels),
        weight=main.weight if main is not None else None,
        exclusive=tuple(tuple(others) for others in barred),
        joined=tuple((index[f], index[o]) for f, o in rule.joined.items() if {f, o} <= {*index}),
        is_main=main is not None,
        priced=_priced(rule, tensors, index),
    )


def _dim_of(rule: ShardingRule, factor: str | None, dims: Dims) -> int:
    """The dim that cutting `factor` cuts."""
    cut = (dim for dim, name in enumerate(dims) if factor in rule.cutting(name))
    return next(cut, NO_CUT)


def _priced(
    rule: ShardingRule, tensors: tuple[PricedTensor, ...], index: Mapping[str, int]
) -> tuple[PricedTensor, ...]:
    if rule.main is None:
        return ()
    priced = list(tensors)
    for factor in (f for f, letter in rule.main.labels.items() if letter == "K"):
        summed, others = (
            index[factor],
            [i for i in range(len(rule.inputs)) if i != rule.main.weight],
        )
        if not any(summed in priced[i].factors for i in others):
            for i in others:
                one = priced[i]
                size = one.size * rule.capacity[factor]
                priced[i] = PricedTensor(size, one.factors | {summed})
    return tuple(priced)


def _limits(rule: ShardingRule, factors: Sequence[str], values: Sequence[Value]) -> tuple[int, ...]:
    """For each factor the greatest number that divides its capacity and every dim that has it."""
    limits = {f: rule.capacity[f] if rule.may_cut(f) else 1 for f in factors}
    for value, dims in zip(values, (*rule.inputs, *rule.outputs), strict=True):
        for size, name in zip(value.shape, dims, strict=True):
            for factor in filter(limits.__contains__, rule.cutting(name)):
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
        constrains: for each operator and input whether a whole input keeps the operator whole:
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
    constrains: tuple[tuple[bool, ...], ...]
    batch_size: int | None


def whole_outputs(graph: Graph) -> frozenset[Value]:
    """The outputs that a model returns whole: of a model with a loss that and scalars, else all."""
    return frozenset(
        value
        for value in graph.output_values
        if graph.loss is None or value is graph.loss or not value.shape
    )


def index_graph(graph: Graph) -> IndexedGraph:
    """Numbers the operators and values of `graph` and looks up the rules."""
    rules, known = num_rules(), _KNOWN.get(graph)
    if known is None or known[0] != rules:
        known = _KNOWN[graph] = rules, _indexed(graph)
    return known[1]


_KNOWN: WeakKeyDictionary[Graph, tuple[int, IndexedGraph]] = WeakKeyDictionary()
"""Graphs in numbers, each with the number of rules that were registered when it was read."""


def _indexed(graph: Graph) -> IndexedGraph:
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
    for op, (read, written) in enumerate(zip(inputs, outputs, strict=True)):
        depends = any(data[v] for v in read)
        for place, v in enumerate(read):
            consumers[v].append((op, place))
        for place, v in enumerate(written):
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
        constrains=_constraining(kinds, inputs, data),
        batch_size=batch_size,
    )


def _kinds(graph: Graph) -> tuple[OpKind, ...]:
    """One kind for each rule object (equal operators share one) and each operator without."""
    rules = [rule_of(op) for op in graph.ops]
    known: dict[int, OpKind] = {}
    kinds = []
    for op, rule in zip(graph.ops, rules, strict=True):
        if rule is None:
            kinds.append(op_kind(None, op))
            continue
        if id(rule) not in known:
            known[id(rule)] = op_kind(rule, op)
        kinds.append(known[id(rule)])
    return tuple(kinds)


def _constraining(
    kinds: Sequence[OpKind], inputs: Sequence[tuple[int, ...]], data: Sequence[bool]
) -> tuple[tuple[bool, ...], ...]:
    known: dict[tuple[object, ...], tuple[bool, ...]] = {}
    flags = []
    for kind, read in zip(kinds, inputs, strict=True):
        is_data = tuple(data[v] for v in read)
        key = (id(kind), is_data)
        if key not in known:
            known[key] = _constrains(kind, is_data)
        flags.append(known[key])
    return tuple(flags)


def _constrains(kind: OpKind, is_data: tuple[bool, ...]) -> tuple[bool, ...]:
    counted = is_data if any(is_data) else (True,) * len(is_data)
    carried = [{f for f in dims if f != NO_CUT and kind.limits[f] > 1} for dims in kind.inputs]
    everything = set().union(*(c for c, counts in zip(carried, counted, strict=True) if counts))
    return tuple(
        counts and factors == everything for factors, counts in zip(carried, counted, strict=True)
    )
