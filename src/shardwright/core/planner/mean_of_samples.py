"""Whether a loss is a plain mean over the samples of its batch, so that the mean of the losses of
equal micro-batches is the loss of the batch.

The dimension of the samples is followed from the inputs to the loss through the factors of sharding
rules. What is not known to keep samples apart is taken to mix them. Two graphs of one model, for a
micro-batch and for more samples, show what depends on the number of samples: a Python number such
as `len(x)` is a constant in each graph.
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
from shardwright.core.parallel.train_step import COUNTED_LOSSES, loss_of, weighs_by_targets
from shardwright.core.rules import rule_of
from shardwright.core.rules.notation import call_arguments
from shardwright.core.rules.rule import ShardingRule
from shardwright.core.torch_internals import pytree
from shardwright.errors import MixedSamplesError

CONSTANT = frozenset({"expand", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like"})
"""Operators whose results are equal for all samples, where no sample is read."""

LINEAR = frozenset(
    {
        *("add", "sub", "rsub", "neg", "mul", "div", "to", "_to_copy", "detach", "clone", "alias"),
        *("view", "reshape", "squeeze", "unsqueeze", "expand", "permute", "transpose", "flatten"),
        *("select", "slice", "unbind", "mean", "sum"),
    }
)
"""Operators that map a mean, or a sum, to the mean, or the sum, of their results."""

SEVERAL = frozenset({"add", "sub", "rsub", "stack", "cat"})
"""Operators that do so with several of them."""

RESHAPES = frozenset({"view", "reshape", "unsqueeze", "squeeze", "to", "_to_copy", "alias"})

SIZES = frozenset({"size", "shape", "end", "repeats"})
"""Arguments that may depend on the number of samples: the shapes of the results tell how."""

AVERAGE: Literal["average"] = "average"
SUM: Literal["sum"] = "sum"
ROWS: Literal["rows"] = "rows"


@dataclass(frozen=True)
class Mixed:
    """A value that depends on several samples in another way than their mean or sum.

    Args:
        op: where samples first come together.
        why: what it does, as a predicate.
    """

    op: Op
    why: str

    def __str__(self) -> str:
        where = f" ({self.op.source})" if self.op.source else ""
        return f"{target_name(self.op.target)} in {self.op.name!r}{where} {self.why}"


SampleState = int | Literal["average", "sum", "rows"] | Mixed
"""What a value has to do with samples: their dimension, `AVERAGE` or `SUM` over them, `ROWS`, the
positions of all samples in the batch, or `Mixed`. A value without a state depends on no sample."""


def mixing(graph: Graph, larger: Graph | None = None) -> str:
    """Why the mean of the losses of equal micro-batches is not the loss of the batch, or "".

    Args:
        graph: of the model for one micro-batch.
        larger: of the same model for more samples, at least 2. Without it, numbers that depend on
            the batch size are not found, and a micro-batch of one sample cannot be followed.
    """
    whole = larger or graph
    if whole.loss is None:
        return "the model returns no loss"
    for value, _ in whole.updates:
        return f"each micro-batch updates {value.name!r}"
    if larger is not None:
        different = _different_operator(graph, larger)
        if different is not None:
            return str(different)
    analysis = _Analysis(whole, graph if larger is not None else None)
    for op in whole.ops:
        analysis.follow(op)
    state = analysis.states.get(whole.loss)
    if state == AVERAGE:
        return ""
    if state == SUM:
        return (
            "it is a sum over samples, not their mean (divide by `len(x)`, not by a given number)"
        )
    if isinstance(state, Mixed):
        return str(state)
    return "" if whole.loss not in analysis.varying else "it depends on the batch size alone"


def with_mixing(graph: Graph, micro_batches: int, captured: Callable[[int], Graph]) -> Graph:
    """The graph of a micro-batch, which says whether micro-batches train the loss of the batch.

    Args:
        micro_batches: of one batch.
        captured: the graph of the same model for another number of samples.

    Raises:
        CaptureError: if the model cannot be captured for the whole batch.
    """
    if micro_batches == 1 or graph.loss is None:
        return graph
    samples = _samples(graph)
    whole = captured(samples * micro_batches)
    if samples == 1 and _different_operator(graph, whole) is not None:
        # Dimensions of size 1 are captured otherwise: broadcast, or left out of views.
        pair = (whole, captured(4)) if micro_batches == 2 else (captured(2), whole)
        return replace(graph, mixing=mixing(*pair))
    return replace(graph, mixing=mixing(graph, whole))


def check_mean_of_samples(graph: Graph, micro_batches: int) -> None:
    """Refuses micro-batches of a loss that is not known to be a mean over samples.

    Raises:
        PlanError: if the model returns several losses.
        MixedSamplesError: names the operator that mixes samples, and its line.
    """
    if graph.loss is None:
        return
    loss_of(graph)
    why = graph.mixing if graph.mixing is not None else mixing(graph)
    if why:
        raise MixedSamplesError(
            f"micro_batches={micro_batches}: the loss is not known to be a plain mean over samples,"
            f" so micro-batches may train another loss: {why}. Return a mean over samples, plan"
            " with micro_batches=1 (recompute='auto' saves memory), or, to train the sum of the"
            f" micro-batches' losses, plan sw.Pipeline(net, {micro_batches}, loss_reduction='sum')"
        )


def _samples(graph: Graph) -> int:
    return next((value.shape[0] for value in graph.input_values if value.shape), 1)


def _different_operator(graph: Graph, larger: Graph) -> Mixed | None:
    """The first operator that only one of two graphs calls."""
    for one, other in zip(graph.ops, larger.ops, strict=False):
        if one.target is not other.target:
            return Mixed(other, "is not called for a micro-batch: operators depend on its size")
    if len(graph.ops) != len(larger.ops):
        ops = max(graph.ops, larger.ops, key=len)
        return Mixed(ops[-1], "is called for one batch size only: operators depend on it")
    return None


@dataclass
class _Analysis:
    """The states of values, operator after operator.

    Args:
        graph: with at least 2 samples.
        smaller: of the same operators for fewer samples.
        varying: values that depend on no sample, but on their number.
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
            other = self.smaller.constants.get(self._twins[value])
            if other is None or not torch.equal(tensor, other):
                self.varying.add(value)

    def follow(self, op: Op) -> None:
        """Finds the states of the results of an operator."""
        if any(value in self.states for value in op.inputs):
            states = self._states(op)
            for value, state in zip(op.outputs, states, strict=True):
                if not isinstance(state, Mixed) and not self._has_shape_of(value, state):
                    state = Mixed(op, "makes a shape that depends on the batch size")
                self.states[value] = state
            return
        changed = bool(self._changed(op)) or any(v in self.varying for v in op.inputs)
        for value in op.outputs:
            if changed or value.shape != self._twins.get(value, value).shape:
                self.varying.add(value)
                if self._counts_samples(op):
                    self.states[value] = ROWS

    def _counts_samples(self, op: Op) -> bool:
        """Whether an operator makes the positions of all samples, from 0 on."""
        if self.smaller is None or op.short_name != "arange":
            return False
        lengths = op.output.shape[0], self._twins[op.output].shape[0]
        numbers = _numbers(op)
        begins = numbers.get("start 0", 0) == 0 and numbers.get("step 0", 1) == 1
        return begins and lengths == (_samples(self.graph), _samples(self.smaller))

    def _states(self, op: Op) -> list[SampleState]:
        read = [self.states[value] for value in op.inputs if value in self.states]
        for state in read:
            if isinstance(state, Mixed):
                return [state] * len(op.outputs)
        if ROWS in read:
            return [self._of_rows(op, read)] * len(op.outputs)
        if AVERAGE in read or SUM in read:
            return [self._of_reduced(op, read)] * len(op.outputs)
        return self._of_samples(op)

    def _of_reduced(self, op: Op, read: list[SampleState]) -> SampleState:
        """Of an operator on means or sums over samples."""
        nonlinear = Mixed(op, "is not linear in a mean or sum over samples")
        name, changed = op.short_name, self._changed(op)
        if len(set(read)) > 1:
            return Mixed(op, "joins samples with a mean or sum over them")
        (state,) = set(read)
        if state == SUM and changed and _divides_by_samples(op, changed, self._ratio):
            return AVERAGE
        if changed or any(value in self.varying for value in op.inputs):
            return Mixed(op, "reads a number that depends on the batch size")
        if name == "div" and (op.args[0] is not op.inputs[0] or op.inputs[0] not in self.states):
            return nonlinear
        rounds = call_arguments(op).get("rounding_mode") is not None
        if rounds or not all(v.dtype.is_floating_point for v in op.outputs):
            return nonlinear
        adds = name in SEVERAL and name not in ("stack", "cat")
        if state == SUM and adds and (len(read) < len(op.inputs) or len(op.inputs) == 1):
            zero = len(op.inputs) == 1 and 0 in op.args
            return SUM if zero else Mixed(op, "adds a constant to a sum over samples")
        several = name in SEVERAL and (state == AVERAGE or len(read) == len(op.inputs))
        return state if several or (name in LINEAR and len(read) == 1) else nonlinear

    def _of_samples(self, op: Op) -> list[SampleState]:
        """Of an operator that reads samples."""
        rule = rule_of(op)
        samples = None if rule is None else self._factor(op, rule)
        if rule is None or samples is None:
            return [Mixed(op, _why_mixed(op))] * len(op.outputs)
        if self._changed(op):
            why = "reads a number that depends on the batch size"
            return [Mixed(op, why)] * len(op.outputs)
        reduced = self._reduced(op, rule, samples)
        return [dims.index(samples) if samples in dims else reduced for dims in rule.outputs]

    def _reduced(self, op: Op, rule: ShardingRule, samples: str) -> SampleState:
        """Of a result in which samples are reduced. A cross entropy is the mean over targets, by
        whose number micro-batches are weighted if it is the whole loss."""
        if weighs_by_targets(self.graph, op):
            return AVERAGE
        if samples not in rule.reduced or rule.reductions(op, {samples: 2}):
            return Mixed(op, "reduces samples to other than their mean or sum")
        reduction = call_arguments(op).get("reduction")
        return AVERAGE if op.short_name == "mean" or reduction == MEAN else SUM

    def _factor(self, op: Op, rule: ShardingRule) -> str | None:
        """The factor of the samples; None if the operator does not keep them apart."""
        factors: set[str | None] = set()
        for value, dims in zip(op.inputs, rule.inputs, strict=True):
            state = self.states.get(value)
            if isinstance(state, int):
                factors.add(dims[state])
        if len(factors) != 1 or None in factors:
            return None
        (samples,) = factors
        assert samples is not None
        tensors = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
        apart = all(dims.count(samples) <= 1 for _, dims in tensors)
        for value, dims in zip(op.inputs, rule.inputs, strict=True):
            if value in self.states:
                continue
            if samples in dims:
                apart = apart and self._is_constant_along(value, dims.index(samples))
            elif value in self.varying:
                return None
        divides = rule.capacity.get(samples, 0) % self._ratio == 0
        reduces = not weighs_by_targets(self.graph, op) and rule.reductions(op, {samples: 2})
        return samples if apart and divides and not reduces else None

    def _is_constant_along(self, value: Value, dim: int) -> bool:
        """Whether a value that depends on no sample is equal for all positions in a dimension."""
        op = self.graph.producer.get(value)
        rule = None if op is None else rule_of(op)
        if op is None or self._changed(op):
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
        name = rule.outputs[op.outputs.index(value)][dim]
        if name is None or rule.reductions(op, {name: 2}):
            return False
        read = list(zip(op.inputs, rule.inputs, strict=True))
        carried = [(v, d) for v, d in read if name in d]
        if any(v in self.varying for v, d in read if name not in d):
            return False
        return bool(carried) and all(
            d.count(name) == 1 and self._is_constant_along(v, d.index(name)) for v, d in carried
        )

    def _of_rows(self, op: Op, read: list[SampleState]) -> SampleState:
        """Of an operator on the positions of all samples: reshaped, or an index that takes one
        element, or one slice, of each sample."""
        if op.short_name in RESHAPES and len(op.inputs) == 1:
            return ROWS
        if op.short_name == "index" and isinstance(op.args[1], (list, tuple)):
            place = _indexed_samples(op, self.states)
            if place is not None:
                return place
        return Mixed(op, "reads positions in the batch")

    def _has_shape_of(self, value: Value, state: int | str) -> bool:
        """Whether no dimension depends on the number of samples but that of the samples."""
        if self.smaller is None or state == ROWS:
            return True
        shape, other = value.shape, self._twins[value].shape
        return len(shape) == len(other) and all(
            (size != of_other) == (place == state)
            for place, (size, of_other) in enumerate(zip(shape, other, strict=True))
        )

    @cached_property
    def _ratio(self) -> float:
        """How many times the samples of the smaller graph the larger one has."""
        return 1.0 if self.smaller is None else _samples(self.graph) / _samples(self.smaller)

    def _changed(self, op: Op) -> dict[str, tuple[object, object]]:
        """The numbers among the arguments that depend on the number of samples, with those of the
        smaller graph."""
        if self.smaller is None:
            return {}
        mine, others = _numbers(op), _numbers(self._twin_ops[op])
        return {name: (n, others.get(name)) for name, n in mine.items() if n != others.get(name)}


