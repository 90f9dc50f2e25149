"""What is done to parameters after planning takes effect or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import PlanError

BATCH = torch.randn(4, 8)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.up.weight = self.down.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(self.down(x).tanh()) * self.scale
        return result


def replace_tied(net: nn.Module) -> None:
    net.up.weight = nn.Parameter(net.up.weight.detach().clone())  # type: ignore[union-attr]


def replace_by_an_equal_one(net: nn.Module) -> None:
    net.scale = nn.Parameter(torch.ones(1))


def register(net: nn.Module) -> None:
    net.up.register_parameter("bias", nn.Parameter(torch.ones(8)))  # type: ignore[union-attr]


def remove(net: nn.Module) -> None:
    del net.scale


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_tied, r"'up\.weight' was replaced"),
        (replace_by_an_equal_one, "'scale' was replaced"),
        (register, r"'up\.bias' was registered"),
        (remove, "'scale' was replaced"),
    ],
)
def test_another_parameter_than_planned_is_refused(
    change: Callable[[nn.Module], None], message: str
) -> None:
    net = Tied()
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    parallel(BATCH)
    change(parallel)
    with pytest.raises(PlanError, match=f"parameter {message} after planning"):
        parallel(BATCH)


def test_parameters_are_those_of_the_plan_for_all_calls() -> None:
    net, eager = Tied(), Tied()
    eager.load_state_dict(net.state_dict())
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    for _ in range(20):
        for model in (parallel, eager):
            model(BATCH).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.01 * parameter.grad
            model.zero_grad()
        torch.testing.assert_close(parallel(BATCH), eager(BATCH))
