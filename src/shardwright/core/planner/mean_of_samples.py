"""Analyze how the losses of equal micro-batches add up to the loss of the batch.

An abstract interpretation of the graph follows the sample dimension from the inputs to the loss
through the factors of sharding rules. An operator that is not known to keep samples apart counts as
mixing them. A loss that is a mean or a sum over samples, or one of these divided by what follows
from the inputs alone (a number of valid labels, a sum of weights or of a mask), is a weighted sum
of the losses of micro-batches. A second graph of the same model for more samples shows which
constants depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from shardwright.core.graph.custom_ops import MEAN
from shardwright.core.graph.graph import Graph, Kind, Op, Value
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.graph.loss_weighting import LossWeighting, SampleReduction
from shardwright.core.parallel.train_step import loss_of
from shardwright.core.planner.batch_sizes import (
    batch_size,
    different_operator,
    divides_by_samples,
    numbers_in_arguments,
    paired_values,
)
from shardwright.core.planner.sample_states import (
    AVERAGE,
    ROWS,
    SUM,
    TOTALS,
    Mixed,
    Quotient,
    SampleState,
    sample_dim_of_index,
)
from shardwright.core.rules import is_random, rule_of
from shardwright.core.rules.notation import call_arguments
from shardwright.core.rules.rule import ShardingRule
from shardwright.errors import MixedSamplesError

COUNTED_LOSSES = ("cross_entropy", "nll_loss_nd", "nll_loss", "nll_loss2d")
"""Losses whose mean divides by the number of valid targets, or the sum of their class weights."""

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


def loss_weighting(graph: Graph, larger: Graph | None = None) -> LossWeighting | str:
    """Return how the losses of equal micro-batches are weighted, or why no weights make them the
    loss of the batch.

    Args:
        graph: graph for one micro-batch.
        larger: graph of the same model for more samples, at least 2. Without it, constants that
            depend on the batch size go unnoticed, and a batch of one sample cannot be checked.
    """
    analyzed = larger or graph
    if analyzed.loss is None:
        return "the model returns no loss"
    # Such as running statistics: several updates by micro-batches are not one by the batch.
    for value, _ in analyzed.updates:
        return f"each micro-batch updates {value.name!r}"
    if larger is not None:
        different = different_operator(graph, larger)
        if different is not None:
            return str(Mixed(*different))
    analysis = _Analysis(analyzed, graph if larger is not None else None)
    for op in analyzed.ops:
        analysis.follow(op)
    state = analysis.states.get(analyzed.loss)
    if isinstance(state, Mixed):
        return str(state)
    if state in (AVERAGE, SUM):
        return LossWeighting(state)
    if isinstance(state, Quotient):
        if state.counted:
            return LossWeighting(state.reduction, counted=state.counted)
        return LossWeighting(
            state.reduction, denominator=state.divisor.name, totals=analysis.totals(state.divisor)
        )
    # A loss without samples, such as a regularization term, is equal in all micro-batches: the mean
    # of equal numbers.
    if state is None and analyzed.loss not in analysis.varying:
        return LossWeighting()
    return "it depends on the batch alone, and on no parameter"


def with_loss_weighting(
    graph: Graph, micro_batches: int, captured: Callable[[int], Graph] | None = None
) -> Graph:
    """Return the graph of a micro-batch with `Graph.loss_weighting` set.

    Args:
        micro_batches: number of micro-batches of the batch.
        captured: captures the same model for a number of samples. Without it the graph is analyzed
            by itself.

    Raises:
        CaptureError: if the model cannot be captured for the whole batch.
    """
    if micro_batches == 1 or graph.loss is None:
        return graph
    if captured is None:
        return replace(graph, loss_weighting=loss_weighting(graph))
    # A single graph cannot tell a constant from `len(x)`: the two batch sizes that matter are
    # compared.
    samples = batch_size(graph)
    batch_graph = captured(samples * micro_batches)
    pair = (graph, batch_graph)
    if samples == 1 and different_operator(graph, batch_graph) is not None:
        # Dimensions of size 1 are captured differently: they are broadcast, or dropped from views.
        # So two graphs of several samples each are compared instead.
        pair = (batch_graph, captured(4)) if micro_batches == 2 else (captured(2), batch_graph)
    weighting = loss_weighting(*pair)
    if isinstance(weighting, LossWeighting) and not graph.has_names(weighting.names):
        weighting = "a micro-batch of one sample lacks the operators of its denominator"
    return replace(graph, loss_weighting=weighting)


def check_mean_of_samples(graph: Graph, micro_batches: int) -> None:
    """Check that the losses of micro-batches add up to the loss of the batch.

    Raises:
        PlanError: if the model returns several losses.
        MixedSamplesError: if they do not; names the operator that mixes samples, and its line.
    """
    if graph.loss is None:
        return
    loss_of(graph)
    weighting = graph.loss_weighting
    if weighting is None:
        weighting = loss_weighting(graph)
    if isinstance(weighting, str):
        raise MixedSamplesError(
            f"micro_batches={micro_batches}: the loss of the batch is no weighted sum of the losses"
            f" of its micro-batches: {weighting}\n"
            "return a mean or a sum over samples, or one divided by what follows from the inputs;"
            " plan with micro_batches=1 (recompute='auto' saves memory); or, to train the sum of"
            " the micro-batches' losses, plan"
            f" sw.Pipeline(net, {micro_batches}, loss_reduction='sum')"
        )


@dataclass
class _Analysis:
    """Abstract interpretation of a graph: the `SampleState` of each value.

    Args:
        graph: graph for at least 2 samples.
        smaller: graph of the same operators for fewer samples.
        states: state of each value that depends on samples.
        varying: values that depend on the number of samples, but on no sample.
        free: values that follow from inputs and constants alone, without random numbers.
    """

    graph: Graph
    smaller: Graph | None
    states: dict[Value, SampleState] = field(default_factory=dict)
    varying: set[Value] = field(default_factory=set)
    free: set[Value] = field(default_factory=set)

    def __post_init__(self) -> None:
        inputs = (value for value in self.graph.input_values if not value.requires_grad)
        self.free.update(inputs, self.graph.constants)
        values = [value for value in self.graph.input_values if value.shape]
        # Without a second graph, inputs with the rows of the first one are taken for samples.
        if self.smaller is None:
            self.states = {v: 0 for v in values if v.shape[0] == values[0].shape[0]}
            self._twins: Mapping[Value, Value] = {}
            self._twin_ops: Mapping[Op, Op] = {}
            return
        self._twins = dict(paired_values(self.smaller, self.graph))
        self._twin_ops = dict(zip(self.graph.ops, self.smaller.ops, strict=True))
        self.states = {v: 0 for v in values if v.shape != self._twins[v].shape}
        for value, tensor in self.graph.constants.items():
            twin_tensor = self.smaller.constants.get(self._twins[value])
            if twin_tensor is None or not torch.equal(tensor, twin_tensor):
                self.varying.add(value)

    def follow(self, op: Op) -> None:
        """Determine the states of an operator's outputs from those of its inputs."""
        # The Python of a local map may do anything.
        if self.free.issuperset(op.inputs) and not (
            is_random(op) or isinstance(op.target, LocalCall)
        ):
            self.free.update(op.outputs)
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
        numbers = numbers_in_arguments(op)
        begins = numbers.get("start 0", 0) == 0 and numbers.get("step 0", 1) == 1
        return begins and lengths == (batch_size(self.graph), batch_size(self.smaller))

    def _states(self, op: Op) -> list[SampleState]:
        """States of the outputs of an operator that reads samples or what was made of them."""
        read = [self.states[value] for value in op.inputs if value in self.states]
        for state in read:
            if isinstance(state, Mixed):
                return [state] * len(op.outputs)
        if ROWS in read:
            return [self._state_from_rows(op)] * len(op.outputs)
        if all(isinstance(state, int) for state in read):
            return self._states_from_samples(op)
        # Such as x - x.mean(0), whose mean is another one in each micro-batch.
        if any(isinstance(state, int) for state in read):
            mixed = Mixed(op, "joins samples with a mean or sum over them")
            return [mixed] * len(op.outputs)
        state = self._state_from_reduced(op, read)
        unchanged = not self._changed_numbers(op) and self.varying.isdisjoint(op.inputs)
        if isinstance(state, Mixed) and self.free.issuperset(op.outputs) and unchanged:
            state = TOTALS
        return [state] * len(op.outputs)

    def totals(self, value: Value) -> tuple[tuple[str, SampleReduction], ...]:
        """Names of the means and sums that a value is a function of, each with its reduction."""
        state = self.states.get(value)
        if state in (AVERAGE, SUM):
            return ((value.name, state),)
        if state != TOTALS:
            return ()
        op = self.graph.producer[value]
        return tuple(dict.fromkeys(each for read in op.inputs for each in self.totals(read)))

    def _state_from_reduced(self, op: Op, read: list[SampleState]) -> SampleState:
        """State of the output of an operator on means or sums over samples."""
        nonlinear = Mixed(op, "is not linear in a mean or sum over samples")
        name, changed = op.short_name, self._changed_numbers(op)
        quotient = self._quotient(op, changed)
        if quotient is not None:
            return quotient
        if len(set(read)) > 1 or TOTALS in read:
            return Mixed(op, "joins means, sums or quotients over samples with different divisors")
        (state,) = set(read)
        if state == SUM and changed and divides_by_samples(op, changed, self._ratio):
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
        # What is not multiplied by the weights of micro-batches needs weights that add up to 1.
        adds_up = state == AVERAGE or (isinstance(state, Quotient) and state.weights_add_up)
        if isinstance(state, Quotient) and adds and len(op.inputs) == 1:
            return state if adds_up else nonlinear
        multilinear = name in MULTILINEAR and (adds_up or len(read) == len(op.inputs))
        return state if multilinear or (name in LINEAR and len(read) == 1) else nonlinear

    def _quotient(self, op: Op, changed: Mapping[str, object]) -> Quotient | None:
        """State of a mean or sum over samples divided by what follows from the inputs alone."""
        if op.short_name != "div" or len(op.inputs) != 2 or changed:
            return None
        if call_arguments(op).get("rounding_mode") is not None:
            return None
        dividend, divisor = op.inputs
        reduction, divided_by = self.states.get(dividend), self.states.get(divisor)
        # Weights are computed before the step, from the inputs: they cannot depend on parameters.
        if divisor not in self.free or divided_by not in (AVERAGE, SUM, TOTALS) or divisor.shape:
            return None
        if reduction in (AVERAGE, SUM):
            return Quotient(reduction, divisor, weights_add_up=reduction == divided_by)
        return None

    def _mean_over_targets(self, op: Op) -> Quotient | None:
        """State of a mean over integer targets that are not ignored."""
        if op.short_name not in COUNTED_LOSSES:
            return None
        arguments = call_arguments(op)
        target, weight = arguments["target"], arguments["weight"]
        if arguments["reduction"] != MEAN or target.dtype.is_floating_point:
            return None
        follows_from_inputs = weight is None or weight in self.free or weight.kind is Kind.BUFFER
        if target not in self.free or not follows_from_inputs or weight in self.states:
            return None
        return Quotient(SUM, target, weight, op.name, int(arguments["ignore_index"]))

    def _states_from_samples(self, op: Op) -> list[SampleState]:
        """States of the outputs of an operator that reads values with a sample dimension."""
        rule = rule_of(op)
        sample_factor = None if rule is None else self._sample_factor(op, rule)
        if rule is None or sample_factor is None:
            return [Mixed(op, _mixing_reason(op))] * len(op.outputs)
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
        counted = self._mean_over_targets(op)
        if counted is not None:
            return counted
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
        # A reduction within the operator, such as that of batch norm, runs over all samples. That
        # of a mean over targets is its divisor.
        reduces = self._mean_over_targets(op) is None and rule.reductions(op, {factor: 2})
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
            sample_dim = sample_dim_of_index(op, self.states)
            if sample_dim is not None:
                return sample_dim
        return Mixed(op, "reads positions in the batch")

    def _has_sample_shape(self, value: Value, state: SampleState) -> bool:
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
        return 1.0 if self.smaller is None else batch_size(self.graph) / batch_size(self.smaller)

    def _changed_numbers(self, op: Op) -> dict[str, tuple[object, object]]:
        """Numbers in the arguments that depend on the batch size, each with its value in the
        smaller graph."""
        if self.smaller is None:
            return {}
        numbers, twin_numbers = numbers_in_arguments(op), numbers_in_arguments(self._twin_ops[op])
        return {
            name: (number, twin_numbers.get(name))
            for name, number in numbers.items()
            if number != twin_numbers.get(name)
        }


def _mixing_reason(op: Op) -> str:
    """Verb phrase of `Mixed` for an operator that does not keep samples apart."""
    if op.short_name in COUNTED_LOSSES and call_arguments(op)["reduction"] == MEAN:
        return (
            "divides by a number of targets, or a sum of class weights, that does not follow from"
            " the inputs"
        )
    return "mixes samples"
