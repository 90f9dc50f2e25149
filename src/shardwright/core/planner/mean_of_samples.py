"""Checks that a loss is a plain mean over the samples of its batch, so that the mean of the losses
of equal micro-batches is the loss of the batch.

An abstract interpretation of the graph follows the sample dimension from the inputs to the loss
through the factors of sharding rules. An operator that is not known to keep samples apart counts as
mixing them. A second graph of the same model for more samples shows which constants depend on the
batch size: a Python number such as `len(x)` is a constant in each graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isclose
from typing import Literal

import torch

from shardwright.core.graph.custom_ops import MEAN
from shardwright.core.graph.graph import Graph, Op, Value, target_name
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.parallel.train_step import COUNTED_LOSSES, loss_of, weighs_by_targets
from shardwright.core.rules import rule_of
from shardwright.core.rules.notation import call_arguments
from shardwright.core.rules.rule import ShardingRule
from shardwright.core.torch_internals import pytree
from shardwright.errors import MixedSamplesError

CONSTANT = frozenset({"expand", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like"})
"""Operators whose results are equal for all samples if they read none."""

LINEAR = frozenset(
    {
        *("add", "sub", "rsub", "neg", "mul", "div", "to", "_to_copy", "detach", "clone", "alias"),
        *("view", "reshape", "squeeze", "unsqueeze", "expand", "permute", "transpose", "flatten"),
        *("select", "slice", "unbind", "mean", "sum"),
    }
)
"""Operators f with f(mean of x) = mean of f(x), and the same for sums."""

MULTILINEAR = frozenset({"add", "sub", "rsub", "stack", "cat"})
"""Operators of which this is true with several means or sums as inputs."""

RESHAPES = frozenset({"view", "reshape", "unsqueeze", "squeeze", "to", "_to_copy", "alias"})

SIZES = frozenset({"size", "shape", "end", "repeats"})
"""Arguments that may depend on the batch size, as `_has_sample_shape` checks the result's shape."""

AVERAGE: Literal["average"] = "average"
SUM: Literal["sum"] = "sum"
ROWS: Literal["rows"] = "rows"


@dataclass(frozen=True)
class Mixed:
    """State of a value that combines samples other than by mean or sum.

    Args:
        op: first operator that combines samples.
        why: verb phrase that follows the operator's name in errors.
    """

    op: Op
    why: str

    def __str__(self) -> str:
        where = f" ({self.op.source})" if self.op.source else ""
        return f"{target_name(self.op.target)} in {self.op.name!r}{where} {self.why}"


SampleState = int | Literal["average", "sum", "rows"] | Mixed
"""Dependence of a value on samples: the sample dimension, `AVERAGE` or `SUM` over samples, `ROWS`
(positions of all samples in the batch, as `arange(len(x))`), or `Mixed`. Values that depend on no
sample have no state."""


def mixing(graph: Graph, larger: Graph | None = None) -> str:
    """Returns why the mean of the losses of equal micro-batches is not the loss of the batch; "" if
    it is.

    Args:
        graph: graph for one micro-batch.
        larger: graph of the same model for more samples, at least 2. Without it, constants that
            depend on the batch size go unnoticed, and a batch of one sample cannot be checked.
    """
    analyzed = larger or graph
    if analyzed.loss is None:
        return "the model returns no loss"
    for value, _ in analyzed.updates:
        return f"each micro-batch updates {value.name!r}"
    if larger is not None:
        different = _different_operator(graph, larger)
        if different is not None:
            return str(different)
    analysis = _Analysis(analyzed, graph if larger is not None else None)
    for op in analyzed.ops:
        analysis.follow(op)
    state = analysis.states.get(analyzed.loss)
    if state == AVERAGE:
        return ""
    if state == SUM:
        return (
            "it is a sum over samples, not their mean (divide by `len(x)`, not by a given number)"
        )
    if isinstance(state, Mixed):
        return str(state)
    return "" if analyzed.loss not in analysis.varying else "it depends on the batch size alone"


