"""The graph as plain integers, for the inner loops of the searches.

Operators and values are numbered in graph order; factors by their position in `OpType.factors`.
Operators with equal rules share one `OpType`, so that a deep model needs the cost tables of only
one of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from weakref import WeakKeyDictionary

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.micro_batches.batch_dims import sample_dims
from shardwright.core.rules import rule_of as rule_of
from shardwright.core.rules.rule import Dims, ShardingRule, num_rules

NO_CUT = -1
"""Sentinel for "not sharded over this axis", instead of the index of a factor of an operator or of
a dim of a tensor.

The value is -1 so that `input_dims[NO_CUT]` and `output_dims[NO_CUT]` are the last rows.
"""


@dataclass(frozen=True, slots=True)
class CostedTensor:
    """Size of an operator's tensor in the symbolic cost.

    Args:
        size: number of elements of the full tensor.
        factors: the factors whose cuts shard the tensor.
    """

    size: int
    factors: frozenset[int]

    def elements(self, shard_counts: Sequence[int]) -> int:
        """Return the number of elements of a shard, given the number of shards of each factor."""
        # Exact, as only numbers of shards that divide the sizes are ever chosen.
        return self.size // prod(shard_counts[factor] for factor in self.factors)


@dataclass(frozen=True, eq=False, slots=True)
class OpType:
    """A sharding rule with numbered factors, shared by all operators with this rule.

    Args:
        factors: names of the factors that may be cut, and of factors of size 1 that the rule of a
            main operator labels.
        limits: for each factor the largest number of shards; valid numbers of shards divide it.
        inputs, outputs: for each tensor the factor of each dim; `NO_CUT` if the dim cannot be cut.
            If two joined factors cut a dim, the factor that cuts fewer dims is listed: for
            attention, `s` for the sequence of the queries, and `NO_CUT` for that of the keys, which
            only `ring` cuts.
        input_dims, output_dims: `input_dims[factor][i]` is the dim of input i that cutting `factor`
            shards; `NO_CUT` if it shards none. The last row, `input_dims[NO_CUT]`, is for no cut.
        choices: the factors that the symbolic search chooses from; ties go to the first.
        labels: name of each choice in the log, `I-axis` to `K-axis` for a matrix product.
        weight: index of the input whose memory is weighted by `mem_coeff`; None if no input is.
        exclusive: for each factor of a main operator the factors that must not be cut with it.
        joined: pairs of factors that cut the same dims, of which at most one may be cut.
        is_main: whether the symbolic search decides operators of this type by cost; other operators
            follow neighbors.
        tensors: sizes of the inputs, then of the outputs.
        costed_tensors: sizes of the inputs and outputs in the symbolic cost. They differ from
            `tensors` for an embedding, which costs the same as `one_hot(ids) @ table`.
    """

    factors: tuple[str, ...]
    limits: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    input_dims: tuple[tuple[int, ...], ...]
    output_dims: tuple[tuple[int, ...], ...]
    tensors: tuple[CostedTensor, ...]
    choices: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    weight: int | None = None
    exclusive: tuple[tuple[int, ...], ...] = ()
    joined: tuple[tuple[int, int], ...] = ()
    is_main: bool = False
    costed_tensors: tuple[CostedTensor, ...] = ()

    @property
    def is_lookup(self) -> bool:
        """Whether the operator looks up rows of its weight, as an embedding does."""
        # `_tensors_in_symbolic_cost` changes the sizes of lookups only.
        return self.costed_tensors != self.tensors and self.is_main

    def shard_counts(
        self, choices: Sequence[int], sizes: Sequence[int], except_axis: int
    ) -> tuple[int, ...]:
        """Return the number of shards of each factor over all axes but `except_axis`.

        Args:
            choices: for each axis the factor that it cuts, or `NO_CUT`.
            sizes: the number of devices along each axis.
        """
        shard_counts = [1] * len(self.factors)
        for axis, choice in enumerate(choices):
            if axis != except_axis and choice != NO_CUT:
                shard_counts[choice] *= sizes[axis]
        return tuple(shard_counts)

    def divides(self, factor: int, shard_counts: Sequence[int], axis_size: int) -> bool:
        """Whether one more mesh axis, of `axis_size` devices, may cut `factor`.

        Args:
            shard_counts: number of shards of each factor over the other axes.
        """
        # All axes that cut a factor count together, whatever their order.
        if self.limits[factor] % (shard_counts[factor] * axis_size):
            return False
        # Joined factors cut the same dim of the queries: cut by both, it would be sharded twice.
        pairs = (pair for pair in self.joined if factor in pair)
        return all(shard_counts[other] == 1 for pair in pairs for other in pair if other != factor)


def op_type_of(rule: ShardingRule | None, op: Op) -> OpType:
    """Return the `OpType` of operators with `rule`; without a rule, an `OpType` without factors."""
    # Without factors an operator can only be replicated.
    if rule is None:
        rule = ShardingRule(
            tuple((None,) * len(value.shape) for value in op.inputs),
            tuple((None,) * len(value.shape) for value in op.outputs),
            capacity={},
        )
    values, main = (*op.inputs, *op.outputs), rule.main
    labels = main.labels if main is not None else {}
    # Labeled factors of size 1 too: the log lists their choice as impossible.
    factors = tuple(dict.fromkeys((*rule.factors, *labels)))
    index = {factor: i for i, factor in enumerate(factors)}

    # `NO_CUT` for a factor in `joined`, such as `ring`: no operator follows a neighbor into it.
    def numbered(dims: Dims) -> tuple[int, ...]:
        return tuple(
            NO_CUT if f is None or f in rule.joined else index.get(f, NO_CUT) for f in dims
        )

    tensors = tuple(
        CostedTensor(value.numel, frozenset(index[f] for f in rule.factors_of(dims) if f in index))
        for value, dims in zip(values, (*rule.inputs, *rule.outputs), strict=True)
    )
    factors_and_none = (*factors, None)
    # For example J and K of a matrix product, of which at most one is cut.
    excluded: list[list[int]] = [[] for _ in index]
    for first, second in main.exclusive if main is not None else ():
        excluded[index[first]].append(index[second])
        excluded[index[second]].append(index[first])
    return OpType(
        factors=factors,
        limits=_max_shard_counts(rule, factors, values),
        inputs=tuple(numbered(dims) for dims in rule.inputs),
        outputs=tuple(numbered(dims) for dims in rule.outputs),
        input_dims=tuple(
            tuple(_first_dim_cut_by_factor(rule, f, dims) for dims in rule.inputs)
            for f in factors_and_none
        ),
        output_dims=tuple(
            tuple(_first_dim_cut_by_factor(rule, f, dims) for dims in rule.outputs)
            for f in factors_and_none
        ),
        tensors=tensors,
        choices=tuple(index[f] for f in labels),
        labels=_logged_axis_names(labels),
        weight=main.weight if main is not None else None,
        exclusive=tuple(tuple(factors_of_one) for factors_of_one in excluded),
        joined=tuple((index[f], index[o]) for f, o in rule.joined.items() if {f, o} <= {*index}),
        is_main=main is not None,
        costed_tensors=_tensors_in_symbolic_cost(rule, tensors, index),
    )


def _first_dim_cut_by_factor(rule: ShardingRule, factor: str | None, dims: Dims) -> int:
    """Return the index of the first dim that cutting `factor` shards, or `NO_CUT`.

    Args:
        dims: the factor of each dim of a tensor.
    """
    cut = (dim for dim, name in enumerate(dims) if factor in rule.factors_of_dim(name))
    return next(cut, NO_CUT)


def _tensors_in_symbolic_cost(
    rule: ShardingRule, tensors: tuple[CostedTensor, ...], index: Mapping[str, int]
) -> tuple[CostedTensor, ...]:
    """Return the sizes of `tensors` in the symbolic cost (see `OpType.costed_tensors`); () if the
    operator has no symbolic cost."""
    if rule.main is None:
        return ()
    costed = list(tensors)
    # K is contracted. Where no input but the weight carries K, the operator looks up rows: its
    # other inputs contain indices, each of which counts as a one-hot row of K elements.
    for factor in (f for f, letter in rule.main.labels.items() if letter == "K"):
        contracted, other_inputs = (
            index[factor],
            [i for i in range(len(rule.inputs)) if i != rule.main.weight],
        )
        if not any(contracted in costed[i].factors for i in other_inputs):
            for i in other_inputs:
                tensor = costed[i]
                size = tensor.size * rule.capacity[factor]
                costed[i] = CostedTensor(size, tensor.factors | {contracted})
    return tuple(costed)


def _max_shard_counts(
    rule: ShardingRule, factors: Sequence[str], values: Sequence[Value]
) -> tuple[int, ...]:
    """Return for each factor the greatest common divisor of its capacity and the sizes of all dims
    with the factor."""
    # 1 for factors that cannot be sharded, as labeled ones of size 1.
    limits = {f: rule.capacity[f] if rule.can_shard(f) else 1 for f in factors}
    for value, dims in zip(values, (*rule.inputs, *rule.outputs), strict=True):
        for size, name in zip(value.shape, dims, strict=True):
            for factor in filter(limits.__contains__, rule.factors_of_dim(name)):
                # Dims with one factor may differ in size, and all must be divisible.
                limits[factor] = gcd(limits[factor], size)
    return tuple(limits.values())


def _logged_axis_names(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the name of each labeled factor in the log: `I-axis`, or `I-axis (b)` if several
    factors have the letter I.

    Args:
        labels: letter of each factor.
    """
    letters = list(labels.values())
    return tuple(
        f"{letter}-axis ({factor})" if letters.count(letter) > 1 else f"{letter}-axis"
        for factor, letter in labels.items()
    )


