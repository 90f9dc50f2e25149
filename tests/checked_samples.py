"""PyTorch's samples of its operators as users have them: `sw.check` of a module that multiplies the
inputs by parameters and calls the operator, planned on 5 devices.

`python -m checked_samples [FIRST COUNT [PER]]` prints those that are neither equal nor refused,
and the counts as JSON. All operators take about ten minutes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwright as sw
from operator_samples import (
    DEVICES,
    EQUAL,
    RANDOM,
    RAW,
    REFUSED,
    WRONG,
    Ending,
    counts,
    operators,
    samples,
)
from random_plans import random_plan
from shardwright import Plan, ShardwrightError
from shardwright.core.graph.graph import Graph

UNINITIALIZED = ("empty", "new_empty")
"""Operators whose results are memory that nothing has written."""


class Scaled(nn.Module):
    """An operator on inputs, of which those with gradients are multiplied by parameters of ones."""

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.function, self.leaves = function, leaves
        trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        shapes = [leaf.shape[-1:] if leaf.numel() else () for leaf in trained]
        ones = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
        self.scales = nn.ParameterList(map(nn.Parameter, ones))
        self.inputs = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        given, scales = iter(inputs), iter(self.scales)
        leaves = [
            leaf
            if not isinstance(leaf, Tensor)
            else next(given) * next(scales)
            if leaf.requires_grad
            else next(given)
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = pytree.tree_leaves(self.function(*args, **kwargs))
        tensors = [result for result in results if isinstance(result, Tensor)]
        return [torch.view_as_real(t * 1) if t.is_complex() else t for t in tensors]


def checked_endings(chosen: Sequence[Any], count: int, seed: int = 0) -> list[Ending]:
    """How `check` of `count` samples of each of these operators ends."""
    return [
        Ending(op.full_name, number, *_checked(op, sample, random.Random(f"{number} {seed}")))
        for op in chosen
        if not op.full_name.startswith(UNINITIALIZED)
        for number, sample in samples(op, count, seed)
    ]


def _checked(op: Any, sample: Any, draw: random.Random) -> tuple[str, str]:
    try:
        net = Scaled(op.op, ((sample.input, *sample.args), sample.kwargs))
        results = [result for result in net(*net.inputs) if result.requires_grad]
        if results:
            torch.autograd.backward([result.sum() for result in results])
        without = any(scale.grad is None for scale in net.scales)
    except Exception as error:  # The sample itself asks for what eager refuses.
        return REFUSED, f"eager: {type(error).__name__}: {error}"
    try:
        result = sw.check(net, net.inputs, {}, _plan(net, draw))
    except ShardwrightError as error:
        return REFUSED, str(error)
    except Exception as error:
        return RAW, f"{type(error).__name__}: {error}"
    if result.passes(1e-7):
        return (RANDOM if result.random_operators else EQUAL), ""
    # PyTorch has no gradient where it knows that all are 0, such as of a norm of order 0.
    only_missing = without and result.gradient_difference == float("inf")
    return (EQUAL if only_missing else WRONG), str(result)


def _plan(net: Scaled, draw: random.Random) -> Plan:
    mode = draw.choice(("random", "search", "data", "storage"))
    if mode == "search":
        return sw.plan(net, net.inputs, devices=DEVICES)
    if mode == "data":
        return sw.plan(net, net.inputs, devices=DEVICES, mode="data_parallel")
    if mode == "storage":
        return sw.plan(net, net.inputs, devices=DEVICES, hsdp={"level": "level3"})
    graph: Graph = sw.capture(net, net.inputs)
    return random_plan(graph, DEVICES, draw.randrange(1000))


def main(first: str = "0", count: str = "1000", per: str = "3") -> None:
    ends = checked_endings(operators()[int(first) : int(first) + int(count)], int(per))
    for each in ends:
        if each.end in (WRONG, RAW):
            print(each.operator, each.sample, each.end, each.why[:300].replace("\n", " "))
    print(json.dumps(counts(ends)))


if __name__ == "__main__":
    main(*sys.argv[1:])