def with_mixing(graph: Graph, micro_batches: int, captured: Callable[[int], Graph]) -> Graph:
    """Returns the graph of a micro-batch with `Graph.mixing` set: why micro-batches do not train
    the loss of the batch, or "" if they do.

    Args:
        micro_batches: number of micro-batches of the batch.
        captured: captures the same model for a number of samples.

    Raises:
        CaptureError: if the model cannot be captured for the whole batch.
    """
    if micro_batches == 1 or graph.loss is None:
        return graph
    samples = _samples(graph)
    batch_graph = captured(samples * micro_batches)
    if samples == 1 and _different_operator(graph, batch_graph) is not None:
        # Dimensions of size 1 are captured differently: they are broadcast, or dropped from views.
        # So two graphs of several samples each are compared instead.
        pair = (batch_graph, captured(4)) if micro_batches == 2 else (captured(2), batch_graph)
        return replace(graph, mixing=mixing(*pair))
    return replace(graph, mixing=mixing(graph, batch_graph))


def check_mean_of_samples(graph: Graph, micro_batches: int) -> None:
    """Raises an error unless the loss is known to be a mean over samples.

    Raises:
        PlanError: if the model returns several losses.
        MixedSamplesError: if it is not; names the operator that mixes samples, and its line.
    """
    if graph.loss is None:
        return
    loss_of(graph)
    why = graph.mixing if graph.mixing is not None else mixing(graph)
    if why:
        raise MixedSamplesError(
            f"micro_batches={micro_batches}: the loss is not known to be a plain mean over samples,"
            f" so micro-batches may train another loss: {why}\n"
            "return a mean over samples, plan with micro_batches=1 (recompute='auto' saves memory),"
            " or, to train the sum of the micro-batches' losses, plan"
            f" sw.Pipeline(net, {micro_batches}, loss_reduction='sum')"
        )


def _samples(graph: Graph) -> int:
    """Batch size: the first dimension of the first input that is no scalar."""
    return next((value.shape[0] for value in graph.input_values if value.shape), 1)


def _different_operator(graph: Graph, larger: Graph) -> Mixed | None:
    """The first operator that only one of two graphs calls."""
    for op, larger_op in zip(graph.ops, larger.ops, strict=False):
        if op.target != larger_op.target:
            return Mixed(larger_op, "is not called for a micro-batch: operators depend on its size")
    if len(graph.ops) != len(larger.ops):
        longer_ops = max(graph.ops, larger.ops, key=len)
        return Mixed(longer_ops[-1], "is called for one batch size only: operators depend on it")
    return None