@dataclass(frozen=True, eq=False, slots=True)
class IndexedGraph:
    """A graph whose operators and values are numbered in graph order.

    Args:
        names: name of each operator.
        op_types: type of each operator.
        main: indices of the operators that the symbolic search decides by cost.
        joined: indices of the operators with joined factors (`ShardingRule.joined`).
        inputs, outputs: for each operator the indices of its input and output values.
        producer: (operator, output index) that computes each value; None for parameters, buffers,
            constants and inputs of the model.
        consumers: for each value the (operator, input index) of each operator that reads the value.
        depends_on_input: for each value whether it depends on an input of the model (else only on
            parameters, buffers and constants).
        batch_dims: for each value the batch dimension if it is an input of the model that has one,
            else `NO_CUT`.
        replicates_op: for each operator and input whether a replicated input makes the operator
            replicated. False for a broadcast operand, and for a parameter if another operand
            depends on an input of the model.
        batch_size: size of the batch; None if the model has no tensor input.
    """

    names: tuple[str, ...]
    op_types: tuple[OpType, ...]
    main: tuple[int, ...]
    joined: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    producer: tuple[tuple[int, int] | None, ...]
    consumers: tuple[tuple[tuple[int, int], ...], ...]
    depends_on_input: tuple[bool, ...]
    batch_dims: tuple[int, ...]
    replicates_op: tuple[tuple[bool, ...], ...]
    batch_size: int | None


