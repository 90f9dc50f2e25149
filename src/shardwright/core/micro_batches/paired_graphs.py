"""Pair the graphs of one model for two batch sizes.

A Python number such as `len(x)` is a constant in each graph, so only a comparison of graphs shows
which constants depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.micro_batches.paired_views import keeps_elements, read_equal_elements, viewed
from shardwright.core.micro_batches.sample_states import UnsplittableError
from shardwright.core.rules.notation import call_arguments, schema_parameters
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload

SIZES = frozenset({"size", "sizes", "shape", "repeats", "output_size", "split_sizes"})
"""Names of size arguments of PyTorch's operators.

Graphs are compared without sizes, which may depend on the batch size, but with shapes of results.
"""

ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "pow"})
"""Names of operators that capture omits if a number makes them the identity, such as `x / 1`."""

NOT_CALLED = "the model calls the operator for the full batch, but not for a micro-batch"
FEWER_TENSORS = "the operator returns fewer tensors for a micro-batch than for the batch"
CALLED_ONCE = "the model calls the operator for one batch size, but not for another"
DIVIDES_BATCH = "the operator splits the batch into chunks"
OTHER_ARGUMENTS = "the arguments of the operator depend on the batch size"
TAKES_PART = "the operator selects some samples of the batch"
NOT_PROPORTIONAL = "the operator reads a tensor whose size is not proportional to the batch size"
OTHER_PYTHON = "`forward` reads or changes other Python state for a micro-batch than for the batch"
DEPENDENCES_ON_SIZE = (
    *(NOT_CALLED, FEWER_TENSORS, CALLED_ONCE, DIVIDES_BATCH, OTHER_ARGUMENTS),
    *(TAKES_PART, NOT_PROPORTIONAL, OTHER_PYTHON),
)
"""Error texts about operators that depend on the batch size."""


@dataclass(frozen=True)
class PairedGraphs:
    """Graphs of the global batch and of a micro-batch, with their matching operators and values.

    Args:
        batch: graph of the global batch.
        micro: graph of a micro-batch.
        twin: graph with the same operators as `batch` for another batch size: `micro` or, if the
            operators of `micro` differ, the graph of 2 or 4 micro-batches.
    """

    batch: Graph
    micro: Graph
    twin: Graph

    @cached_property
    def twin_ops(self) -> Mapping[Op, Op]:
        return dict(zip(self.batch.ops, self.twin.ops, strict=True))

    @cached_property
    def twin_values(self) -> Mapping[Value, Value]:
        return dict(_pair_values(self.batch, self.twin, self.twin_ops))

    @cached_property
    def ops(self) -> Mapping[Op, Op]:
        """Operators of `micro`, by the matching operator of `batch`.

        Operators of a micro-batch of one sample are matched by their calls and inputs, since
        capture broadcasts dimensions of size 1, or drops them from views.
        """
        if self.micro is self.twin:
            return self.twin_ops
        calls = self._match_ops_by_call()
        ops: dict[Op, Op] = {}
        values = dict(_pair_values(self.batch, self.micro, ops))
        for op in self.batch.ops:
            # In order of execution: inputs of an operator are matched before it.
            micro_op = calls.get(op)
            if micro_op is None or len(op.inputs) != len(micro_op.inputs):
                continue
            views = _ValueMatchUpToViews(self, ops, values)
            read = zip(map(views.source_of_inserted, op.inputs), micro_op.inputs, strict=True)
            same_number = len(op.outputs) == len(micro_op.outputs)
            if same_number and all(views.are_paired(*pair) for pair in read):
                ops[op] = micro_op
                values.update(zip(op.outputs, micro_op.outputs, strict=True))
        return ops

    def _match_ops_by_call(self) -> Mapping[Op, Op]:
        """Match operators of both graphs that have equal target, source line and name.

        Arithmetic operators are matched by their order on the line: a micro-batch of one sample
        lacks some of them, such as `x / len(x)`, which changes the names of the others.
        """
        own_groups = _group_ops_by_call(self.micro.ops)
        calls: dict[Op, Op] = {}
        # Same call, source line and module: operators of one line are then told apart by name or
        # order.
        for key, group in _group_ops_by_call(self.batch.ops).items():
            own_group = own_groups.get(key, [])
            in_order = group[0].short_name in ARITHMETIC
            if in_order and len(group) != len(own_group):
                # Arithmetic that is missing for one sample has a number that depends on the batch
                # size: `x / 1`.
                group = [op for op in group if not self.changed_numbers(op)]
            if len(group) != len(own_group):
                continue
            pairs = zip(group, own_group, strict=True)
            calls.update(pair for pair in pairs if in_order or pair[0].name == pair[1].name)
        return calls

    @cached_property
    def values(self) -> Mapping[Value, Value]:
        """Values of `micro`, by the matching value of `batch`."""
        return dict(_pair_values(self.batch, self.micro, self.ops))

    def are_paired(self, value: Value, micro_value: Value) -> bool:
        """Whether two values match up to dimensions of size 1.

        Args:
            value: a value of `batch`.
            micro_value: a value of `micro`.
        """
        return _ValueMatchUpToViews(self, self.ops, self.values).are_paired(value, micro_value)

    def check_operators(self, ops: Iterable[Op]) -> None:
        """Check that each operator of the rewritten graph matches an operator of `batch`, or is a
        view.

        Args:
            ops: operators of the rewritten graph of a micro-batch.

        Raises:
            UnsplittableError: for the first operator that has other arguments than its match, or
                that is not a view and has no match.
        """
        whole_ops = {micro_op: op for op, micro_op in self.ops.items()}
        for made in ops:
            # Added operators have no counterpart in the captured graph.
            micro_op = self.micro.by_name.get(made.name)
            op = None if micro_op is None else whole_ops.get(micro_op)
            if micro_op is None or (op is None and keeps_elements(micro_op)):
                continue
            if op is None:
                why = "the model calls the operator for a micro-batch, but not for the full batch"
                raise UnsplittableError(micro_op, why)
            # A number may have become a tensor, the last input of `made` only.
            read = zip(op.inputs, micro_op.inputs, made.inputs, strict=False)
            # An argument that was replaced is right by construction.
            paired = all(twin is not arg or self.are_paired(v, twin) for v, twin, arg in read)
            if not paired or not _have_equal_arguments_except_numbers(op, micro_op):
                raise UnsplittableError(op, OTHER_ARGUMENTS)

    def shape_of_micro_batch(self, value: Value) -> Sequence[int]:
        """Return the shape of `value`, a value of `batch` or `micro`, in a micro-batch."""
        twin = self.twin_values.get(value)
        if twin is None or len(twin.shape) != len(value.shape):
            return value.shape
        pairs = zip(value.shape, twin.shape, strict=True)
        return [
            size if size == other else size // self._num_micro_batches_in_batch
            for size, other in pairs
        ]

    def is_proportional(self, value: Value, dim: int) -> bool:
        """Whether the size of a dimension of a value of `batch` is a fixed multiple of the batch
        size."""
        inputs = zip(self.batch.input_values, self.twin.input_values, strict=True)
        pairs = (pair for a, b in inputs for pair in zip(a.shape, b.shape, strict=True))
        # Any dimension that depends on the batch size gives the ratio of the two batches.
        size, twin_size = next((pair for pair in pairs if pair[0] != pair[1]), (1, 1))
        return value.shape[dim] * twin_size == self.twin_values[value].shape[dim] * size

    @cached_property
    def _num_micro_batches_in_batch(self) -> int:
        inputs = zip(self.batch.input_values, self.micro.input_values, strict=True)
        pairs = (pair for a, b in inputs for pair in zip(a.shape, b.shape, strict=True))
        # Dimensions other than the batch give 1.
        return max((size // micro_size for size, micro_size in pairs if micro_size), default=1)

    def changed_numbers(self, op: Op) -> bool:
        """Whether a number argument of `op`, such as that of `x / len(x)`, depends on the batch
        size.

        Sizes, such as the shape of a view, are not compared.
        """
        twin = self.twin_ops[op]
        sizes = _find_size_arguments(op, twin)
        return numbers_in_arguments(op, sizes) != numbers_in_arguments(twin, sizes)


@dataclass(frozen=True)
class _ValueMatchUpToViews:
    """Match between the values of two graphs that differ in views.

    Args:
        pair: the graphs of the global batch and of a micro-batch.
        ops, values: for each matched operator (value) of `pair.batch`, the operator (value) of
            `pair.micro`.
    """

    pair: PairedGraphs
    ops: Mapping[Op, Op]
    values: Mapping[Value, Value]

    def are_paired(self, value: Value, micro_value: Value) -> bool:
        """Whether `value` of `pair.batch` and `micro_value` of `pair.micro` match up to dimensions
        of size 1."""
        if self.values.get(value) is micro_value:
            return True
        batch, micro = self.pair.batch, self.pair.micro
        of_batch = viewed(value, batch, self.ops)
        of_micro_batch = viewed(micro_value, micro, set(self.ops.values()))
        source, own_source = of_batch.source, of_micro_batch.source
        # Constants cannot be paired where one graph has more of them.
        if self.values.get(source) is not own_source and not (
            source not in self.values
            and source in batch.constants
            and own_source in micro.constants
        ):
            return False
        return read_equal_elements(of_batch, of_micro_batch, self.pair.shape_of_micro_batch)

    def source_of_inserted(self, value: Value) -> Value:
        """Return `x` if `value` is the result of `x / len(x)`; otherwise `value`.

        Capture omits this division for one sample.
        """
        op = self.pair.batch.producer.get(value)
        while (
            op is not None
            and op not in self.ops
            and op.short_name in ARITHMETIC
            and self.pair.changed_numbers(op)
        ):
            value = op.inputs[0]
            op = self.pair.batch.producer.get(value)
        return value


def _group_ops_by_call(ops: Iterable[Op]) -> Mapping[tuple[object, str, str], list[Op]]:
    """Group operators by target, source line and module."""
    groups: dict[tuple[object, str, str], list[Op]] = {}
    for op in ops:
        groups.setdefault((op.target, op.source, op.module), []).append(op)
    return groups


def _pair_values(graph: Graph, other: Graph, ops: Mapping[Op, Op]) -> Iterator[tuple[Value, Value]]:
    yield from zip(graph.input_values, other.input_values, strict=True)
    for values, others in (
        (graph.parameters, other.parameters),
        (graph.buffers, other.buffers),
    ):
        # By name, as one of the graphs may lack some.
        by_name = {value.name: value for value in others}
        yield from ((value, by_name[value.name]) for value in values if value.name in by_name)
    # Constants have no common names, so they are paired in order.
    if len(graph.constants) == len(other.constants):
        yield from zip(graph.constants, other.constants, strict=True)
    for op, other_op in ops.items():
        yield from zip(op.outputs, other_op.outputs, strict=True)


def different_operator(graph: Graph, larger: Graph) -> tuple[Op, str] | None:
    """Return the first operator that differs between two graphs, with the reason.

    Sizes and numbers may differ; None if nothing else does.

    Args:
        graph: graph of a micro-batch.
        larger: graph of a larger batch.
    """
    paired = dict(_pair_values(larger, graph, {}))
    # Where one graph has more constants, these cannot be paired, and any constant matches another.
    constants = len(graph.constants) != len(larger.constants)
    # Lengths are compared last, so that the first operator that differs is named.
    for op, larger_op in zip(graph.ops, larger.ops, strict=False):
        if op.target != larger_op.target:
            return larger_op, NOT_CALLED
        if len(op.outputs) != len(larger_op.outputs):
            return larger_op, FEWER_TENSORS
        pairs = list(zip(larger_op.inputs, op.inputs, strict=False))
        same = len(op.inputs) == len(larger_op.inputs) and all(
            paired.get(value) is micro_value
            or (constants and value in larger.constants and micro_value in graph.constants)
            for value, micro_value in pairs
        )
        if not same or not _have_equal_arguments_except_numbers(larger_op, op):
            return larger_op, OTHER_ARGUMENTS
        paired.update(zip(larger_op.outputs, op.outputs, strict=True))
    if len(graph.ops) != len(larger.ops):
        longer_ops = max(graph.ops, larger.ops, key=len)
        return longer_ops[-1], CALLED_ONCE
    return None


def _find_size_arguments(op: Op, matching_op: Op) -> frozenset[str]:
    """Return the names of the size arguments of `op`, which may differ between batch sizes.

    Args:
        op: an operator in the graph of the global batch.
        matching_op: the matching operator in the graph of another batch size.
    """
    # The names of sizes are those of PyTorch; an argument of a custom operator may mean anything.
    if not isinstance(op.target, OpOverload) or op.target.namespace not in ("aten", "shardwright"):
        return frozenset()
    if op.short_name == "arange" and op.output.shape != matching_op.output.shape:
        return SIZES | {"end"}
    # `end` is a size only where the result grows with it, as in `x[: len(y)]`.
    if op.short_name == "slice":
        sizes = [each.output.shape[call_arguments(each)["dim"]] for each in (op, matching_op)]
        if sizes[0] != sizes[1]:
            return SIZES | {"end"}
    return SIZES


def _have_equal_arguments_except_numbers(op: Op, matching_op: Op) -> bool:
    """Whether two matching operators have equal arguments apart from tensors, numbers and sizes."""
    arguments, others = call_arguments(op), call_arguments(matching_op)
    if arguments.keys() != others.keys():
        return False
    sizes = _find_size_arguments(op, matching_op)
    # The first element of a range may not depend on the batch size where the last one does.
    fixed = ("start", "step") if "end" in sizes else ()
    if any(arguments.get(name) != others.get(name) for name in fixed):
        return False
    pairs = ((arguments[name], others[name]) for name in arguments.keys() - sizes)
    return all(_are_equal_except_numbers(*map(pytree.tree_leaves, pair)) for pair in pairs)


def _are_equal_except_numbers(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    def type_of_leaf(leaf: Any) -> Any:
        types = (Value, (int, float, complex))
        # A flag, such as `descending`, is no number.
        is_flag = isinstance(leaf, bool)
        return leaf if is_flag else next((each for each in types if isinstance(leaf, each)), leaf)

    # The dimensions of a permutation are fewer where views drop those of size 1.
    numbers = {*map(type_of_leaf, (*leaves, *others))} == {(int, float, complex)}
    return numbers or [*map(type_of_leaf, leaves)] == [*map(type_of_leaf, others)]


def numbers_in_arguments(op: Op, sizes: frozenset[str]) -> dict[str, object]:
    """Return the numbers in the arguments of `op`, with keys such as `"dim 0"`.

    Args:
        op: an operator.
        sizes: names of arguments to omit.
    """
    numbers: dict[str, object] = {}
    for name, argument in call_arguments(op).items():
        if name not in sizes:
            leaves = pytree.tree_leaves(argument)
            numbers |= {
                f"{name} {index}": leaf
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, (int, float, complex))
            }
    return numbers


def merged_arguments(
    op: Op, micro: Op, read: Callable[[Value, int], Value | None]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments of `micro`, with numbers other than sizes taken from `op`.

    Args:
        op: an operator in the graph of the global batch.
        micro: the matching operator in the graph of a micro-batch.
        read: returns the replacement of an input of `op`, given the input and its index in
            `op.inputs`; None to read the input of `micro`.

    Returns:
        (positional arguments, keyword arguments, whether an argument differs from that of `micro`).
    """
    index, changed, sizes = 0, False, _find_size_arguments(op, micro)

    def merged(name: str, leaf: Any, micro_leaf: Any) -> Any:
        nonlocal index, changed
        result = micro_leaf
        # Values are counted in the order of `op.inputs`, which is that of the leaves.
        if isinstance(leaf, Value):
            result = read(leaf, index) or micro_leaf
            index += 1
        # A number of the batch, such as `1 / len(x)`, so that terms add up to the loss of the
        # batch.
        elif isinstance(leaf, (int, float, complex)) and name not in sizes and leaf != micro_leaf:
            result = leaf
        changed = changed or result is not micro_leaf
        return result

    def merged_argument(name: str, argument: Any, micro_argument: Any) -> Any:
        leaves, _ = pytree.tree_flatten(argument)
        own_leaves, spec = pytree.tree_flatten(micro_argument)
        if len(leaves) != len(own_leaves):  # A shape with another number of dimensions.
            return micro_argument
        pairs = zip(leaves, own_leaves, strict=True)
        return pytree.tree_unflatten([merged(name, *pair) for pair in pairs], spec)

    defaults = schema_parameters(op.target)
    num_positional = max(len(op.args), len(micro.args))
    names = [*defaults, *map(str, range(len(defaults), num_positional))]
    passed = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    own_passed = {**dict(zip(names, micro.args, strict=False)), **micro.kwargs}
    # An argument that equals its default is not passed: one of the graphs may lack it.
    arguments, own_arguments = {**defaults, **passed}, {**defaults, **own_passed}
    result = {
        name: merged_argument(name, arguments[name], own_arguments[name])
        for name in {**passed, **own_passed}
    }
    args = tuple(result.pop(name) for name in names[:num_positional])
    return args, result, changed
