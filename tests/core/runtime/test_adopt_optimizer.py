"""An optimizer made before `parallelize` goes on with the parallel module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from sample_models import mlp


def parallel_mlp() -> tuple[nn.Module, nn.Module]:
    net, args, kwargs = mlp()
    return net, sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), copy=True)


def test_groups_keep_their_options_and_get_the_new_parameters() -> None:
    net, parallel = parallel_mlp()
    assert isinstance(net.layers, nn.ModuleList)
    optimizer = torch.optim.SGD(
        [
            {"params": net.layers[:2].parameters(), "lr": 0.5},
            {"params": net.layers[2:].parameters(), "weight_decay": 0.1},
        ],
        lr=0.1,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert sw.adopt(optimizer, parallel) is optimizer
    first, second = optimizer.param_groups
    assert [id(p) for p in (*first["params"], *second["params"])] == [
        id(p) for p in parallel.parameters()
    ]
    assert (first["lr"], first["weight_decay"]) == (0.5, 0.0)
    assert (second["lr"], second["weight_decay"]) == (0.1, 0.1)
    optimizer.step()
    schedule.step()
    assert first["lr"] == pytest.approx(0.05)


def test_an_adopted_optimizer_trains_the_parallel_module() -> None:
    net, args, kwargs = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), copy=True)
    sw.adopt(optimizer, parallel)
    before = parallel(*args).item()
    parallel(*args).backward()
    optimizer.step()
    assert parallel(*args).item() < before
    assert net(*args).item() == pytest.approx(before, rel=1e-6)


def test_an_adopted_optimizer_that_keeps_a_reference_to_its_parameters_trains_them() -> None:
    net, args, kwargs = mlp()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=1))
    sw.adopt(optimizer, parallel)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = parallel(*args)
        loss.backward()
        return loss

    before = parallel(*args).item()
    optimizer.step(closure)
    assert parallel(*args).item() < before


def test_an_optimizer_may_be_adopted_twice_and_by_a_second_parallel_module() -> None:
    net, parallel = parallel_mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sw.adopt(sw.adopt(optimizer, parallel), parallel)
    args = mlp()[1]
    other = sw.parallelize(net, sw.plan(net, args, devices=1), copy=True)
    sw.adopt(optimizer, other)
    held = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert held == {id(parameter) for parameter in other.parameters()}


def test_parameters_of_other_devices_leave_their_group() -> None:
    net, parallel = parallel_mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    del parallel.layers[0]  # as in a pipeline stage
    sw.adopt(optimizer, parallel)
    held = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert held == {id(parameter) for parameter in parallel.parameters()}


def test_parameters_of_another_model_are_refused_and_nothing_is_changed() -> None:
    net, parallel = parallel_mlp()
    other = nn.Linear(3, 5)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    before = list(optimizer.param_groups[0]["params"])
    with pytest.raises(sw.PlanError, match=r"parameter 6 of group 0 .* \(5, 3\)"):
        sw.adopt(optimizer, parallel)
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, before, strict=True))


def test_an_optimizer_with_state_is_refused() -> None:
    net, parallel = parallel_mlp()
    with pytest.raises(sw.PlanError, match="Adagrad has state"):
        sw.adopt(torch.optim.Adagrad(net.parameters()), parallel)