def replicated_outputs(graph: Graph) -> frozenset[Value]:
    """Return the model outputs that are replicated: the loss and scalars, or all if there is no
    loss."""
    return frozenset(
        value
        for value in graph.output_values
        if graph.loss is None or value is graph.loss or not value.shape
    )


def index_graph(graph: Graph) -> IndexedGraph:
    """Return `graph` with numbered operators and values; cached until another rule is
    registered."""
    rule_count, cached = num_rules(), _INDEXED_GRAPHS.get(graph)
    if cached is None or cached[0] != rule_count:
        cached = _INDEXED_GRAPHS[graph] = rule_count, _build_indexed_graph(graph)
    return cached[1]


_INDEXED_GRAPHS: WeakKeyDictionary[Graph, tuple[int, IndexedGraph]] = WeakKeyDictionary()
"""Cached (number of registered rules at indexing, indexed graph), by graph. Rules may be registered
at any time, and a cached graph must not hide a new rule."""


def _build_indexed_graph(graph: Graph) -> IndexedGraph:
    value_index: dict[Value, int] = {value: i for i, value in enumerate(graph.values())}
    inputs = tuple(tuple(value_index[v] for v in op.inputs) for op in graph.ops)
    outputs = tuple(tuple(value_index[v] for v in op.outputs) for op in graph.ops)
    sampled = sample_dims(graph)
    batch_size = next((value.shape[dim] for value, dim in sampled.items()), None)
    batch_dims = [NO_CUT] * len(value_index)
    data = [False] * len(value_index)
    for value in graph.input_values:
        data[value_index[value]] = True
        batch_dims[value_index[value]] = sampled.get(value, NO_CUT)
    producer: list[tuple[int, int] | None] = [None] * len(value_index)
    consumers: list[list[tuple[int, int]]] = [[] for _ in value_index]
    for op, (read, written) in enumerate(zip(inputs, outputs, strict=True)):
        # Operators come in graph order, so the flags of their inputs are final.
        depends = any(data[v] for v in read)
        for index, v in enumerate(read):
            consumers[v].append((op, index))
        for index, v in enumerate(written):
            producer[v] = (op, index)
            data[v] = depends
    op_types = _op_type_of_each_op(graph)
    return IndexedGraph(
        names=tuple(op.name for op in graph.ops),
        op_types=op_types,
        main=tuple(op for op, op_type in enumerate(op_types) if op_type.is_main),
        joined=tuple(op for op, op_type in enumerate(op_types) if op_type.joined),
        inputs=inputs,
        outputs=outputs,
        producer=tuple(producer),
        consumers=tuple(tuple(uses) for uses in consumers),
        depends_on_input=tuple(data),
        batch_dims=tuple(batch_dims),
        replicates_op=_find_replicating_inputs_of_ops(op_types, inputs, data),
        batch_size=batch_size,
    )