@dataclass
class _Analysis:
    """Abstract interpretation of a graph: the `SampleState` of each value.

    Args:
        graph: graph for at least 2 samples.
        smaller: graph of the same operators for fewer samples.
        states: state of each value that depends on samples.
        varying: values that depend on the number of samples, but on no sample.
    """

    graph: Graph
    smaller: Graph | None
    states: dict[Value, SampleState] = field(default_factory=dict)
    varying: set[Value] = field(default_factory=set)

    def __post_init__(self) -> None:
        values = [value for value in self.graph.input_values if value.shape]
        if self.smaller is None:
            self.states = {v: 0 for v in values if v.shape[0] == values[0].shape[0]}
            self._twins: Mapping[Value, Value] = {}
            self._twin_ops: Mapping[Op, Op] = {}
            return
        self._twins = dict(_paired_values(self.smaller, self.graph))
        self._twin_ops = dict(zip(self.graph.ops, self.smaller.ops, strict=True))
        self.states = {v: 0 for v in values if v.shape != self._twins[v].shape}
        for value, tensor in self.graph.constants.items():
            twin_tensor = self.smaller.constants.get(self._twins[value])
            if twin_tensor is None or not torch.equal(tensor, twin_tensor):
                self.varying.add(value)

    def follow(self, op: Op) -> None:
        """Determines the states of an operator's outputs from those of its inputs."""
        if any(value in self.states for value in op.inputs):
            states = self._states(op)
            for value, state in zip(op.outputs, states, strict=True):
                if not isinstance(state, Mixed) and not self._has_sample_shape(value, state):
                    state = Mixed(op, "makes a shape that depends on the batch size")
                self.states[value] = state
            return
        varies = bool(self._changed_numbers(op)) or any(v in self.varying for v in op.inputs)
        for value in op.outputs:
            if varies or value.shape != self._twins.get(value, value).shape:
                self.varying.add(value)
                if self._is_arange_over_samples(op):
                    self.states[value] = ROWS

    def _is_arange_over_samples(self, op: Op) -> bool:
        """Whether an operator is `arange(len(x))`, as in `logits[arange(len(x)), last]`."""
        if self.smaller is None or op.short_name != "arange":
            return False
        lengths = op.output.shape[0], self._twins[op.output].shape[0]
        numbers = _numbers(op)
        begins = numbers.get("start 0", 0) == 0 and numbers.get("step 0", 1) == 1
        return begins and lengths == (_samples(self.graph), _samples(self.smaller))

    def _states(self, op: Op) -> list[SampleState]:
        """States of the outputs of an operator that reads samples or what was made of them."""
        read = [self.states[value] for value in op.inputs if value in self.states]
        for state in read:
            if isinstance(state, Mixed):
                return [state] * len(op.outputs)
        if ROWS in read:
            return [self._state_from_rows(op)] * len(op.outputs)
        if AVERAGE in read or SUM in read:
            return [self._state_from_reduced(op, read)] * len(op.outputs)
        return self._states_from_samples(op)

    def _state_from_reduced(self, op: Op, read: list[SampleState]) -> SampleState:
        """State of the output of an operator on means or sums over samples."""
        nonlinear = Mixed(op, "is not linear in a mean or sum over samples")
        name, changed = op.short_name, self._changed_numbers(op)
        if len(set(read)) > 1:
            return Mixed(op, "joins samples with a mean or sum over them")
        (state,) = set(read)
        if state == SUM and changed and _divides_by_samples(op, changed, self._ratio):
            return AVERAGE
        if changed or any(value in self.varying for value in op.inputs):
            return Mixed(op, "reads a number that depends on the batch size")
        # A quotient is linear in its numerator only.
        if name == "div" and (op.args[0] is not op.inputs[0] or op.inputs[0] not in self.states):
            return nonlinear
        rounds = call_arguments(op).get("rounding_mode") is not None
        if rounds or not all(v.dtype.is_floating_point for v in op.outputs):
            return nonlinear
        # mean(x) + c is the mean of x + c, but sum(x) + c is not the sum of x + c.
        adds = name in MULTILINEAR and name not in ("stack", "cat")
        if state == SUM and adds and (len(read) < len(op.inputs) or len(op.inputs) == 1):
            adds_zero = len(op.inputs) == 1 and 0 in op.args
            return SUM if adds_zero else Mixed(op, "adds a constant to a sum over samples")
        multilinear = name in MULTILINEAR and (state == AVERAGE or len(read) == len(op.inputs))
        return state if multilinear or (name in LINEAR and len(read) == 1) else nonlinear

    def _states_from_samples(self, op: Op) -> list[SampleState]:
        """States of the outputs of an operator that reads values with a sample dimension."""
        rule = rule_of(op)
        sample_factor = None if rule is None else self._sample_factor(op, rule)
        if rule is None or sample_factor is None:
            return [Mixed(op, _why_mixed(op))] * len(op.outputs)
        if self._changed_numbers(op):
            why = "reads a number that depends on the batch size"
            return [Mixed(op, why)] * len(op.outputs)
        reduced: list[SampleState]
        if isinstance(op.target, LocalCall):
            reduced = [AVERAGE if op.target.is_mean(n) else SUM for n in range(len(op.outputs))]
        else:
            reduced = [self._reduced_state(op, rule, sample_factor)] * len(op.outputs)
        return [
            dims.index(sample_factor) if sample_factor in dims else state
            for dims, state in zip(rule.outputs, reduced, strict=True)
        ]

    def _reduced_state(self, op: Op, rule: ShardingRule, sample_factor: str) -> SampleState:
        """State of an output that lacks the sample dimension."""
        # A cross entropy is a mean over targets, not samples. As the whole loss it is correct
        # nevertheless, as the training step weights micro-batches by their numbers of targets.
        if weighs_by_targets(self.graph, op):
            return AVERAGE
        if sample_factor not in rule.reduced or rule.reductions(op, {sample_factor: 2}):
            return Mixed(op, "reduces samples to other than their mean or sum")
        reduction = call_arguments(op).get("reduction")
        return AVERAGE if op.short_name == "mean" or reduction == MEAN else SUM

    def _sample_factor(self, op: Op, rule: ShardingRule) -> str | None:
        """The factor of the sample dimension; None if the operator mixes samples."""
        factors: set[str | None] = set()
        for value, dims in zip(op.inputs, rule.inputs, strict=True):
            state = self.states.get(value)
            if isinstance(state, int):
                factors.add(dims[state])
        if len(factors) != 1 or None in factors:
            return None
        (factor,) = factors
        assert factor is not None
        tensors = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
        keeps_apart = all(dims.count(factor) <= 1 for _, dims in tensors)
        for value, dims in zip(op.inputs, rule.inputs, strict=True):
            if value in self.states:
                continue
            # An input that depends on no sample must treat all samples alike: positional
            # embeddings along the batch would differ between a micro-batch and the batch.
            if factor in dims:
                keeps_apart = keeps_apart and self._is_constant_along(value, dims.index(factor))
            elif value in self.varying:
                return None
        divides = rule.capacity.get(factor, 0) % self._ratio == 0
        # A reduction within the operator, such as that of batch norm, runs over all samples.
        reduces = not weighs_by_targets(self.graph, op) and rule.reductions(op, {factor: 2})
        return factor if keeps_apart and divides and not reduces else None

    def _is_constant_along(self, value: Value, dim: int) -> bool:
        """Whether a value that depends on no sample is equal at all positions of a dimension."""
        op = self.graph.producer.get(value)
        rule = None if op is None else rule_of(op)
        if op is None or self._changed_numbers(op):
            return False
        if op.short_name in ("expand", "repeat"):
            source = op.inputs[0]
            from_end = dim - len(value.shape)
            if from_end < -len(source.shape) or source.shape[from_end] == 1:
                return source not in self.varying
        if rule is None:
            return False
        if op.short_name in CONSTANT - {"expand"} or (rule.random and not op.inputs):
            return True
        factor = rule.outputs[op.outputs.index(value)][dim]
        if factor is None or rule.reductions(op, {factor: 2}):
            return False
        read = list(zip(op.inputs, rule.inputs, strict=True))
        carriers = [(v, dims) for v, dims in read if factor in dims]
        if any(v in self.varying for v, dims in read if factor not in dims):
            return False
        return bool(carriers) and all(
            dims.count(factor) == 1 and self._is_constant_along(v, dims.index(factor))
            for v, dims in carriers
        )

    def _state_from_rows(self, op: Op) -> SampleState:
        """State of the output of an operator on positions of samples: a reshape keeps them, and
        indexing by them takes one element, or one slice, of each sample."""
        if op.short_name in RESHAPES and len(op.inputs) == 1:
            return ROWS
        if op.short_name == "index" and isinstance(op.args[1], (list, tuple)):
            sample_dim = _sample_dim_of_index(op, self.states)
            if sample_dim is not None:
                return sample_dim
        return Mixed(op, "reads positions in the batch")

    def _has_sample_shape(self, value: Value, state: int | str) -> bool:
        """Whether the sample dimension is the only one whose size depends on the batch size."""
        if self.smaller is None or state == ROWS:
            return True
        shape, twin_shape = value.shape, self._twins[value].shape
        return len(shape) == len(twin_shape) and all(
            (size != twin_size) == (dim == state)
            for dim, (size, twin_size) in enumerate(zip(shape, twin_shape, strict=True))
        )

    @cached_property
    def _ratio(self) -> float:
        """Samples of the graph per sample of the smaller graph."""
        return 1.0 if self.smaller is None else _samples(self.graph) / _samples(self.smaller)

    def _changed_numbers(self, op: Op) -> dict[str, tuple[object, object]]:
        """Numbers in the arguments that depend on the batch size, each with its value in the
        smaller graph."""
        if self.smaller is None:
            return {}
        numbers, twin_numbers = _numbers(op), _numbers(self._twin_ops[op])
        return {
            name: (number, twin_numbers.get(name))
            for name, number in numbers.items()
            if number != twin_numbers.get(name)
        }


