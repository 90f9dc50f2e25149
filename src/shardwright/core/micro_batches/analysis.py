"""Follows the samples of a batch from the inputs of a graph to its loss.

A micro-batch is a shard in time: the sharding rule of an operator also says what the operator
computes on a micro-batch. Means and sums over samples that follow from inputs alone, such as the
number of valid labels, are computed once for the global batch. Means and sums that depend on
parameters may pass through linear operators only, so that the loss is a mean or sum too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.core.capture.functions_in_full import AppliedFunction
from shardwright.core.graph.custom_ops import MEAN
from shardwright.core.graph.graph import Graph, Op, SampleReduction, Value
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.micro_batches.batch_norms import takes_statistics, use_of_statistics
from shardwright.core.micro_batches.linear_operators import ADDITIVE, LINEAR, dims_of_indexed_sum
from shardwright.core.micro_batches.micro_batch_graph import (
    FILLED_LIKE,
    MicroBatchGraph,
    count_of_targets,
    is_mean_over_targets,
)
from shardwright.core.micro_batches.paired_graphs import DIVIDES_BATCH, PairedGraphs
from shardwright.core.micro_batches.sample_states import (
    AVERAGE,
    POSITIONS,
    SUM,
    UNKNOWN,
    WHOLE,
    SampleState,
    UnsplittableError,
    sample_dim_of_index,
)
from shardwright.core.rules import is_random, rule_of
from shardwright.core.rules.notation import WithArguments, call_arguments
from shardwright.core.rules.rule import Dims, Local, ShardingRule
from shardwright.core.torch_internals.operators import OpOverload

CONSTANT = frozenset({"zeros", "ones", "full", "zeros_like", "ones_like", "full_like"})
"""Names of operators whose results are equal for all samples."""

DIVISIONS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "unbind"})
"""Names of operators that return parts of a tensor along a dimension."""

RESHAPES = frozenset({"view", "reshape", "unsqueeze", "squeeze", "to", "_to_copy", "alias"})


@dataclass
class Analysis:
    """Abstract interpretation of the graph of a batch: the `SampleState` of each value.

    Args:
        pair: graphs of the batch and of a micro-batch.
        count: number of micro-batches.
        per_micro_batch: whether batch norms take their statistics from each micro-batch.
        states: state of each value of the batch's graph.
        free: values that follow from inputs, buffers and constants alone, without random numbers.
        outside: values that the prologue computes for all samples.
        in_full: inputs with the batch size in dimension 0 that each micro-batch reads in full, and
            values that follow from these inputs alone.
        result: the changes to the graph of the micro-batch.
    """

    pair: PairedGraphs
    count: int
    per_micro_batch: bool = False
    states: dict[Value, SampleState] = field(default_factory=dict)
    free: set[Value] = field(default_factory=set)
    outside: set[Value] = field(default_factory=set)
    in_full: set[Value] = field(default_factory=set)
    result: MicroBatchGraph = field(init=False)

    def __post_init__(self) -> None:
        graph = self.pair.whole
        self.result = MicroBatchGraph(self.pair, self.count)
        updated = {before for before, _ in graph.updates}
        arriving = (*graph.input_values, *graph.buffers, *graph.constants)
        self.states.update((value, WHOLE) for value in (*arriving, *graph.parameters))
        self.free = {v for v in arriving if not v.requires_grad and v not in updated}
        if self.per_micro_batch:  # Running statistics differ between micro-batches.
            self.states.update((value, UNKNOWN) for value in updated)
        for value in graph.input_values:
            dims = self._varying_dims(value)
            if len(dims) == 1:
                (self.states[value],) = dims
        sizes = {v.shape[d] for v, d in self.states.items() if isinstance(d, int)}
        self.in_full = {
            value
            for value in graph.input_values
            if self.states[value] == WHOLE and value.shape and value.shape[0] in sizes
        }
        for value, tensor in graph.constants.items():
            own = self.pair.twin_values.get(value)
            other = None if own is None else self.pair.twin.constants[own]
            if other is None or not torch.equal(tensor, other):
                self.outside.add(value)

    def run(self) -> Graph:
        """Return the graph of a micro-batch, whose loss is a term of the loss of the batch.

        Raises:
            UnsplittableError: for the first operator on the path to the loss that micro-batches
                cannot compute.
        """
        graph = self.pair.whole
        on_path = set() if graph.loss is None else set(_ancestors(graph, graph.loss))
        for op in graph.ops:
            self._set_output_states(op, op in on_path)
        state = WHOLE if graph.loss is None else self.states[graph.loss]
        if graph.loss is not None and state == WHOLE:
            loss_op = graph.producer[graph.loss]
            raise UnsplittableError(loss_op, "reads the whole batch in every micro-batch")
        outputs: dict[Value, SampleReduction | int] = {}
        for value in graph.output_values:
            of_value = self.states[value]
            if of_value != WHOLE and of_value != POSITIONS and of_value != UNKNOWN:
                outputs[value] = of_value
        return self.result.result(SUM if state == SUM else AVERAGE, outputs)

    def _set_output_states(self, op: Op, on_path: bool) -> None:
        """Determine the states of an operator's outputs from the states of its inputs.

        Args:
            op: the operator.
            on_path: whether the loss depends on its outputs.
        """
        # The code of a `local_map` may draw random numbers or depend on other values.
        known = self.free.issuperset(op.inputs) or op.short_name in FILLED_LIKE
        free = known and not self._keeps_statistics(op)
        free = free and not is_random(op) and not isinstance(op.target, LocalCall)
        if free:
            self.free.update(op.outputs)
        try:
            self._check_input_states(op)
            states = self._output_states(op, free)
        except UnsplittableError:
            if not free and on_path:
                raise
            states = [WHOLE if free else UNKNOWN] * len(op.outputs)
            self.outside.update(op.outputs if free else ())
            for value in op.outputs:
                self.result.replaced.pop(value, None)
        for value, state in zip(op.outputs, states, strict=True):
            self.states[value] = state
            if free and state in (SUM, AVERAGE):
                self.states[value] = WHOLE
                self.outside.add(value)

    def _check_input_states(self, op: Op) -> None:
        # In training, running statistics do not change what a batch norm returns.
        read = op.inputs[:1] if self._keeps_statistics(op) else op.inputs
        if any(self.states[value] == UNKNOWN for value in read):
            raise UnsplittableError(op, "reads what mixes samples")

    def _keeps_statistics(self, op: Op) -> bool:
        """Whether an operator normalizes each micro-batch by its own statistics."""
        return self.per_micro_batch and takes_statistics(op)

    def _output_states(self, op: Op, free: bool) -> list[SampleState]:
        """Return the states of the outputs of an operator.

        Raises:
            UnsplittableError: if the operator mixes samples.
        """
        read = {self.states[value] for value in op.inputs}
        if POSITIONS in read:
            state = self._output_state_from_positions(op)
            if state is not None:
                return [state] * len(op.outputs)
            positions = [v for v in op.inputs if self.states[v] == POSITIONS]
            self.outside.update(positions)
            read = read - {POSITIONS} | {WHOLE}
        if not free:
            read |= self._split_values_of_prologue(op)
        if any(isinstance(state, int) for state in read):
            states = self._output_states_from_sample_inputs(op)
        elif read.intersection((SUM, AVERAGE)):
            states = self._output_states_from_reduced_inputs(op)
        else:
            states = self._output_states_from_shared_inputs(op, free)
        if self._keeps_statistics(op):
            states[1:] = [UNKNOWN] * (len(states) - 1)
        for value, state in zip(op.outputs, states, strict=True):
            if state != POSITIONS and self._varying_dims(value) != (
                {state} if isinstance(state, int) else set()
            ):
                raise UnsplittableError(op, "makes a shape that depends on the batch size")
        return states

    def _split_values_of_prologue(self, op: Op) -> set[SampleState]:
        """Split the inputs that the prologue computes for all samples, such as `x[permutation]`.

        Returns:
            Their batch dimensions.
        """
        split: set[SampleState] = set()
        for value in [each for each in dict.fromkeys(op.inputs) if each in self.outside]:
            dims = self._varying_dims(value)
            if len(dims) == 1 and -1 not in dims and value.shape[min(dims)] % self.count == 0:
                (dim,) = dims
                self.outside.remove(value)
                self.states[value] = dim
                self.result.replaced[value] = self.result.take(value, dim)
                split.add(dim)
        return split

    def _varying_dims(self, value: Value) -> set[int]:
        """Return the dimensions whose size depends on the batch size; {-1} if the number of
        dimensions does."""
        twin = self.pair.twin_values.get(value, value)
        if len(value.shape) != len(twin.shape):
            return {-1}
        pairs = zip(value.shape, twin.shape, strict=True)
        return {dim for dim, (size, twin_size) in enumerate(pairs) if size != twin_size}

    # Operators on values that are equal for all samples

    def _output_states_from_shared_inputs(self, op: Op, free: bool) -> list[SampleState]:
        if not self.in_full.isdisjoint(op.inputs):
            if any(value.requires_grad for value in op.outputs):
                raise UnsplittableError(op, "reads the whole batch in every micro-batch")
            self.in_full.update(op.outputs)
        if free and not self.outside.isdisjoint(op.inputs):
            self.outside.update(op.outputs)
            return [WHOLE] * len(op.outputs)
        if _has_own_backward(op) and any(value.requires_grad for value in op.outputs):
            # Each micro-batch passes a term of the gradient to it.
            raise UnsplittableError(op, "has a backward of its own, which may not be linear")
        if not op.outputs or not any(self._varying_dims(value) for value in op.outputs):
            self.result.emit(op, [None] * len(op.inputs), self.outside)
            return [WHOLE] * len(op.outputs)
        if self._is_arange_over_samples(op):
            return [POSITIONS]
        states: list[SampleState] = []
        for value in op.outputs:
            dims = self._varying_dims(value)
            if len(dims) != 1 or not self._is_constant_along(value, *dims):
                raise UnsplittableError(op, "makes a shape that depends on the batch size")
            states += dims
        self.result.emit(op, [None] * len(op.inputs), self.outside)
        return states

    def _is_arange_over_samples(self, op: Op) -> bool:
        """Whether an operator is `arange(len(x))`, as in `logits[arange(len(x)), last]`."""
        if op.short_name != "arange" or self.pair.changed_numbers(op):
            return False
        arguments = call_arguments(op)
        begins = arguments.get("start") in (0, None) and arguments.get("step") in (1, None)
        return begins and op.output.shape == (self._num_samples(),)

    def _num_samples(self) -> int:
        pairs = ((v, self.states[v]) for v in self.pair.whole.input_values)
        return next((v.shape[dim] for v, dim in pairs if isinstance(dim, int)), 1)

    def _is_constant_along(self, value: Value, dim: int) -> bool:
        """Whether a value that depends on no sample is constant along dimension `dim`."""
        if dim < 0:
            return False
        op = self.pair.whole.producer.get(value)
        rule = None if op is None else rule_of(op)
        if op is None or self.pair.changed_numbers(op) or not self.outside.isdisjoint(op.inputs):
            return False
        if op.short_name in ("expand", "repeat"):
            source = op.inputs[0]
            from_end = dim - len(value.shape)
            if from_end < -len(source.shape) or source.shape[from_end] == 1:
                return True
        if rule is None:
            return False
        if op.short_name in CONSTANT or (rule.random and not op.inputs):
            return True
        factor = rule.outputs[op.outputs.index(value)][dim]
        if factor is None or rule.reductions(op, {factor: 2}):
            return False
        read = zip(op.inputs, rule.inputs, strict=True)
        carriers = [(v, dims) for v, dims in read if factor in dims]
        return bool(carriers) and all(
            dims.count(factor) == 1 and self._is_constant_along(v, dims.index(factor))
            for v, dims in carriers
        )

    def _output_state_from_positions(self, op: Op) -> SampleState | None:
        """Return the state of the output of an operator that reads `POSITIONS`, or None if the
        operator is not supported.

        A reshape keeps the positions; indexing with them selects one element, or one slice, of each
        sample.
        """
        if op.short_name in RESHAPES and len(op.inputs) == 1:
            return POSITIONS
        if op.short_name == "index" and isinstance(op.args[1], (list, tuple)):
            sample_dim = sample_dim_of_index(op, self.states)
            if sample_dim is not None and self.outside.isdisjoint(op.inputs):
                self.result.emit(op, [None] * len(op.inputs))
                return sample_dim
        return None

    # Operators on samples

    def _output_states_from_sample_inputs(self, op: Op) -> list[SampleState]:
        if any(self.states[value] in (SUM, AVERAGE) for value in op.inputs):
            raise UnsplittableError(op, "reads a sum over all samples that depends on parameters")
        rule = rule_of(op)
        factor = None if rule is None else self._sample_factor(op, rule)
        summed_dims = dims_of_indexed_sum(op, self.states, self.outside)
        if factor is None and summed_dims is not None:
            shared = self._shared_values(op.inputs[:1])
            self.result.emit(op, summed_dims, self.outside.difference(shared), shared)
            return [SUM]
        if rule is None or factor is None:
            raise UnsplittableError(op, self._why_mixed(op))
        dims = [
            place.index(factor) if self._is_sliced(value, place, factor) else None
            for value, place in zip(op.inputs, rule.inputs, strict=True)
        ]
        self.result.emit(op, dims, self.outside, numbers=self._local_numbers(op, rule, factor))
        reduced: list[SampleState]
        if isinstance(op.target, LocalCall):
            reduced = [AVERAGE if op.target.is_mean(n) else SUM for n in range(len(op.outputs))]
        elif takes_statistics(op) or all(factor in place for place in rule.outputs):
            reduced = [SUM] * len(op.outputs)
        else:
            reduced = [self._reduced_state(op, rule, factor)] * len(op.outputs)
        return [
            place.index(factor) if factor in place else state
            for place, state in zip(rule.outputs, reduced, strict=True)
        ]

    def _why_mixed(self, op: Op) -> str:
        if self._keeps_statistics(op):
            return "normalizes samples that are not in its dimension 0"
        if op.short_name in DIVISIONS:
            return DIVIDES_BATCH
        return use_of_statistics(op) if takes_statistics(op) else "mixes samples"

    def _sample_factor(self, op: Op, rule: ShardingRule) -> str | None:
        """Return the factor of the batch dimension in the operator's rule; None if it mixes
        samples."""
        factors: set[str | None] = set()
        for value, place in zip(op.inputs, rule.inputs, strict=True):
            state = self.states[value]
            if isinstance(state, int):
                factors.add(place[state])
        if len(factors) != 1 or None in factors:
            return None
        (factor,) = factors
        assert factor is not None
        if any(place.count(factor) > 1 for place in (*rule.inputs, *rule.outputs)):
            return None
        for value, place in zip(op.inputs, rule.inputs, strict=True):
            # A value that depends on no sample must be equal for all samples: positional embeddings
            # along the batch dimension would differ between a micro-batch and the batch.
            if self._is_sliced(value, place, factor) and value not in self.outside:
                return None
        divides = rule.capacity.get(factor, 0) % self.count == 0
        # A reduction within the operator, as in batch norm, runs over all samples. In a mean over
        # targets it is the divisor, which the prologue computes.
        if self._keeps_statistics(op):
            reduces = self.states[op.inputs[0]] != 0
        else:
            reduces = bool(not is_mean_over_targets(op) and rule.reductions(op, {factor: 2}))
        return factor if divides and not reduces else None

    def _local_numbers(self, op: Op, rule: ShardingRule, factor: str) -> dict[str, Any]:
        """Return the numbers that an operator has on a shard of the batch, such as the groups of a
        norm, by argument name if they differ.

        Raises:
            UnsplittableError: if the operator depends on which shard it reads.
        """
        reduces = is_mean_over_targets(op) or takes_statistics(op)
        if rule.kernel is None or reduces or isinstance(op.target, LocalCall):
            return {}

        def index(factor: str) -> int:
            raise UnsplittableError(op, "depends on the positions of samples in the batch")

        factors = {name for place in (*rule.inputs, *rule.outputs) for name in place if name}
        counts = {name: self.count if name == factor else 1 for name in factors}
        pairs = zip(op.outputs, rule.outputs, strict=True)
        shapes = tuple(
            tuple(n // counts.get(name or "", 1) for n, name in zip(v.shape, place, strict=True))
            for v, place in pairs
        )
        kernel = rule.kernel(op, Local(counts, index, shapes))
        if not isinstance(kernel, WithArguments):
            return {}
        arguments = call_arguments(op)
        replaced = kernel.replacements.items()
        return {name: number for name, number in replaced if number != arguments[name]}

    def _is_sliced(self, value: Value, place: Dims, factor: str) -> bool:
        """Whether a micro-batch reads a slice of a value that depends on no sample.

        Args:
            value: an input of the operator.
            place: factors of the dimensions of `value`.
            factor: the factor of the batch dimension.
        """
        sliced = self.states[value] in (WHOLE, POSITIONS) and factor in place
        return sliced and value.shape[place.index(factor)] > 1

    def _reduced_state(self, op: Op, rule: ShardingRule, factor: str) -> SampleState:
        """Return the state of an output without batch dimension, a mean or sum over samples.

        Raises:
            UnsplittableError: if the operator reduces samples in another way.
        """
        if is_mean_over_targets(op):
            self._record_loss_denominator(op)
            return SUM
        reduction = call_arguments(op).get("reduction")
        averages = op.short_name == "mean" or reduction == MEAN
        # The kernel for shards, such as for rows of a table, may differ from the operator.
        runs_unchanged = rule.kernel is None or reduction is not None or averages
        if factor not in rule.reduced or rule.reductions(op, {factor: 2}) or not runs_unchanged:
            raise UnsplittableError(op, "reduces samples to other than their mean or sum")
        return AVERAGE if averages else SUM

    def _record_loss_denominator(self, op: Op) -> None:
        arguments = call_arguments(op)
        counted = [v for v in (arguments["target"], arguments["weight"]) if v is not None]
        if not self.free.issuperset(counted):
            raise UnsplittableError(
                op,
                "divides by a number of targets, or a sum of class weights, that does not follow"
                " from the inputs",
            )
        if all(value in self.free for value in op.inputs):
            return  # The prologue computes the loss.
        count, ops = count_of_targets(op)
        self.result.counts += ops
        self.result.sum_over_targets(op, count)

    # Operators on means and sums

    def _output_states_from_reduced_inputs(self, op: Op) -> list[SampleState]:
        if op.short_name in CONSTANT:
            self.result.emit(op, [None] * len(op.inputs), self.outside)
            return [WHOLE] * len(op.outputs)
        nonlinear = UnsplittableError(op, "is not linear in a mean or sum over samples")
        name, arguments = op.short_name, call_arguments(op)
        reduced = [v for v in op.inputs if self.states[v] in (SUM, AVERAGE)]
        if not all(value.dtype.is_floating_point for value in op.outputs):
            raise nonlinear
        if name in ADDITIVE:
            condition = [arguments["condition"]] if name == "where" else []
            if any(value in reduced for value in condition):
                raise nonlinear
            state = self._state_of_sum(op, [v for v in op.inputs if v not in condition])
            return [state] * len(op.outputs)
        alone = len(reduced) == 1 and arguments.get("rounding_mode") is None
        # A quotient is linear in its numerator only, a linear layer only without bias.
        alone = alone and (name != "div" or op.args[0] is reduced[0])
        alone = alone and (name != "linear" or arguments["bias"] is None)
        if name not in LINEAR or not alone:
            raise nonlinear
        self.result.emit(op, [None] * len(op.inputs), self.outside)
        return [self.states[reduced[0]]] * len(op.outputs)

    def _state_of_sum(self, op: Op, operands: list[Value]) -> SampleState:
        """Return the state of the output of an additive operator.

        If it is `SUM`, terms that depend on no sample are divided by the number of micro-batches.

        Args:
            op: the operator.
            operands: its inputs that are added.
        """
        if all(self.states[value] != SUM for value in operands):
            # mean(x) + c is the mean of x + c.
            self.result.emit(op, [None] * len(op.inputs), self.outside)
            return AVERAGE
        shared = self._shared_values([v for v in operands if self.states[v] != SUM])
        arguments = call_arguments(op)
        numbers = {
            name: arguments[name] / self.count
            for name in ("self", "input", "other")
            if isinstance(arguments.get(name), (int, float)) and arguments[name]
        }
        outside = self.outside.difference(shared)
        self.result.emit(op, [None] * len(op.inputs), outside, shared, numbers)
        return SUM

    def _shared_values(self, values: Sequence[Value]) -> Sequence[Value]:
        """Return `values`, which each micro-batch divides by the number of micro-batches, and
        replace those that the prologue computes by inputs from it."""
        for value in [each for each in values if each in self.outside]:
            self.result.replaced[value] = self.result.take(value, None)
        return values


def _has_own_backward(op: Op) -> bool:
    """Whether an operator is a custom operator, or a custom autograd function computed in full."""
    if isinstance(op.target, LocalCall):
        return isinstance(op.target.body, AppliedFunction)
    return isinstance(op.target, OpOverload) and op.target.namespace not in ("aten", "shardwright")


def _ancestors(graph: Graph, value: Value) -> list[Op]:
    needed, ops = {value}, []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            ops.append(op)
            needed.update(() if op.short_name in FILLED_LIKE else op.inputs)
    return ops
