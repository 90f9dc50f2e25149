"""Where `parallelize` computes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwright as sw


def test_a_build_for_a_device_that_is_not_there_computes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    parallel = sw.parallelize(model, sw.plan(model, (x,), devices=1), copy=True)
    assert {p.device.type for p in parallel.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8)),
    ],
    ids=["another activation", "a layer more"],
)
def test_a_plan_is_refused_for_a_model_of_other_modules_with_the_planned_parameters(
    other: Callable[[], nn.Module],
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = sw.plan(net, (torch.randn(4, 8),), devices=1)
    with pytest.raises(sw.PlanError, match="the plan was made for another model"):
        sw.parallelize(other(), plan)


def test_a_model_that_was_built_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        net = nn.Linear(8, 8)
    plan = sw.plan(net, (torch.randn(4, 8),), devices=1)
    with pytest.raises(
        sw.PlanError, match=r"(?s)'weight' was created in inference mode.*`torch.no_grad"
    ):
        sw.parallelize(net, plan, copy=True)
