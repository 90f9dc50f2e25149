from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from random_plans import check_random_plan, random_plan
from shardwright.core.capture.capture import capture

Tensors = list[Tensor]

FUNCTIONS: dict[str, Callable[[Tensors], Any]] = {
    "with a factor": lambda h: torch._foreach_add(h, h[::-1], alpha=0.3),
    "with numbers": lambda h: torch._foreach_add_(h, [1, 2.5, 3]),
    "with a tensor": lambda h: torch._foreach_add_(h, h[0].mean().detach(), alpha=2),
    "with a value": lambda h: torch._foreach_addcmul(h, h, h[::-1], 0.5),
    "in place": lambda h: torch._foreach_mul_(h, [1.5, 2, 3]),
    "larger than a number": lambda h: torch._foreach_maximum(h, 0.1),
    "smaller than numbers": lambda h: torch._foreach_minimum(h, [0.1, 0.2, 0.3]),
    "norms": lambda h: torch._foreach_norm(h, 3),
    "without one for a tensor": lambda h: torch._foreach_max(h),
    "of a number": lambda h: torch._foreach_pow(2.0, h),
    "averages": lambda h: torch._foreach_lerp(h, [t.sin() for t in h], 0.1),
}


class Each(nn.Module):
    """What `function` makes of a list of tensors, and buffers that it changes."""

    def __init__(self, function: Callable[[Tensors], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mean, self.square = nn.Buffer(torch.zeros(8)), nn.Buffer(torch.ones(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.linear(x), self.linear(x * 2) * 0.3, x.abs() + 1]
        results = self.function(hidden)
        with torch.no_grad():
            torch._foreach_mul_([self.mean, self.square], 0.9)
            torch._foreach_add_([self.mean, self.square], [x.mean(0), x.square().mean(0)])
        out = sum(t.sin().mean() for t in (hidden if results is None else results))
        return out + (self.linear(x) * self.mean / self.square.sqrt()).square().mean()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_on_lists_of_tensors_train_under_random_plans(name: str) -> None:
    net, args = Each(FUNCTIONS[name]), (torch.randn(8, 8),)
    graph = capture(net, args)
    for seed in range(2):
        check_random_plan(net, args, {}, graph, random_plan(graph, 4, seed))


def test_each_tensor_of_a_list_has_an_operator_of_its_own() -> None:
    graph = capture(Each(FUNCTIONS["averages"]), (torch.randn(8, 8),))
    targets = [str(op.target) for op in graph.ops]
    assert sum("lerp" in target for target in targets) == 3
    assert not any("foreach" in target for target in targets)