def _op_type_of_each_op(graph: Graph) -> tuple[OpType, ...]:
    """Return the `OpType` of each operator: one per rule object, and one per operator without a
    rule."""
    rules = [rule_of(op) for op in graph.ops]
    by_rule: dict[int, OpType] = {}
    op_types = []
    for op, rule in zip(graph.ops, rules, strict=True):
        if rule is None:
            op_types.append(op_type_of(None, op))
            continue
        # `rule_of` returns one object for all operators with equal shapes and arguments, so that
        # the layers of a deep model share their types.
        if id(rule) not in by_rule:
            by_rule[id(rule)] = op_type_of(rule, op)
        op_types.append(by_rule[id(rule)])
    return tuple(op_types)


def _find_replicating_inputs_of_ops(
    op_types: Sequence[OpType],
    inputs: Sequence[tuple[int, ...]],
    is_input_dependent: Sequence[bool],
) -> tuple[tuple[bool, ...], ...]:
    cached: dict[tuple[object, ...], tuple[bool, ...]] = {}
    flags = []
    for op_type, read in zip(op_types, inputs, strict=True):
        input_dependent = tuple(is_input_dependent[v] for v in read)
        # By type and flags, as the layers of a deep model have the same few combinations.
        key = (id(op_type), input_dependent)
        if key not in cached:
            cached[key] = _find_replicating_inputs(op_type, input_dependent)
        flags.append(cached[key])
    return tuple(flags)


def _find_replicating_inputs(
    op_type: OpType, input_dependent: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Return, for each input of an operator, whether a replicated input makes the operator
    replicated.

    Args:
        input_dependent: for each input whether it depends on the model's inputs, not only on
            parameters.
    """
    # An input that carries all factors decides; a bias or a mask that lacks some is broadcast.
    counted = input_dependent if any(input_dependent) else (True,) * len(input_dependent)
    # Factors that no axis can cut do not count: an input that lacks one is as good as complete.
    factors_of = [
        {f for f in dims if f != NO_CUT and op_type.limits[f] > 1} for dims in op_type.inputs
    ]
    all_factors = set().union(*(c for c, counts in zip(factors_of, counted, strict=True) if counts))
    return tuple(
        counts and factors == all_factors
        for factors, counts in zip(factors_of, counted, strict=True)
    )
