"""Whether a loss is the mean over the samples of its batch, so that the losses of micro-batches
make that of the whole.

The dimension of the samples is followed from the inputs to the loss, by the names that the rules of
operators give to dimensions. What is not known to keep samples apart is taken to mix them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwright.graph.custom_ops import MEAN
from shardwright.graph.graph import Graph, Op, Value
from shardwright.parallel.train_step import name_of, weighs_by_targets
from shardwright.rules import rule_of
from shardwright.rules.notation import call_arguments
from shardwright.rules.rule import ShardingRule

ALIKE = frozenset({"expand", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like"})
"""Operators whose results are alike for all samples, where samples do not come in."""

AVERAGES = frozenset({"mean"})
LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    }
)
"""Operators that average over samples, if their `reduction` is a mean."""

LINEAR = frozenset(
    {
        *("add", "sub", "rsub", "neg", "mul", "div", "to", "_to_copy", "detach", "clone", "alias"),
        *("view", "reshape", "squeeze", "unsqueeze", "mean", "sum"),
    }
)
"""Operators of which the mean of the results is the result of the mean, at least for one argument
that is a mean and others that no sample comes into."""

AVERAGE, MIXED = "average", "mixed"
"""What stands in place of the number of a dimension: a mean over samples, or anything else."""

Place = int | str
"""The dimension of the samples of a value, or `AVERAGE`, or `MIXED`."""


def is_mean_of_samples(graph: Graph, others: Iterable[Graph] = ()) -> bool:
    """Whether the loss of a batch is the mean of those of its equal pieces, and nothing else that
    stays depends on the pieces.

    Args:
        others: graphs of the same model for other numbers of samples. One sample cannot be
            followed, whose dimension rules do not tell from none; what is known of another number
            holds for it if its operators are the same.
    """
    operators = [op.target for op in graph.ops]
    alike = (each for each in others if [op.target for op in each.ops] == operators)
    return any(_is_mean_of_samples(each) for each in (graph, *alike))


def _is_mean_of_samples(graph: Graph) -> bool:
    if graph.loss is None or graph.other_losses or graph.updates:
        return False
    tensors = [value for value in graph.input_values if value.shape]
    places: dict[Value, Place] = {
        value: 0 for value in tensors if value.shape[0] == tensors[0].shape[0]
    }
    for op in graph.ops:
        if any(value in places for value in op.inputs):
            place = _places(graph, op, places)
            places.update(zip(op.outputs, place, strict=True))
    return places.get(graph.loss) == AVERAGE


def _places(graph: Graph, op: Op, places: Mapping[Value, Place]) -> list[Place]:
    """Of the outputs of an operator that reads samples, or what was made of them."""
    read = [places[value] for value in op.inputs if value in places]
    if MIXED in read:
        return [MIXED] * len(op.outputs)
    if AVERAGE in read:
        return [AVERAGE if _is_linear(op, read) else MIXED] * len(op.outputs)
    rule = rule_of(op)
    samples = None if rule is None else _factor(graph, op, rule, places)
    if rule is None or samples is None:
        return [MIXED] * len(op.outputs)
    average = AVERAGE if _averages(graph, op) and samples in rule.reduced else MIXED
    return [dims.index(samples) if samples in dims else average for dims in rule.outputs]


def _is_linear(op: Op, read: list[Place]) -> bool:
    """Whether an operator on averages makes an average."""
    name = name_of(op)
    others = len(read) == 1 and (name != "div" or op.args[0] is op.inputs[0])
    return set(read) == {AVERAGE} and name in LINEAR and (others or name in ("add", "sub", "rsub"))


def _factor(graph: Graph, op: Op, rule: ShardingRule, places: Mapping[Value, Place]) -> str | None:
    """The factor that is the samples of each input that has some; None if there is none, or the
    operator brings samples together by it."""
    factors = set()
    for value, dims in zip(op.inputs, rule.inputs, strict=True):
        if value in places:
            factors.add(dims[int(places[value])])
    if len(factors) != 1 or None in factors:
        return None
    (samples,) = factors
    assert samples is not None
    tensors = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
    apart = all(dims.count(samples) <= 1 for _, dims in tensors)
    alike = all(
        value in places or samples not in dims or _is_alike(graph, value)
        for value, dims in zip(op.inputs, rule.inputs, strict=True)
    )
    communicates = not _averages(graph, op) and rule.reductions(op, {samples: 2})
    return samples if apart and alike and not communicates else None


def _is_alike(graph: Graph, value: Value) -> bool:
    op = graph.producer.get(value)
    return op is not None and name_of(op) in ALIKE


def _averages(graph: Graph, op: Op) -> bool:
    """Whether what an operator sums over samples is their mean. A cross entropy is the mean over
    targets, by whose number micro-batches are weighed if it is the whole loss."""
    name = name_of(op)
    if name in LOSSES:
        return bool(call_arguments(op)["reduction"] == MEAN)
    return name in AVERAGES or weighs_by_targets(graph, op)
