"""Files that version 0.1.0 wrote are read: a plan, its strategies and a checkpoint.

Version 0.1.0 planned `network()` for 4 devices with `hsdp={"threshold": 0}, mem_coeff=4.0`, and
saved it with AdamW (`lr=0.1`) after two steps on one device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw

FILES = Path(__file__).parent / "release_0_1_0"
BATCH = torch.ones(8, 8), torch.zeros(8, 4)
LOSS_AFTER_TWO_STEPS = 0.05111115425825119


def network() -> nn.Module:
    torch.manual_seed(0)
    return sw.WithLoss(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.MSELoss())


def test_a_plan_is_of_the_same_model_and_trains_it() -> None:
    plan = sw.Plan.load(FILES / "plan.json")
    assert plan.devices == 4
    assert plan.sharding.level == "level1"
    assert sw.check(network(), BATCH, None, plan).passes()


def test_strategies_pin_the_operators() -> None:
    net = network()
    sw.load_strategies(net, FILES / "strategies.json")
    plan = sw.plan(net, BATCH, devices=4, mode="semi_auto")
    assert plan.strategies["net.0"] == ((4, 1), (1, 1))
    assert plan.parameter_bytes == sw.Plan.load(FILES / "plan.json").parameter_bytes


def test_a_checkpoint_continues_with_a_warning_that_it_has_no_checksums() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with pytest.warns(sw.CheckpointWarning, match="has no checksums"):
        position = sw.load_checkpoint(FILES / "checkpoint", net, optimizer)
    assert position.step == 2
    assert net(*BATCH).item() == pytest.approx(LOSS_AFTER_TWO_STEPS)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
