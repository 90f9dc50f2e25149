"""What combines or saves the parameters of one pipeline stage only is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core.misuse.stage_ranks import CHECKS, in_stages
from shardwright.core.api.lone_rank import fake_process_group
from shardwright.errors import PlanError
from torchrun import checks_on_ranks

test_on_two_ranks = checks_on_ranks(CHECKS, 2)


@pytest.fixture(scope="module", params=[2, 4], ids=["a device a stage", "two devices a stage"])
def planned(request: pytest.FixtureRequest) -> Any:
    """What the first of two stages has of a model, with gradients."""
    with fake_process_group(0, request.param):
        net = in_stages(request.param)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return net


def test_inner_products_over_a_stage_are_refused(planned: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(planned.parameters())
    for _ in range(2):
        with pytest.raises(PlanError, match=r"`LBFGS` \(.*test_stage_parameters\.py:\d+\)"):
            optimizer.step(lambda: 0.0)
    alone = nn.Linear(2, 2)
    torch.optim.LBFGS(alone.parameters(), max_iter=1).step(lambda: alone(torch.ones(2)).sum())
