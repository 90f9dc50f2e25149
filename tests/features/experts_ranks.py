"""What `test_experts.py` runs on every rank: experts that are cut train as on one device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from features.test_experts import batch, gpt_oss_with_unused_experts, mixtral
from torchrun import run_checks

STEPS = 3


def trained(net: Any, kwargs: dict[str, torch.Tensor], step: Any) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        losses.append(float(step(**kwargs)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_cut_experts(build: Callable[[], Any], compiled: bool = False) -> None:
    """Each of two ranks has half of the experts."""
    torch.manual_seed(0)
    net, kwargs = build(), batch()
    whole = copy.deepcopy(net)
    for layer in net.model.layers:
        biases = (None, None) if layer.mlp.experts.has_bias else ()
        sw.shard(layer.mlp.experts, (None, None, None, (2, 1, 1, 1), (2, 1, 1), *biases))
    plan = sw.plan(net, (), kwargs, devices=2)
    parallel: Any = sw.parallelize(net, plan, "cpu", copy=True)
    (name,) = [name for name in plan.strategies if name.endswith("mlp.experts")]
    assert plan.strategies[name][3] == (2, 1, 1, 1), plan
    if compiled:
        parallel.compile(fullgraph=True, backend="aot_eager")

    def step(**kwargs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = whole(**kwargs).loss
        loss.backward()
        return loss

    got = trained(parallel, kwargs, parallel.train_step)
    torch.testing.assert_close(got, trained(whole, kwargs, step), rtol=1e-4, atol=1e-5)
    assert got[-1] < got[0]
    for name, parameter in whole.named_parameters():
        mine = parallel.get_parameter(name).full_tensor()
        torch.testing.assert_close(mine, parameter, rtol=1e-3, atol=1e-5)


def check_uneven_routing() -> None:
    check_cut_experts(mixtral)


def check_unused_experts() -> None:
    check_cut_experts(gpt_oss_with_unused_experts)


def check_compiled() -> None:
    check_cut_experts(mixtral, compiled=True)


CHECKS = (check_uneven_routing, check_unused_experts, check_compiled)

if __name__ == "__main__":
    run_checks(CHECKS)
