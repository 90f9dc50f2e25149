"""One level of the recursion: what every operator cuts on one axis, and how decisions spread.

A decided operator leaves and reads tensors that are cut along some dim on this axis, or whole. A
neighbor that has no cost of its own follows: it cuts the factor that its tensor has on that dim.

`relu(linear(x))`, linear cut on J → its output is cut on dim 1 → relu cuts the factor of dim 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from shardwright.core.search.indexed_graph import NO_CUT, IndexedGraph

UNDECIDED = -2


class AxisLevel:
    """The choices on one axis.

    Args:
        graph: the operators.
        parts: for each operator in how many parts each of its factors is cut on earlier levels.
        axis_size: number of devices along the axis.
    """

    def __init__(
        self, graph: IndexedGraph, parts: Sequence[tuple[int, ...]], axis_size: int
    ) -> None:
        self.graph = graph
        self.parts = parts
        self.axis_size = axis_size
        self.choice = [UNDECIDED] * len(graph.names)

    def spread(self, decided: Iterable[int]) -> None:
        """Lets neighbors without a cost follow, forward and backward, up to what is decided.

        Where the maker of a tensor is still to be decided by cost, other readers of it follow the
        one that is decided, so that a residual stream is read in one way from its start.

        Args:
            decided: operators whose choice is new.
        """
        graph, choice = self.graph, self.choice
        queue = deque(decided)
        while queue:
            op = queue.popleft()
            kind = graph.kinds[op]
            for value, dim in zip(graph.outputs[op], kind.output_dims[choice[op]], strict=True):
                self._offer(value, dim, queue)
            for value, dim in zip(graph.inputs[op], kind.input_dims[choice[op]], strict=True):
                producer = graph.producer[value]
                if producer is not None and self._follows(producer[0]):
                    choice[producer[0]] = self.following_output(*producer, dim)
                    self._continue(producer[0], dim, queue)
                elif graph.data[value] and (producer is None or choice[producer[0]] == UNDECIDED):
                    self._offer(value, dim, queue)

    def _offer(self, value: int, dim: int, queue: deque[int]) -> None:
        """Lets the readers of a value follow the way in which it is made or read elsewhere."""
        for consumer, place in self.graph.consumers[value]:
            if self._follows(consumer):
                self.choice[consumer] = self.following_input(consumer, place, dim)
                self._continue(consumer, dim, queue)

    def _follows(self, op: int) -> bool:
        return self.choice[op] == UNDECIDED and not self.graph.kinds[op].is_main

    def _continue(self, op: int, dim: int, queue: deque[int]) -> None:
        """Spreads further from `op`, but not past an operator that cannot follow a cut."""
        if self.choice[op] >= 0 or (self.choice[op] == NO_CUT and dim == NO_CUT):
            queue.append(op)

    def following_input(self, op: int, place: int, dim: int) -> int:
        """What `op` does when its input at `place` is cut along `dim`, or whole.

        `UNDECIDED` if that input says nothing about the operator: a whole broadcast operand.
        """
        factor = self._factor(op, self.graph.kinds[op].inputs[place], dim)
        if factor == NO_CUT and not self.graph.constrains[op][place]:
            return UNDECIDED
        return factor

    def following_output(self, op: int, place: int, dim: int) -> int:
        """What `op` does when its output at `place` is read cut along `dim`, or whole."""
        return self._factor(op, self.graph.kinds[op].outputs[place], dim)

    def _factor(self, op: int, dims: tuple[int, ...], dim: int) -> int:
        if dim == NO_CUT:
            return NO_CUT
        factor = dims[dim]
        if factor == NO_CUT:
            return NO_CUT
        divides = self.graph.kinds[op].divides(factor, self.parts[op], self.axis_size)
        return factor if divides else NO_CUT

    def fill(self) -> None:
        """Decides what no decision has reached: forward, then backward; the rest is not cut.

        An input of the model counts as cut along the batch, so that a model without any operator
        that is decided by cost is data parallel.
        """
        undecided = [op for op, choice in enumerate(self.choice) if choice == UNDECIDED]
        for op in undecided:
            self.choice[op] = _strongest(self._choices_of_producers(op))
        for op in reversed(undecided):
            if self.choice[op] == UNDECIDED:
                self.choice[op] = _strongest(self._choices_of_consumers(op))
        for op in undecided:
            if self.choice[op] == UNDECIDED:
                self.choice[op] = NO_CUT

    def next_parts(self) -> list[tuple[int, ...]]:
        """In how many parts each factor of each operator is cut after this level."""
        return [
            (*parts[:cut], parts[cut] * self.axis_size, *parts[cut + 1 :]) if cut >= 0 else parts
            for parts, cut in zip(self.parts, self.choice, strict=True)
        ]

    def _choices_of_producers(self, op: int) -> Iterator[int]:
        graph = self.graph
        for place, value in enumerate(graph.inputs[op]):
            source = graph.producer[value]
            if source is not None:
                producer, slot = source
                if self.choice[producer] != UNDECIDED:
                    dim = graph.kinds[producer].output_dims[self.choice[producer]][slot]
                    yield self.following_input(op, place, dim)
            elif graph.batch[value]:
                factor = self._factor(op, graph.kinds[op].inputs[place], 0)
                yield factor if factor != NO_CUT else UNDECIDED

    def _choices_of_consumers(self, op: int) -> Iterator[int]:
        graph = self.graph
        for slot, value in enumerate(graph.outputs[op]):
            for consumer, place in graph.consumers[value]:
                if self.choice[consumer] != UNDECIDED:
                    dim = graph.kinds[consumer].input_dims[self.choice[consumer]][place]
                    yield self.following_output(op, slot, dim)


def _strongest(choices: Iterator[int]) -> int:
    """The first cut, else no cut if any neighbor says so."""
    strongest = UNDECIDED
    for choice in choices:
        if choice >= 0:
            return choice
        strongest = max(strongest, choice)
    return strongest
