"""One level of the symbolic search: the choices of operators on one axis, and their propagation.

On this axis a decided operator reads and writes each tensor replicated, or sharded along one dim. A
neighbor without a cost model cuts the factor that it has at this dim of the shared tensor.

`relu(linear(x))`, linear cut on J → its output is sharded on dim 1 → relu cuts the factor of dim 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from shardwright.core.search.indexed_graph import NO_CUT, IndexedGraph

UNDECIDED = -2
"""The choice of an undecided operator. The value is less than `NO_CUT` and all factors, so that the
maximum of several neighbors' choices is a decided one."""


class AxisLevel:
    """Choices of all operators on one mesh axis, with their propagation to neighbors.

    Args:
        shard_counts: number of shards of each factor of each operator over the axes of earlier
            levels.
        axis_size: number of devices along the axis.

    Attributes:
        choice: for each operator the index of the factor that the axis cuts, `NO_CUT`, or
            `UNDECIDED`.
    """

    def __init__(
        self, graph: IndexedGraph, shard_counts: Sequence[tuple[int, ...]], axis_size: int
    ) -> None:
        self.graph = graph
        self.shard_counts = shard_counts
        self.axis_size = axis_size
        self.choices = [UNDECIDED] * len(graph.names)

    def propagate(self, decided: Iterable[int]) -> None:
        """Propagate new choices to operators without a cost model, forward and backward.

        Propagation ends at decided operators and at main operators. Where the producer of a tensor
        is an undecided main operator, other consumers of the tensor follow the decided consumer. So
        all consumers of a residual stream agree before its producer is decided.

        Args:
            decided: indices of the operators whose choice is new.
        """
        graph, choice = self.graph, self.choices
        # Breadth first, so that an operator follows the nearest of the decided ones.
        queue = deque(decided)
        while queue:
            op = queue.popleft()
            op_type = graph.op_types[op]
            for value, dim in zip(graph.outputs[op], op_type.output_dims[choice[op]], strict=True):
                self._propagate_to_consumers(value, dim, queue)
            for value, dim in zip(graph.inputs[op], op_type.input_dims[choice[op]], strict=True):
                producer = graph.producer[value]
                if producer is not None and self._is_undecided_follower(producer[0]):
                    choice[producer[0]] = self.choice_from_output(*producer, dim)
                    self._enqueue_op(producer[0], dim, queue)
                # Only where the value depends on the inputs: consumers of a table that all layers
                # share, such as rotary positions, need not agree.
                elif graph.depends_on_input[value] and (
                    producer is None or choice[producer[0]] == UNDECIDED
                ):
                    self._propagate_to_consumers(value, dim, queue)

    def _propagate_to_consumers(self, value: int, dim: int, queue: deque[int]) -> None:
        """Decide undecided consumers of a value that is sharded along `dim`, except main
        operators."""
        for consumer, input_index in self.graph.consumers[value]:
            if self._is_undecided_follower(consumer):
                self.choices[consumer] = self.choice_from_input(consumer, input_index, dim)
                self._enqueue_op(consumer, dim, queue)

    def _is_undecided_follower(self, op: int) -> bool:
        # Propagation leaves main operators to the decision by cost.
        return self.choices[op] == UNDECIDED and not self.graph.op_types[op].is_main

    def _enqueue_op(self, op: int, dim: int, queue: deque[int]) -> None:
        """Add `op` to `queue`, unless `op` is replicated because a size is not divisible."""
        # The other neighbors of an operator that is replicated because its size is not divisible
        # may still be cut.
        if self.choices[op] >= 0 or (self.choices[op] == NO_CUT and dim == NO_CUT):
            queue.append(op)

    def choice_from_input(self, op: int, input_index: int, dim: int) -> int:
        """Return the choice of `op` if an input is sharded along `dim`, or replicated if `dim` is
        `NO_CUT`.

        Returns:
            `UNDECIDED` for a replicated input that does not determine the choice, such as a
            broadcast operand.
        """
        factor = self._factor_of_tensor_dim(op, self.graph.op_types[op].inputs[input_index], dim)
        # A mask or a rotary table that lacks the batch is always replicated; it must not replicate
        # the activations that it is combined with.
        if factor == NO_CUT and not self.graph.replicates_op[op][input_index]:
            return UNDECIDED
        return factor

    def choice_from_output(self, op: int, output_index: int, dim: int) -> int:
        """Return the choice of `op` if an output is read sharded along `dim`, or replicated if
        `dim` is `NO_CUT`."""
        return self._factor_of_tensor_dim(op, self.graph.op_types[op].outputs[output_index], dim)

    def _factor_of_tensor_dim(self, op: int, dims: tuple[int, ...], dim: int) -> int:
        """Return the factor of a tensor's dim; `NO_CUT` if the axis cannot cut the factor.

        Args:
            dims: the factor of each dim of the tensor.
            dim: index into `dims`, or `NO_CUT`.
        """
        if dim == NO_CUT:
            return NO_CUT
        factor = dims[dim]
        if factor == NO_CUT:
            return NO_CUT
        # With the axes decided so far: each leaves smaller shards to the next.
        divides = self.graph.op_types[op].divides(factor, self.shard_counts[op], self.axis_size)
        return factor if divides else NO_CUT

    def decide_remaining(self) -> None:
        """Decide operators that propagation did not reach: from producers, else from consumers,
        else with no cut.

        Inputs of the model count as sharded along the batch, so that a model without main operators
        is data parallel.
        """
        # Producers first, since the batch of the inputs decides where no main operator does.
        # Operators without a decided input, such as a mask made from constants, then follow their
        # consumers.
        undecided = [op for op, choice in enumerate(self.choices) if choice == UNDECIDED]
        for op in undecided:
            self.choices[op] = _first_cut_of_choices(self._choices_of_producers(op))
        # Backwards, so that a chain of operators follows its last consumer.
        for op in reversed(undecided):
            if self.choices[op] == UNDECIDED:
                self.choices[op] = _first_cut_of_choices(self._choices_of_consumers(op))
        for op in undecided:
            if self.choices[op] == UNDECIDED:
                self.choices[op] = NO_CUT

    def next_shard_counts(self) -> list[tuple[int, ...]]:
        """Return the number of shards of each factor of each operator over the axes up to this
        level."""
        return [
            (
                *shard_counts[:factor],
                shard_counts[factor] * self.axis_size,
                *shard_counts[factor + 1 :],
            )
            if factor >= 0
            else shard_counts
            for shard_counts, factor in zip(self.shard_counts, self.choices, strict=True)
        ]

    def _choices_of_producers(self, op: int) -> Iterator[int]:
        graph = self.graph
        for input_index, value in enumerate(graph.inputs[op]):
            producer_output = graph.producer[value]
            if producer_output is not None:
                producer, output_index = producer_output
                if self.choices[producer] != UNDECIDED:
                    dim = graph.op_types[producer].output_dims[self.choices[producer]][output_index]
                    yield self.choice_from_input(op, input_index, dim)
            # Parameters, buffers and inputs without a batch say nothing about the choice.
            elif (dim := graph.batch_dims[value]) != NO_CUT:
                factor = self._factor_of_tensor_dim(op, graph.op_types[op].inputs[input_index], dim)
                # An input whose batch is not divisible leaves the choice to the other inputs.
                yield factor if factor != NO_CUT else UNDECIDED

    def _choices_of_consumers(self, op: int) -> Iterator[int]:
        graph = self.graph
        for output_index, value in enumerate(graph.outputs[op]):
            for consumer, input_index in graph.consumers[value]:
                if self.choices[consumer] != UNDECIDED:
                    dim = graph.op_types[consumer].input_dims[self.choices[consumer]][input_index]
                    yield self.choice_from_output(op, output_index, dim)


def _first_cut_of_choices(choices: Iterator[int]) -> int:
    """Return the first of `choices` that cuts a factor, else `NO_CUT` if `choices` contains
    `NO_CUT`, else `UNDECIDED`."""
    preferred = UNDECIDED
    for choice in choices:
        if choice >= 0:
            return choice
        # `NO_CUT` is greater than `UNDECIDED`.
        preferred = max(preferred, choice)
    return preferred