def _why_mixed(op: Op) -> str:
    if op.short_name in COUNTED_LOSSES and call_arguments(op)["reduction"] == MEAN:
        return (
            "divides by a sum over the targets of the micro-batch, and is not the whole loss (if no"
            " target is ignored, write `reduction='none'` and `.mean()`)"
        )
    return "mixes samples"


def _paired_values(graph: Graph, other: Graph) -> Iterator[tuple[Value, Value]]:
    """The values of `other`, each with the one of `graph` in its place."""
    yield from zip(other.input_values, graph.input_values, strict=True)
    yield from zip(other.constants, graph.constants, strict=True)
    for op, of_other in zip(graph.ops, other.ops, strict=True):
        yield from zip(of_other.outputs, op.outputs, strict=True)


def _numbers(op: Op) -> dict[str, object]:
    """The numbers among the arguments, by name and place, but for sizes."""
    numbers: dict[str, object] = {}
    for name, argument in call_arguments(op).items():
        if name not in SIZES:
            leaves = pytree.tree_leaves(argument)
            numbers |= {
                f"{name} {place}": leaf
                for place, leaf in enumerate(leaves)
                if isinstance(leaf, (int, float, complex))
            }
    return numbers


def _divides_by_samples(op: Op, changed: Mapping[str, tuple[object, object]], ratio: float) -> bool:
    """Whether an operator divides a sum by a number that is proportional to the batch size."""
    if len(changed) != 1 or len(op.inputs) != 1 or op.args[0] is not op.inputs[0]:
        return False
    ((large, small),) = changed.values()
    if not isinstance(large, (int, float)) or not isinstance(small, (int, float)):
        return False
    if op.short_name == "div":
        return isclose(large, small * ratio)
    return op.short_name == "mul" and isclose(large * ratio, small)


def _indexed_samples(op: Op, states: Mapping[Value, SampleState]) -> int | None:
    """The dimension of the samples in `x[..., positions, i, j]`, where `positions` are those of all
    samples in the dimension of the samples of `x`; None if the operator is another."""
    x, indices = op.args[0], op.args[1]
    place = states.get(x)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dims = [dim for dim, _ in given]
    adjacent = dims == [*range(dims[0], dims[0] + len(dims))]
    own = [index for dim, index in given if dim == place]
    if not adjacent or not own or states.get(own[0]) != ROWS:
        return None
    rank = max(len(index.shape) for _, index in given)
    samples = next((d for d, size in enumerate(own[0].shape) if size > 1), 0) - len(own[0].shape)

    def follows(index: Value) -> bool:
        state, shape = states.get(index), index.shape
        if state is None:
            return len(shape) < -samples or shape[samples] == 1
        return state == samples + len(shape)

    if not all(follows(index) for dim, index in given if dim != place):
        return None
    return dims[0] + rank + samples
