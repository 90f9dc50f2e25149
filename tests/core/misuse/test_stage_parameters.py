"""The norm of the parameters of one pipeline stage is not the model's, and is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from core.misuse.stage_ranks import CHECKS, in_stages
from shardwright.core.api.lone_rank import fake_process_group
from shardwright.errors import PlanError
from torchrun import checks_on_ranks

test_on_two_ranks = checks_on_ranks(CHECKS, 2)


@pytest.fixture(scope="module", params=[2, 4], ids=["a device a stage", "two devices a stage"])
def planned(request: pytest.FixtureRequest) -> Any:
    """What the first of two stages has of a model."""
    with fake_process_group(0, request.param):
        return in_stages(request.param)


@pytest.fixture
def stage(planned: nn.Module) -> nn.Module:
    """The same, with gradients."""
    for parameter in planned.parameters():
        parameter.grad = torch.ones_like(parameter)
    return planned


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


REFUSED: dict[str, Callable[[Any], object]] = {
    "all parameters": lambda net: clip_grad_norm_(net.parameters(), 1.0),
    "by keyword": lambda net: clip_grad_norm_(parameters=net.parameters(), max_norm=1.0),
    "a list": lambda net: clip_grad_norm_([*net.parameters()], 1.0),
    "a generator": lambda net: clip_grad_norm_((p for p in net.parameters()), 1.0),
    "the largest element": lambda net: clip_grad_norm_([*net.parameters()], 1.0, math.inf),
    "in a loop": lambda net: clip_grad_norm_([*net.parameters()], 1.0, foreach=False),
    "the deprecated name": lambda net: nn.utils.clip_grad_norm(net.parameters(), 1.0),
    "a group of an optimizer": lambda net: clip_grad_norm_(
        torch.optim.SGD([{"params": [p for p in net.parameters() if p.ndim > 1]}]).param_groups[0][
            "params"
        ],
        1.0,
    ),
    "with a model of one device": lambda net: clip_grad_norm_(
        [*net.parameters(), *nn.Linear(2, 2).parameters()], 1.0
    ),
    "gradients": lambda net: get_total_norm(gradients(net)),
    "views of gradients": lambda net: get_total_norm([g.detach() for g in gradients(net)]),
    "values of parameters": lambda net: get_total_norm(net.parameters()),
    "a submodule in both stages": lambda net: clip_grad_norm_(net.net.parameters(), 1.0),
    "a submodule with a tied parameter": lambda net: clip_grad_norm_(
        net.net.table.parameters(), 1.0
    ),
    "a copy of the model": lambda net: clip_grad_norm_(copy.deepcopy(net).parameters(), 1.0),
}


@pytest.mark.filterwarnings("ignore:.*clip_grad_norm:FutureWarning")
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_a_norm_over_a_stage_is_refused(stage: nn.Module, call: Callable[[Any], object]) -> None:
    with pytest.raises(
        PlanError, match=r"(?s)test_stage_parameters\.py:\d+\).* `net\.clip_grad_norm_"
    ):
        call(stage)
    assert all(bool((g == 1).all()) for g in gradients(stage))


ACCEPTED: dict[str, Callable[[Any], object]] = {
    "each parameter": lambda net: [clip_grad_norm_(p, 1.0) for p in net.parameters()],
    "the gradient of one": lambda net: get_total_norm(gradients(net)[0]),
    "a submodule in this stage": lambda net: clip_grad_norm_(net.net.one.parameters(), 1.0),
    "a submodule in the other": lambda net: clip_grad_norm_([*net.net.two.parameters()], 1.0),
    "elements": lambda net: clip_grad_value_(net.parameters(), 0.5),
    "by a given norm": lambda net: clip_grads_with_norm_(net.parameters(), 1.0, torch.tensor(9.0)),
    "a model of one device": lambda net: get_total_norm(nn.Linear(2, 2).parameters()),
    "nothing": lambda net: get_total_norm([]),
}


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_right_in_each_stage_is_accepted(
    stage: nn.Module, call: Callable[[Any], object]
) -> None:
    call(stage)


def test_a_submodule_is_clipped_by_its_own_norm(stage: Any) -> None:
    norm = clip_grad_norm_(stage.net.one.parameters(), 1.0)
    count = sum(p.numel() for p in stage.net.one.parameters())
    assert float(norm) == pytest.approx(count**0.5)


def test_inner_products_over_a_stage_are_refused(stage: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(stage.parameters())
    for _ in range(2):
        with pytest.raises(PlanError, match=r"`LBFGS` \(.*test_stage_parameters\.py:\d+\)"):
            optimizer.step(lambda: 0.0)
    alone = nn.Linear(2, 2)
    torch.optim.LBFGS(alone.parameters(), max_iter=1).step(lambda: alone(torch.ones(2)).sum())