def _why_mixed(op: Op) -> str:
    """Verb phrase of `Mixed` for an operator that does not keep samples apart."""
    if op.short_name in COUNTED_LOSSES and call_arguments(op)["reduction"] == MEAN:
        return (
            "divides by a sum over the targets of the micro-batch, and is not the whole loss (if no"
            " target is ignored, write `reduction='none'` and `.mean()`)"
        )
    return "mixes samples"


def _paired_values(graph: Graph, other: Graph) -> Iterator[tuple[Value, Value]]:
    """Values of `other`, each with the corresponding value of `graph`, a graph of the same
    operators."""
    yield from zip(other.input_values, graph.input_values, strict=True)
    yield from zip(other.constants, graph.constants, strict=True)
    for op, other_op in zip(graph.ops, other.ops, strict=True):
        yield from zip(other_op.outputs, op.outputs, strict=True)


def _numbers(op: Op) -> dict[str, object]:
    """Numbers in the arguments other than sizes, keyed by argument name and position in it."""
    numbers: dict[str, object] = {}
    for name, argument in call_arguments(op).items():
        if name not in SIZES:
            leaves = pytree.tree_leaves(argument)
            numbers |= {
                f"{name} {index}": leaf
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, (int, float, complex))
            }
    return numbers


def _divides_by_samples(op: Op, changed: Mapping[str, tuple[object, object]], ratio: float) -> bool:
    """Whether an operator divides a sum by a number proportional to the batch size, which makes it
    a mean: `sum / len(x)`, also traced as a product with the inverse."""
    if len(changed) != 1 or len(op.inputs) != 1 or op.args[0] is not op.inputs[0]:
        return False
    ((divisor, small_divisor),) = changed.values()
    if not isinstance(divisor, (int, float)) or not isinstance(small_divisor, (int, float)):
        return False
    if op.short_name == "div":
        return isclose(divisor, small_divisor * ratio)
    return op.short_name == "mul" and isclose(divisor * ratio, small_divisor)


