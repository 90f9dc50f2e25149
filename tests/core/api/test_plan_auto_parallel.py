"""The one-object form: what is configured on it, and what it does at its first call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError, StrategyError

X, Y = torch.randn(8, 6), torch.arange(8) % 4


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return sw.WithLoss(layers, nn.CrossEntropyLoss())


def test_it_plans_at_its_first_call_and_gives_the_loss_of_the_model() -> None:
    net = sw.AutoParallel(network(), parallel_mode="recursive_programming")
    with pytest.raises(PlanError, match="not planned yet"):
        net.plan  # noqa: B018
    loss = net(X, Y)
    torch.testing.assert_close(loss, network()(X, Y))
    assert (net.plan.devices, net.plan.mode) == (1, "recursive_programming")


def test_it_bears_the_names_of_the_model_before_and_after_it_is_planned() -> None:
    net = sw.AutoParallel(network())
    names = [name for name, _ in network().named_parameters()]
    assert [name for name, _ in net.named_parameters()] == names
    net.compile(X, Y)
    assert [name for name, _ in net.named_parameters()] == names
    net.load_state_dict(network().state_dict())


def test_a_train_step_leaves_the_gradients_of_the_whole_batch() -> None:
    net = sw.AutoParallel(sw.Pipeline(network(), micro_batches=4))
    loss = net.train_step(X, Y)
    alone = network()
    wanted = alone(X, Y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for mine, its in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    norm = net.clip_grad_norm_(1e-3)
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in alone.parameters()]))


def test_an_optimizer_made_before_is_adopted() -> None:
    with sw.no_init_parameters():
        inner = network()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    net = sw.AutoParallel(inner)
    net.compile(X, Y)
    sw.adopt(optimizer, net)
    before = net(X, Y)
    before.backward()
    optimizer.step()
    assert net(X, Y) < before


def test_what_is_configured_reaches_the_plan(tmp_path: Path) -> None:
    net = sw.AutoParallel(network(), parallel_mode="recursive_programming")
    net.hsdp(shard_size=4, threshold=0, optimizer_level="level2")
    net.full_batch = False
    assert net.options.dataset_strategy == "data_parallel"
    net.dataset_strategy(((2, 1), (2,)))
    assert not net.full_batch
    net.full_batch = True
    net.compile(X, Y)
    assert net.plan.sharding == sw.OptimizerParallel("level2", 4, 0)
    net.save_plan(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json").sharding == net.plan.sharding
    net.save_operator_strategy_file(tmp_path / "strategies.json")
    assert (tmp_path / "strategies.json").exists()
    with pytest.raises(
        PlanError,
        match="planned already, so its configuration cannot change\nconfigure the model before",
    ):
        net.hsdp()


def test_interleave_is_a_schedule_of_its_own() -> None:
    net = sw.AutoParallel(network())
    net.pipeline(stages=2, interleave=True)
    assert (net.options.stages, net.options.schedule) == (2, "interleaved_1f1b")


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda net: net.hsdp(shard_size=0), "shard_size 0 must be"),
        (lambda net: net.hsdp(shard_size=True), "shard_size True must be"),
        (lambda net: net.hsdp(threshold=-1), "threshold -1 must be"),
        (lambda net: net.hsdp(optimizer_level="level4"), "use one of level1, level2, level3"),
        (lambda net: net.pipeline(stages=0), "stages=0: must be a whole number"),
        (lambda net: net.pipeline(stages=True), "stages=True: must be a whole number"),
        (lambda net: net.pipeline(scheduler="seqpipe"), "must be one of 1f1b, gpipe"),
        (lambda net: net.pipeline(interleave=True, scheduler="gpipe"), "interleave=True is"),
        (lambda net: net.dataset_strategy("half"), "use 'full_batch'"),
        (lambda net: net.dataset_strategy(None), "must be a tuple"),
    ],
)
def test_what_is_not_valid_is_one_clear_error(configure: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        configure(sw.AutoParallel(network()))


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(StrategyError, match="parallel_mode='auto': must be one of semi_auto"):
        sw.AutoParallel(network(), parallel_mode="auto")
