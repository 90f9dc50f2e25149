"""Settings of parameter groups are restored if they have the types of the optimizer's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.checkpoint.group_settings import check_group_settings, group_settings
from shardwright.errors import CheckpointError

FOLDER = Path("step-3")


def adamw(**settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters(), **settings)


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": None},
        {"lr": "x"},
        {"lr": True},
        {"lr": float("nan")},
        {"lr": [0.1]},
        {"betas": "x"},
        {"betas": [0.9]},
        {"betas": [0.9, None]},
        {"eps": {}},
        {"amsgrad": 0.5},
        {"foreach": []},
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(changed: dict[str, Any]) -> None:
    optimizer = adamw()
    (settings,) = group_settings(optimizer)
    with pytest.raises(CheckpointError, match=f"`{next(iter(changed))}` of parameter group 0"):
        check_group_settings(optimizer, [{**settings, **changed}], FOLDER)


@pytest.mark.parametrize(
    "changed",
    [{"lr": 1}, {"betas": [0.8, 0.99]}, {"foreach": True}, {"fused": None}, {"initial_lr": 0.1}],
)
def test_another_value_of_the_type_is_accepted(changed: dict[str, Any]) -> None:
    optimizer = adamw(lr=torch.tensor(0.1), capturable=False)
    (settings,) = json.loads(json.dumps(group_settings(optimizer)))
    check_group_settings(optimizer, [{**settings, **changed}], FOLDER)


def test_a_refused_setting_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.99))
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sw.save_checkpoint(tmp_path, net, optimizer, position=sw.Position(1))
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    # Its settings have another form, as those of a damaged checkpoint.
    wrong = torch.optim.AdamW(other.parameters())
    wrong.param_groups[0]["betas"] = (0.9, 0.99, 0.999)
    with pytest.raises(CheckpointError, match="`betas` of parameter group 0"):
        sw.load_checkpoint(tmp_path, other, wrong)
    assert torch.equal(other.weight, before)
    assert not wrong.state
