"""PyTorch's own samples of its operators, each as a module under a random plan on 5 devices.

The sizes of most samples are multiples of 5. `python -m operator_samples [FIRST COUNT
[EVERY]]` prints those that ended otherwise, and the counts as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from random_plans import random_plan
from shardwright import ShardwrightError, capture
from shardwright.core.parallel.simulate_ranks import Outcome, simulate
from shardwright.core.rules import is_random

DEVICES = 5
PER_OPERATOR = 3
"""Samples of each operator, drawn from all that it has."""

MOST_ELEMENTS = 20_000
"""Of the tensors of a sample; a few are made to be slow."""

RUNS, MOST_DEVIATION = 12, 6.0
"""Of random operators: runs with different seeds, and standard errors."""

EQUAL, REFUSED, RANDOM, WRONG, RAW = "equal", "refused", "random", "wrong", "raw error"


@dataclass(frozen=True)
class Ending:
    """How one sample ended: `equal`, `refused` by an error of ours, `random` where replicas and
    repetitions are equal and runs with other seeds have the moments of eager ones, `wrong`, or a
    `raw error`."""

    operator: str
    sample: int
    end: str
    why: str = ""


class OperatorModule(nn.Module):
    """An operator whose tensors that require gradients are parameters, and others inputs."""

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.function = function
        self.parameters_of_it = nn.ParameterList()
        self.inputs: list[Tensor] = []
        self.places: list[tuple[str, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self.places.append(("constant", leaf))
            elif leaf.requires_grad:
                self.places.append(("parameter", len(self.parameters_of_it)))
                self.parameters_of_it.append(nn.Parameter(leaf.detach().clone()))
            else:
                self.places.append(("input", len(self.inputs)))
                self.inputs.append(leaf)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        kinds = {"parameter": self.parameters_of_it, "input": inputs}
        leaves = [kinds[kind][at] if kind in kinds else at for kind, at in self.places]  # type: ignore[index]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = pytree.tree_leaves(self.function(*args, **kwargs))
        # The product resolves conjugate bits, which fake tensors do not have.
        tensors = [result for result in results if isinstance(result, Tensor)]
        return [torch.view_as_real(t * 1) if t.is_complex() else t for t in tensors]


def operators() -> list[Any]:
    """The differentiable operators of `op_db` that take float64, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
    # Random operators of PyTorch's tests seed inside of the call, which capture refuses.
    invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    return [
        op
        for op in sorted(invocations.op_db, key=lambda op: op.full_name)
        if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")
    ]


def samples(op: Any, count: int, seed: int) -> Iterator[tuple[int, Any]]:
    """`count` samples of an operator, each with its number; the same at each call."""
    torch.manual_seed(0)
    drawn = list(enumerate(islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), 200)))
    small = [each for each in drawn if _elements(each[1]) <= MOST_ELEMENTS]
    draw = random.Random(f"{op.full_name} {seed}" if seed else op.full_name)
    yield from sorted(draw.sample(small, min(count, len(small))), key=lambda each: each[0])


def _elements(sample: Any) -> int:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def endings(chosen: Sequence[Any], count: int = PER_OPERATOR, seed: int = 0) -> list[Ending]:
    """How `count` samples of each of these operators end."""
    return [
        Ending(op.full_name, number, *_ending(op, sample, number))
        for op in chosen
        for number, sample in samples(op, count, seed)
    ]


def _ending(op: Any, sample: Any, seed: int) -> tuple[str, str]:
    try:
        net = OperatorModule(op.op, ((sample.input, *sample.args), sample.kwargs))
        wanted, gradients = _eager(net)
    except Exception as error:  # The sample itself asks for what eager refuses.
        return REFUSED, f"eager: {type(error).__name__}: {error}"
    try:
        graph = capture(net, tuple(net.inputs))
        plan = random_plan(graph, DEVICES, seed)
        partitioned = plan.partitioned
        run = lambda step: simulate(  # noqa: E731
            partitioned,
            {name: p.detach().clone() for name, p in net.named_parameters()},
            {},
            net.inputs,
            seed=step,
            output_gradients=[_gradient(tensor) for tensor in wanted],
        )
        outcome = run(0)
    except ShardwrightError as error:
        return REFUSED, str(error)
    except Exception as error:
        return RAW, f"{type(error).__name__}: {error}"
    if outcome.replica_difference > 1e-9:
        return WRONG, f"replicas differ by {outcome.replica_difference}"
    if any(map(is_random, graph.ops)):
        outcomes = [outcome, *(run(step) for step in range(1, RUNS))]
        eager = [_eager(net, step)[0] for step in range(RUNS)]
        return _random_ending(eager, [each.outputs for each in outcomes], run(0).outputs)
    counted, planned = outcome.stage_bytes[0], (plan.forward_bytes, plan.backward_bytes)
    trained = any(gradient is not None for gradient in map(_gradient, wanted))
    if trained and counted != planned:
        return WRONG, f"{counted} bytes counted, {planned} planned"
    return _compared(wanted, gradients, outcome)


