"""Rewrite the graph of a micro-batch so that losses sum or average to the loss of the global
batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwright.core.graph.graph import (
    FIRST,
    Graph,
    Op,
    Origin,
    PassedDim,
    SampleReduction,
    Value,
    WholeBatch,
)
from shardwright.core.micro_batches.paired_graphs import (
    ARITHMETIC,
    NOT_CALLED,
    OTHER_ARGUMENTS,
    PairedGraphs,
    merged_arguments,
)
from shardwright.core.micro_batches.sample_states import UnsplittableError
from shardwright.core.micro_batches.target_counts import with_argument
from shardwright.core.rules.loss import SUM as SUM_REDUCTION
from shardwright.core.rules.notation import call_arguments
from shardwright.core.torch_internals import pytree

aten = torch.ops.aten


FILLED_LIKE = frozenset({"zeros_like", "ones_like", "full_like"})
"""Names of operators that read the shape of a tensor, but not its elements."""

ADDED_SUFFIXES = ("share", "mean", "mean_cast")
"""Suffixes in the names of added operators, such as `add_share`, added next to `add`."""


class MicroBatchGraph:
    """Builder of the graph of a micro-batch, operator by operator, from the graph of the global
    batch.

    Args:
        pair: graphs of the global batch and of a micro-batch. Operators and values passed to
            methods belong to the graph of the global batch.
        count: number of micro-batches.
    """

    def __init__(self, pair: PairedGraphs, count: int) -> None:
        self.pair, self.count = pair, count
        self.replaced: dict[Value, Value] = {}
        """Replacements in the graph of the micro-batch, by replaced value in that of the global
        batch."""
        self.shares: dict[Value, Value] = {}
        self.taken: dict[tuple[Value, PassedDim], Value] = {}
        """Buffers with the outputs of the prologue, by (output, argument `dim` of `take`)."""
        self.counts: list[Op] = []
        """Operators of the prologue that are not in the graph of the global batch."""
        self._ops: dict[Op, list[Op]] = {}
        self._names = {value.name for value in pair.micro.values()} | set(pair.micro.by_name)

    # Values

    def take(self, value: Value, dim: PassedDim) -> Value:
        """Return a new buffer through which micro-batches read `value`, an output of the prologue.

        Args:
            value: a value in the graph of the global batch.
            dim: dimension that is split into micro-batches; None to pass the full tensor to each
                micro-batch, `FIRST` to pass it to the first one and zeros to the others.
        """
        if (value, dim) not in self.taken:
            shape = list(value.shape)
            # The shape of the slice that one micro-batch reads.
            if isinstance(dim, int):
                shape[dim] //= self.count
            name = self._make_unique_name(f"whole_batch.{value.name}")
            self.taken[value, dim] = Value(name, tuple(shape), value.dtype, Origin.BUFFER)
        return self.taken[value, dim]

    def share(self, value: Value, reader: Op) -> Value:
        """Return a tensor whose sum over micro-batches is `value`.

        Floats are divided by the number of micro-batches. The prologue passes integers to the first
        micro-batch, and 0 to the others.

        Args:
            value: a value that is equal in all micro-batches.
            reader: the operator that reads the result. The division is inserted before `reader`.
        """
        # Exact, unlike a division.
        if not reader.output.dtype.is_floating_point:
            return self.take(value, FIRST)
        # One division for all readers, at the first of them in order of execution.
        if value not in self.shares:
            source = self._get_micro_batch_value(value, reader)
            args = (source, 1 / self.count)
            # An integer cannot be divided, so the result has the dtype to which the reader promotes
            # it.
            dtype = source.dtype if source.dtype.is_floating_point else reader.output.dtype
            # Behind the captured `reader`, but before its replacement, which is added later.
            self.shares[value] = self._insert_op_after(
                reader, aten.mul.Tensor, args, source, dtype, "share"
            )
        return self.shares[value]

    def pass_to_first(self, number: int, reader: Op) -> Value:
        """Return a scalar that is `number` in the first micro-batch, and 0 in all others.

        Args:
            number: an integer that `reader` adds.
            reader: the operator that reads the result.
        """
        dtype = reader.output.dtype
        made = Value(self._make_unique_name(f"{reader.name}_number"), (), dtype)
        options = {"dtype": dtype}
        full = Op(made.name, aten.full.default, ([], number), options, (made,))
        self.counts.append(replace(full, module=reader.module, source=reader.source))
        return self.take(made, FIRST)

    def _get_micro_batch_value(self, value: Value, reader: Op) -> Value:
        micro_value = self.replaced.get(value, self.pair.values.get(value))
        if micro_value is None:
            why = "the operator reads a value that does not exist in a micro-batch of one sample"
            raise UnsplittableError(reader, why)
        return micro_value

    def _make_unique_name(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    # Operators

    def emit(
        self,
        op: Op,
        dims: Sequence[int | None],
        outside: Iterable[Value] = (),
        shared: Iterable[Value] = (),
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        """Add `op` to the graph of the micro-batch.

        Arguments that are numbers have their values in the global batch, except sizes of tensors.

        Args:
            op: an operator in the graph of the global batch.
            dims: for each input that the prologue computes, the dimension that is split into
                micro-batches; None for inputs read in full and for all other inputs.
            outside: inputs that the prologue computes.
            shared: inputs that are divided by the number of micro-batches.
            numbers: new values of number arguments, by name.

        Raises:
            UnsplittableError: if the graph for one sample lacks an input of `op`, or lacks `op`
                itself and `op` is not arithmetic.
        """
        outside, shared = set(outside), set(shared)

        def read(value: Value, index: int) -> Value | None:
            if value in outside:
                return self.take(value, dims[index])
            return self.share(value, op) if value in shared else self.replaced.get(value)

        micro_op = self.pair.ops.get(op)
        # A number such as `len(x)` is 1 for one sample, so that the graph lacks `x / len(x)`.
        if micro_op is None:
            # Missing without a change, such as a view of a dimension of size 1: nothing to compute.
            changes = {*outside, *shared, *self.replaced}.intersection(op.inputs) or numbers
            if changes or self.pair.changed_numbers(op):
                self._insert_uncaptured_op(op, read, numbers or {})
            return
        args, kwargs, changed = merged_arguments(op, micro_op, read)
        for name, number in (numbers or {}).items():
            args, kwargs = with_argument(micro_op, args, kwargs, name, number)
        # Operators without a change stay as captured, so that most graphs are not rewritten at all.
        if changed or numbers:
            self._add_replacement(op, replace(micro_op, args=args, kwargs=kwargs))

    def _insert_uncaptured_op(
        self, op: Op, read: Callable[[Value, int], Value | None], numbers: Mapping[str, Any]
    ) -> None:
        """Insert an operator that captures for one sample omit, such as `x / len(x)`."""
        # Of arithmetic the shape of the result follows from broadcasting; of other operators it
        # does not.
        if op.short_name not in ARITHMETIC or len(op.outputs) > 1:
            raise UnsplittableError(op, NOT_CALLED)
        args, kwargs, _ = merged_arguments(
            op, op, lambda v, n: read(v, n) or self._get_micro_batch_value(v, op)
        )
        for name, number in numbers.items():
            args, kwargs = with_argument(op, args, kwargs, name, number)
        inserted = replace(op, args=args, kwargs=kwargs)
        shape = torch.broadcast_shapes(*(value.shape for value in inserted.inputs))  # type: ignore[no-untyped-call]
        name = self._make_unique_name(op.output.name)
        output = replace(op.output, name=name, shape=tuple(shape))
        self._ops.setdefault(op, []).append(replace(inserted, name=name, outputs=(output,)))
        self.replaced[op.output] = output

    def sum_over_targets(self, op: Op, count: Value) -> None:
        """Replace a mean over targets by a sum over targets, divided by `count`.

        Args:
            op: a loss for which `is_mean_over_targets` is true.
            count: scalar that the prologue computes for the global batch: number of valid targets,
                or sum of their class weights.

        Raises:
            UnsplittableError: if a micro-batch of one sample lacks `op`.
        """
        micro_op = self.pair.ops.get(op)
        if micro_op is None:
            raise UnsplittableError(op, NOT_CALLED)
        # `emit` may have replaced the loss already, for example for inputs of the prologue.
        made = self._ops[op][-1] if op in self._ops else micro_op
        args, kwargs = with_argument(micro_op, made.args, made.kwargs, "reduction", SUM_REDUCTION)
        summed = self._add_replacement(op, replace(made, args=args, kwargs=kwargs))
        arguments = (summed.output, self.take(count, None))
        # In the dtype of the count, float32 for half precision: bfloat16 has no odd integers above
        # 256.
        dtype, wide = summed.output.dtype, count.dtype
        mean = self._insert_op_after(op, aten.div.Tensor, arguments, summed.output, wide, "mean")
        if wide != dtype:
            mean = self._insert_op_after(op, aten.to.dtype, (mean, dtype), mean, dtype, "mean_cast")
        self.replaced[op.output] = mean

    def _add_replacement(self, op: Op, replacement: Op) -> Op:
        # New values, as values are compared by identity: readers refer to the replacement
        # explicitly.
        outputs = tuple(replace(value) for value in self.pair.ops[op].outputs)
        replacement = replace(replacement, outputs=outputs)
        emitted = self._ops.setdefault(op, [])
        # The last replacement of an operator wins.
        emitted[:] = [each for each in emitted if each.name != replacement.name]
        emitted.append(replacement)
        self.replaced.update(zip(op.outputs, outputs, strict=True))
        return replacement

    def _insert_op_after(
        self,
        op: Op,
        target: Any,
        args: tuple[Any, ...],
        source: Value,
        dtype: torch.dtype,
        suffix: str,
    ) -> Value:
        """Insert a new operator after the replacements of `op`, and return its output.

        Args:
            op: the operator that the new operator follows.
            target, args: target and arguments of the new operator.
            source: a value with the shape of the output.
            dtype: dtype of the output.
            suffix: one of `ADDED_SUFFIXES`.
        """
        near = self.pair.ops.get(op, op)
        name = self._make_unique_name(f"{near.name}_{suffix}")
        output = replace(source, name=name, dtype=dtype, origin=Origin.ACTIVATION, outer_dtype=None)
        made = replace(near, name=name, target=target, args=args, kwargs={}, outputs=(output,))
        self._ops.setdefault(op, []).append(replace(made, flattened=1))
        return output

    # Results

    def result(
        self,
        reduction: SampleReduction,
        outputs: Mapping[Value, SampleReduction | int],
        mixed: Iterable[Value],
        updates: Mapping[Value, SampleReduction | None],
    ) -> Graph:
        """Return the graph of a micro-batch with all changes.

        Args:
            reduction: whether the loss of the global batch is the mean or the sum of the losses of
                micro-batches.
            outputs: how to combine each output over micro-batches: a reduction, or the batch
                dimension to concatenate. Outputs without an entry are equal in all micro-batches.
            mixed: outputs that cannot be combined.
            updates: how to combine the new values of each buffer that is updated once per batch;
                None if they are equal.

        Raises:
            UnsplittableError: if an operator has other arguments in a micro-batch than in the
                global batch.
        """
        graph = self.pair.micro
        pairs = list(zip(self.pair.batch.output_values, graph.output_values, strict=True))
        updated_pairs = zip(self.pair.batch.updates, graph.updates, strict=True)
        pairs += [(of_batch, new) for (_, of_batch), (_, new) in updated_pairs]
        ends_of = {twin: self.replaced.get(value, twin) for value, twin in pairs}
        new_updates = tuple((before, ends_of[new]) for before, new in graph.updates)
        ends = (*(ends_of[value] for value in graph.output_values), *(v for _, v in new_updates))
        # Drops operators that the replacements have made unused.
        ops = list(_find_ops_computing_values(self._list_captured_and_added_ops(), ends))
        # Operators of the twin are matched one by one; those of a micro-batch of one sample need
        # proof.
        if self.pair.micro is not self.pair.twin:
            self.pair.check_operators(ops)
            for value, twin in pairs:
                # An output that is not replaced must be that of the batch.
                if ends_of[twin] is twin and not self.pair.are_paired(value, twin):
                    raise UnsplittableError(self.pair.batch.producer[value], OTHER_ARGUMENTS)
        ops = _rename_replaced_ops(ops, {op for ops in self._ops.values() for op in ops})
        read = {value for op in ops for value in op.inputs} | set(ends)
        # Buffers of dropped operators need no prologue.
        taken = {key: value for key, value in self.taken.items() if value in read}
        names = {value: ends_of[micro_value].name for value, micro_value in pairs}
        constants = {v: t for v, t in graph.constants.items() if v in read}
        return replace(
            graph,
            ops=tuple(ops),
            outputs=tuple(
                ends_of[leaf] if isinstance(leaf, Value) else leaf for leaf in graph.outputs
            ),
            updates=new_updates,
            python=self.pair.batch.python,
            buffers=(*graph.buffers, *taken.values()),
            constants=constants,
            loss=None if graph.loss is None else ends_of[graph.loss],
            whole_batch=WholeBatch(
                reduction,
                self._build_prologue([value for value, _ in taken]) if taken else None,
                tuple((value.name, dim) for (_, dim), value in taken.items()),
                tuple((names[value], each) for value, each in outputs.items()),
                tuple(names[value] for value in mixed),
                tuple((value.name, each) for value, each in updates.items()),
                rewritten=bool(self._ops),
            ),
        )

    def _list_captured_and_added_ops(self) -> list[Op]:
        """Return the operators of the micro-batch, each followed by added operators."""
        following: dict[Op | None, list[Op]] = {}
        before = None
        for op in self.pair.batch.ops:
            # New operators without a match follow the last operator before them that has one.
            before = self.pair.ops.get(op, before)
            following.setdefault(before, []).extend(self._ops.get(op, ()))
        first = following.get(None, [])
        return [*first, *(e for op in self.pair.micro.ops for e in (op, *following.get(op, ())))]

    def _build_prologue(self, values: Sequence[Value]) -> Graph:
        batch = self.pair.batch
        # Fills by shape, so that the prologue does not need the tensor whose shape they read, which
        # may depend on parameters.
        ops = tuple(
            _find_ops_computing_values(
                (*map(_replace_fill_like_by_full, batch.ops), *self.counts), values
            )
        )
        read = {value for op in ops for value in op.inputs} | set(values)
        return replace(
            batch,
            ops=ops,
            outputs=tuple(values),
            out_spec=pytree.tree_structure(tuple(values)),
            # Outputs of the prologue depend on no parameter by construction.
            parameters=(),
            buffers=tuple(v for v in batch.buffers if v in read),
            constants={v: t for v, t in batch.constants.items() if v in read},
            updates=(),
            tied={},
            loss=None,
            other_losses=(),
            frozen=(),
            module_tags={},
            call_tags=(),
            attributes=(),
        )


def _replace_fill_like_by_full(op: Op) -> Op:
    """Return `aten.full` of equal shape in place of an operator in `FILLED_LIKE`; other operators
    are returned unchanged."""
    if op.short_name not in FILLED_LIKE:
        return op
    number = call_arguments(op).get("fill_value", int(op.short_name == "ones_like"))
    arguments = (list(op.output.shape), number)
    return replace(op, target=aten.full.default, args=arguments, kwargs={"dtype": op.output.dtype})


def _find_ops_computing_values(ops: Iterable[Op], values: Iterable[Value]) -> list[Op]:
    """Return the operators among `ops` on which `values` depend, in order of execution."""
    needed, needed_ops = set(values), []
    for op in reversed(list(ops)):
        if needed.intersection(op.outputs):
            needed_ops.append(op)
            needed.update(op.inputs)
    return needed_ops[::-1]


def _rename_replaced_ops(ops: list[Op], new_ops: set[Op]) -> list[Op]:
    """Rename operators of a micro-batch, and their outputs, where a new operator has the same name.

    Args:
        ops: operators of a micro-batch.
        new_ops: the new operators among `ops`, which keep their names.
    """
    names = {op.name for op in ops if op in new_ops}
    renamed: dict[Value, Value] = {}
    result = []
    for op in ops:
        args, kwargs = op.arguments(lambda value: renamed.get(value, value))
        if op.name in names and op not in new_ops:
            for value in op.outputs:
                renamed[value] = replace(value, name=f"{value.name}_of_micro_batch")
            outputs = tuple(renamed[value] for value in op.outputs)
            name = f"{op.name}_of_micro_batch"
            op = replace(op, name=name, args=args, kwargs=kwargs, outputs=outputs)
        elif not renamed.keys().isdisjoint(op.inputs):
            op = replace(op, args=args, kwargs=kwargs)
        result.append(op)
    return result