def _sample_dim_of_index(op: Op, states: Mapping[Value, SampleState]) -> int | None:
    """The sample dimension of the output of `x[..., rows, i, j]`, where `rows` has state `ROWS` and
    indexes the sample dimension of `x`; None for any other indexing."""
    x, indices = op.args[0], op.args[1]
    sample_dim = states.get(x)
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dims = [dim for dim, _ in indexed]
    # Where indices are not adjacent, PyTorch moves the indexed dimensions to the front.
    adjacent = dims == [*range(dims[0], dims[0] + len(dims))]
    rows = [index for dim, index in indexed if dim == sample_dim]
    if not adjacent or not rows or states.get(rows[0]) != ROWS:
        return None
    rank = max(len(index.shape) for _, index in indexed)
    # Indices broadcast together, so dimensions are counted from the end: `rows` may be (n, 1).
    from_end = next((d for d, size in enumerate(rows[0].shape) if size > 1), 0) - len(rows[0].shape)

    def follows(index: Value) -> bool:
        """Whether an index is constant over samples or has them in the same dimension as `rows`."""
        state, shape = states.get(index), index.shape
        if state is None:
            return len(shape) < -from_end or shape[from_end] == 1
        return state == from_end + len(shape)

    if not all(follows(index) for dim, index in indexed if dim != sample_dim):
        return None
    return dims[0] + rank + from_end
