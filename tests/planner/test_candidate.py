"""Decisions on a cluster whose nodes are smaller than the number of devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw


@pytest.mark.parametrize("devices", [24, 40, 48])
def test_data_parallel_scales_alike_on_any_number_of_nodes(devices: int) -> None:
    between = seconds(16) + (seconds(64) - seconds(16)) * (devices - 16) / 48
    assert seconds(devices) == pytest.approx(between, rel=0.1)


def seconds(devices: int) -> float:
    """Of a step with as many rows on each device."""
    with torch.device("meta"):
        layers = [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
        net = sw.WithLoss(nn.Sequential(*layers), nn.MSELoss())
        batch = torch.empty(64 * devices, 4096), torch.empty(64 * devices, 4096)
    plan = sw.plan(net, batch, devices=devices, mode="data_parallel", cluster="h100")
    assert plan.step_time is not None
    return plan.step_time