def _eager(net: OperatorModule, seed: int = 0) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """What the module returns, and the gradients of its parameters."""
    torch.manual_seed(seed)
    # Some samples seed themselves, all alike.
    with patch("torch.manual_seed"):
        results = net(*(tensor.clone() for tensor in net.inputs))
    pairs = [(tensor, _gradient(tensor)) for tensor in results]
    roots = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
    if roots:
        torch.autograd.backward(*map(list, zip(*roots, strict=True)))
    return results, {name: parameter.grad for name, parameter in net.named_parameters()}


def _gradient(tensor: Tensor) -> Tensor | None:
    """Distinct numbers, so that no error can cancel; None where autograd does not reach."""
    if not tensor.requires_grad:
        return None
    numbers = torch.arange(tensor.numel(), dtype=tensor.dtype)
    return torch.sin(1 + numbers).reshape(tensor.shape)


def _compared(
    wanted: list[Tensor], gradients: dict[str, Tensor | None], outcome: Outcome
) -> tuple[str, str]:
    pairs = [("output", a, b) for a, b in zip(outcome.outputs, wanted, strict=True)]
    for name, gradient in gradients.items():
        other = outcome.gradients.get(name)
        if gradient is not None and (other is not None or gradient.abs().sum() > 0):
            pairs.append((name, torch.zeros(()) if other is None else other, gradient))
    for name, got, expected in pairs:
        try:
            torch.testing.assert_close(
                got.detach(), expected.detach(), rtol=1e-7, atol=1e-7, equal_nan=True
            )
        except AssertionError as error:
            return WRONG, f"{name}: {str(error).splitlines()[0]}"
    return EQUAL, ""


def _random_ending(
    eager: list[list[Tensor]], split: list[list[Tensor]], again: list[Tensor]
) -> tuple[str, str]:
    """Compares the shapes and the first two moments of the outputs of some runs, and the outputs of
    the first run with those of another with its seed."""
    for first, second in zip(split[0], again, strict=True):
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            return WRONG, "a second run with the same seed differs"
    for number, (wanted, got) in enumerate(
        zip(zip(*eager, strict=True), zip(*split, strict=True), strict=True)
    ):
        if {tuple(each.shape) for each in (*wanted, *got)} != {tuple(wanted[0].shape)}:
            return WRONG, f"output {number}: shapes differ"
        for power in (1, 2):
            deviation = _deviation(*(_moments(each, power) for each in (wanted, got)))
            if deviation > MOST_DEVIATION:
                return WRONG, f"output {number}: moment {power} is off by {deviation:.1f} sigma"
    return RANDOM, ""


def _moments(outputs: Sequence[Tensor], power: int) -> Tensor:
    """One of each run; what is random in one run need not be independent."""
    runs = torch.stack([each.detach().flatten().double().nan_to_num() for each in outputs])
    return runs.pow(power).sum(1) / max(1, outputs[0].numel())


def _deviation(wanted: Tensor, got: Tensor) -> float:
    """How many standard errors the mean of some numbers differs from that of others."""
    error = ((wanted.var() + got.var()) / len(wanted)).sqrt() + 1e-9 * (1 + wanted.abs().max())
    return float((wanted.mean() - got.mean()).abs() / error)


def counts(ends: Sequence[Ending]) -> dict[str, int]:
    """How many samples ended in each way."""
    counted = Counter(each.end for each in ends)
    return {end: counted[end] for end in (EQUAL, RANDOM, REFUSED, WRONG, RAW)}


def main(first: str = "0", count: str = "1000", every: str = "1") -> None:
    chosen = operators()[int(first) : int(first) + int(count) : int(every)]
    ends = endings(chosen)
    for each in ends:
        if each.end not in (EQUAL, RANDOM):
            print(
                each.operator, each.sample, each.end, each.why[:300].replace("\n", " "), sep=" | "
            )
    print(json.dumps(counts(ends)))


if __name__ == "__main__":
    main(*sys.argv[1:])
