"""Where `parallelize` computes."""

from __future__ import annotations

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
    parallel = sw.parallelize(model, sw.plan(model, (x,), devices=1))
    assert {p.device.type for p in parallel.parameters()} == {"cpu"}
