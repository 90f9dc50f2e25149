"""`SampleFlow`: how each value of a graph depends on the samples of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwright.core.graph.graph import Op, SampleReduction, Value
from shardwright.core.micro_batches.batch_norms import takes_statistics, updated_statistics
from shardwright.core.micro_batches.micro_batch_graph import MicroBatchGraph
from shardwright.core.micro_batches.paired_graphs import NOT_PROPORTIONAL, PairedGraphs
from shardwright.core.micro_batches.sample_states import (
    UNKNOWN,
    WHOLE,
    SampleState,
    UnsplittableError,
)

PAIRS_SAMPLES = "the operator mixes samples: several sizes of its input depend on the batch size"
"""Error text for an operator that pairs samples with each other."""


@dataclass
class SampleFlow:
    """How each value in the graph of the global batch depends on samples, and the changes that this
    requires in the graph of a micro-batch.

    The *prologue* is a graph that runs once per step, on all samples, before the micro-batches.

    Args:
        pair: graphs of the global batch and of a micro-batch.
        count: number of micro-batches.
        per_micro_batch: whether batch norms compute statistics over each micro-batch.
        states: `SampleState` of each value in the graph of the global batch.
        free: values computed from inputs, buffers and constants only, without random numbers.
        outside: values that the prologue computes.
        reduced: "mean" or "sum" for each reduction over samples that both the prologue and the
            micro-batches compute; operators read the prologue's value.
        causes: the error of the first operator that mixes samples, for each value of state
            `UNKNOWN`.
        statistics: buffers that each micro-batch updates; other buffers are updated once per batch.
        in_full: inputs that every micro-batch reads in full although dimension 0 has the batch
            size, and values computed from these inputs only.
        result: the changes to the graph of the micro-batch.
    """

    pair: PairedGraphs
    count: int
    per_micro_batch: bool = False
    states: dict[Value, SampleState] = field(default_factory=dict)
    free: set[Value] = field(default_factory=set)
    outside: set[Value] = field(default_factory=set)
    reduced: dict[Value, SampleReduction] = field(default_factory=dict)
    causes: dict[Value, UnsplittableError] = field(default_factory=dict)
    statistics: frozenset[Value] = field(init=False)
    in_full: set[Value] = field(default_factory=set)
    result: MicroBatchGraph = field(init=False)

    def __post_init__(self) -> None:
        graph = self.pair.batch
        self.result = MicroBatchGraph(self.pair, self.count)
        self.statistics = updated_statistics(graph) if self.per_micro_batch else frozenset()
        arriving = (*graph.input_values, *graph.buffers, *graph.constants)
        self.states.update((value, WHOLE) for value in (*arriving, *graph.parameters))
        # The prologue runs before micro-batches change running statistics, so it must not read
        # these.
        self.free = {v for v in arriving if not v.requires_grad and v not in self.statistics}
        # Running statistics differ between micro-batches.
        self.states.update((value, UNKNOWN) for value in self.statistics)
        for value in graph.input_values:
            dims = self.varying_dims(value)
            if len(dims) == 1:
                (self.states[value],) = dims
        sizes = {v.shape[d] for v, d in self.states.items() if isinstance(d, int)}
        self.in_full = {
            value
            for value in graph.input_values
            if self.states[value] == WHOLE and value.shape and value.shape[0] in sizes
        }
        # Of a constant that depends on the batch size, micro-batches read the batch's, by the
        # prologue. Tensors of the Python state are those of the same object for any batch.
        state = graph.python.state if graph.python is not None else {}
        for value, tensor in graph.constants.items():
            if value.name in state:
                continue
            twin_value = self.pair.twin_values.get(value)
            other = None if twin_value is None else self.pair.twin.constants[twin_value]
            if other is None or not torch.equal(tensor, other):
                self.outside.add(value)

    def keeps_statistics(self, op: Op) -> bool:
        """Whether `op` is a batch norm with statistics of each micro-batch, not of the global
        batch.

        The user requests this with `batch_norm="per_micro_batch"`.
        """
        return self.per_micro_batch and takes_statistics(op)

    def varying_dims(self, value: Value) -> set[int]:
        """Return the dimensions of `value` whose sizes depend on the batch size.

        Returns {-1} if the number of dimensions depends on it.
        """
        # Values without a match, such as those of the prologue, do not vary.
        twin = self.pair.twin_values.get(value, value)
        if len(value.shape) != len(twin.shape):
            return {-1}
        pairs = zip(value.shape, twin.shape, strict=True)
        return {dim for dim, (size, twin_size) in enumerate(pairs) if size != twin_size}

    @property
    def not_divisible(self) -> str:
        """Error text: the batch size is not divisible by the number of micro-batches."""
        return f"its samples cannot be split into {self.count} equal micro-batches"

    def num_samples(self) -> int:
        """Return the batch size; 1 if no input has a batch dimension."""
        pairs = ((v, self.states[v]) for v in self.pair.batch.input_values)
        return next((v.shape[dim] for v, dim in pairs if isinstance(dim, int)), 1)

    def split_values_of_prologue(self, op: Op) -> set[SampleState]:
        """Split inputs of `op` that the prologue computes, such as `x[permutation]`, into
        micro-batches.

        Returns:
            The batch dimensions of these inputs.

        Raises:
            UnsplittableError: if an input, such as `x[2:]` or `torch.eye(len(x))`, cannot be
                divided evenly among micro-batches.
        """
        split: set[SampleState] = set()
        # An operator may read one value twice.
        for value in [each for each in dict.fromkeys(op.inputs) if each in self.outside]:
            dims = self.varying_dims(value)
            if len(dims) > 1:
                raise UnsplittableError(op, PAIRS_SAMPLES)
            # -1 stands for a rank that depends on the batch size, which has no dimension to split.
            if dims and -1 not in dims:
                (dim,) = dims
                if value in self.pair.twin_values and not self.pair.is_proportional(value, dim):
                    raise UnsplittableError(op, NOT_PROPORTIONAL)
                if value.shape[dim] % self.count:
                    raise UnsplittableError(op, self.not_divisible)
                # From here on the value counts as split: all later readers get the slice of their
                # micro-batch.
                self.outside.remove(value)
                self.states[value] = dim
                self.result.replaced[value] = self.result.take(value, dim)
                split.add(dim)
        return split

    def shared_values(self, values: Sequence[Value]) -> Sequence[Value]:
        """Pass those of `values` that the prologue computes to every micro-batch in full.

        Returns:
            `values`.
        """
        for value in [each for each in values if each in self.outside]:
            self.result.replaced[value] = self.result.take(value, None)
        return values
