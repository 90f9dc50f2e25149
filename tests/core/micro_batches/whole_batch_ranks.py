"""What `test_whole_batch.py` runs on each of two ranks: micro-batches train the loss of the
whole batch, or are refused."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from core.micro_batches.accumulation import BATCH_NORM_NETS, accumulated, batch
from torchrun import run_checks

Loss = Callable[[Tensor, Tensor], Tensor]
WAYS: tuple[dict[str, Any], ...] = (
    {"micro_batches": 2, "mode": "data_parallel"},
    {"micro_batches": 4},
    {"micro_batches": 4, "stages": 2},
)
SCHEDULES = ("gpipe", "interleaved_1f1b", "zero_bubble_v", "interleaved_zero_bubble")
EXACT: dict[str, Loss] = {
    "labels of two samples are ignored": lambda z, y: F.cross_entropy(z, y, ignore_index=0),
    "smoothed and scaled": lambda z, y: (
        F.cross_entropy(z, y, ignore_index=0, label_smoothing=0.1) / 2
    ),
    "a sum over the batch size": lambda z, y: z.square().sum() / len(z),
    "own log probabilities": lambda z, y: -z.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "class weights": lambda z, y: F.cross_entropy(z, y, torch.arange(1.0, 6, dtype=z.dtype)),
    "a sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "a masked mean": lambda z, y: (z.square().mean(1) * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "where": lambda z, y: torch.where(y > 0, z.square().mean(1), 0).sum() / (y > 0).sum().add(1),
    "means of classes": lambda z, y: (
        z.new_ones(5).scatter_add(0, y, z.square().mean(1))
        / z.new_ones(5).scatter_add(0, y, torch.ones_like(z[:, 0]))
    ).mean(),
    "scattered means of classes": lambda z, y: (
        z.new_ones(5).scatter_reduce(0, y, z.square().mean(1), "mean").mean()
    ),
    "terms with different divisors": lambda z, y: (
        F.cross_entropy(z, y, ignore_index=0)
        + (z.square().mean(1) * (y > 1)).sum() / (y > 1).sum()
        + z.square().mean()
        + z.sin().sum() / 7
    ),
    "a loss for each sample, over the number of labels": lambda z, y: (
        z.square().mean(1) * (y > 0) / (y > 0).sum()
    ).sum(),
    "advantages normalized by the batch": lambda z, y: (
        z.mean(1) * (y - y.double().mean()) / (y.double().std() + 1e-3)
    ).mean(),
}
EMPTY: dict[str, Loss] = {
    "a masked mean": lambda z, y: (z.square().mean(1) * (y > 0)).sum() / (y > 0).sum(),
    "where": lambda z, y: torch.where(y > 1, z.exp().mean(1), 0).mean() / (y > 1).double().mean(),
}
"""Losses that divide by 0 in micro-batches of two samples, such as the first."""
REFUSED: dict[str, Loss] = {
    "a learned mask": lambda z, y: (z.square() * (z > 0)).sum() / (z > 0).sum(),
    "a root": lambda z, y: F.mse_loss(z, z.detach() + 1).sqrt(),
    "a spread": lambda z, y: z.std(0).mean(),
    "operands by the batch size": lambda z, y: (
        F.cross_entropy(z, y, z.new_ones(5) * 2 if len(z) < 8 else z.new_ones(5) + y.sum()).mean()
        + (z.sin() if len(z) < 8 else z).square().mean()
    ),
    "chunks of the batch": lambda z, y: sum(part.exp().mean() for part in z.chunk(4)) / 4,
    "a largest": lambda z, y: z.square().mean(1).max(),
    "pairs": lambda z, y: F.cross_entropy(z @ z.t(), torch.arange(len(z))),
}


class Recurrent(nn.Module):
    """`nn.LSTM` has the samples in dimension 1 by default."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        z = self.out(self.rnn(x)[0])
        return z if y is None else F.cross_entropy(z[-1], y, ignore_index=0)


class WeightedLoss(nn.Module):
    """A cross entropy whose class weights are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.arange(1.0, 6, dtype=torch.float64)
        self.loss = nn.CrossEntropyLoss(weights, ignore_index=0, label_smoothing=0.1)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(z, y)


class Net(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.last(self.first(x).tanh()), y)


def built(loss: Loss) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net(loss).double(), torch.randn(8, 6).double(), torch.tensor([0, 0, 1, 2, 3, 4, 0, 1])


def check_micro_batches_train_the_loss_of_the_batch() -> None:
    for way in WAYS:
        check_exact(EXACT["terms with different divisors"], way)
    # Each of the others in one way: test_whole_batch.py has such losses without processes.
    for number, loss in enumerate((*EXACT.values(), *EMPTY.values(), WeightedLoss())):
        check_exact(loss, WAYS[number % len(WAYS)])


def check_a_batch_of_another_size_is_weighted_too() -> None:
    net, x, y = built(WeightedLoss())
    for way in WAYS:
        planned = sw.parallelize(net, sw.plan(net, (x, y), devices=2, **way), copy=True)
        torch.testing.assert_close(planned.train_step(x[:4], y[:4]), net(x[:4], y[:4]).detach())


def check_numbers_that_depend_on_the_batch_size_are_those_of_each_batch() -> None:
    net, x, y = built(lambda z, y: z.square().sum() / min(len(z), 4) + 1 / len(z))
    planned = sw.parallelize(net, sw.plan(net, (x, y), devices=2, micro_batches=2), copy=True)
    for samples in (8, 4, 2, 6):
        loss = planned.train_step(x[:samples], y[:samples])
        torch.testing.assert_close(loss, net(x[:samples], y[:samples]).detach())


def check_all_schedules_train_the_loss_of_the_batch() -> None:
    for schedule in SCHEDULES:
        check_exact(EXACT["terms with different divisors"], {**WAYS[2], "schedule": schedule})


def check_each_rank_may_pass_its_own_rows() -> None:
    for name in ("terms with different divisors", "advantages normalized by the batch"):
        net, x, y = built(EXACT[name])
        for way in WAYS[:2]:
            plan = sw.plan(net, (x, y), devices=2, dataset_strategy="data_parallel", **way)
            planned = sw.parallelize(net, plan, copy=True)
            own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
            torch.testing.assert_close(planned.train_step(x[own], y[own]), net(x, y).detach())


def check_a_call_with_the_shape_of_a_micro_batch_has_a_loss_of_its_own() -> None:
    net, x, y = built(EXACT["terms with different divisors"])
    planned = sw.parallelize(net, sw.plan(net, (x, y), devices=2, micro_batches=2), copy=True)
    torch.testing.assert_close(planned(x[2:6], y[2:6]).detach(), net(x[2:6], y[2:6]).detach())
    torch.testing.assert_close(planned.train_step(x, y), net(x, y).detach())


def check_a_pipeline_evaluates_the_loss_of_the_batch() -> None:
    net, x, y = built(EXACT["terms with different divisors"])
    planned = sw.parallelize(net, sw.plan(net, (x, y), devices=2, **WAYS[2]), copy=True)
    with torch.no_grad():
        torch.testing.assert_close(planned(x, y), net(x, y))
        torch.testing.assert_close(planned.eval()(x[:4], y[:4]), net(x[:4], y[:4]))


def check_samples_are_split_in_another_dimension() -> None:
    for way in WAYS:
        torch.manual_seed(0)
        net, x = Recurrent().double(), torch.randn(4, 8, 6).double()
        y = torch.tensor([0, 0, 1, 2, 3, 4, 0, 1])
        plan = sw.plan(net, (x, y), devices=2, **way)
        assert plan.pipeline.batch_dims == (1, 0)
        planned = sw.parallelize(net, plan, copy=True)
        for samples in (8, 4):
            part = x[:, :samples].contiguous(), y[:samples]
            torch.testing.assert_close(planned.train_step(*part), net(*part).detach())
        with torch.no_grad():
            torch.testing.assert_close(planned(x), net(x))


def check_batch_norms_train_as_gradient_accumulation_does() -> None:
    names = ("ignored targets", "instances", "images", "called twice")
    split = {"micro_batches": 4, "mode": "data_parallel"}
    ways = (split, split, WAYS[2], WAYS[2])
    for name, way in zip(names, ways, strict=True):
        torch.manual_seed(0)
        net, call = BATCH_NORM_NETS[name]().double(), batch()
        plan = sw.plan(net, call, devices=2, batch_norm="per_micro_batch", **way)
        planned = sw.parallelize(net, plan, copy=True)
        for _ in range(2):
            net.zero_grad()
            planned.zero_grad()
            loss = accumulated(net, call, 4)
            torch.testing.assert_close(planned.train_step(*call), loss)
            check_gradients(planned, net)
        for buffer_name, buffer in planned.named_buffers():
            torch.testing.assert_close(buffer, net.get_buffer(buffer_name))


def check_exact(loss: Loss, way: dict[str, Any]) -> None:
    net, x, y = built(loss)
    wanted = net(x, y)
    wanted.backward()
    planned = sw.parallelize(net, sw.plan(net, (x, y), devices=2, **way), copy=True)
    torch.testing.assert_close(planned.train_step(x, y), wanted.detach())
    check_gradients(planned, net)


def check_gradients(planned: nn.Module, net: nn.Module) -> None:
    for name, parameter in planned.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad, net.get_parameter(name).grad)


def check_other_losses_are_refused_on_all_ranks() -> None:
    for loss in REFUSED.values():
        for way in WAYS:
            net, x, y = built(loss)
            said = refused(
                lambda net=net, x=x, y=y, way=way: sw.plan(net, (x, y), devices=2, **way)
            )
            assert f"micro_batches={way['micro_batches']}: " in said and said.count("\n") == 1, said
            assert "whole_batch_ranks.py:" in said, said


def check_plans_of_files_are_refused_too() -> None:
    net, x, y = built(REFUSED["a spread"])
    pieces = sw.Pipeline(net, 2, loss_reduction="sum")
    plan = sw.plan(pieces, (x, y), devices=2)
    plan = replace(plan, pipeline=replace(plan.pipeline, loss_reduction="mean"))
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        loaded = sw.Plan.load(Path(folder) / "plan.json")
    assert "aten.std" in refused(lambda: sw.parallelize(net, loaded, copy=True))


def check_sums_of_micro_batches_are_trained_where_they_are_asked_for() -> None:
    net, x, y = built(REFUSED["a spread"])
    wanted = sum(net(*half) for half in zip(x.chunk(2), y.chunk(2), strict=True))
    plan = sw.plan(sw.Pipeline(net, 2, loss_reduction="sum"), (x, y), devices=2)
    loss = sw.parallelize(net, plan, copy=True).train_step(x, y)
    torch.testing.assert_close(loss, wanted.detach())


def refused(call: Callable[[], Any]) -> str:
    """The error, which all ranks raise."""
    try:
        call()
        said = ""
    except (sw.StrategyError, sw.PlanError) as error:
        said = str(error)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    assert said and every == [said, said], every
    return said


CHECKS = (
    check_micro_batches_train_the_loss_of_the_batch,
    check_all_schedules_train_the_loss_of_the_batch,
    check_samples_are_split_in_another_dimension,
    check_batch_norms_train_as_gradient_accumulation_does,
    check_a_batch_of_another_size_is_weighted_too,
    check_numbers_that_depend_on_the_batch_size_are_those_of_each_batch,
    check_each_rank_may_pass_its_own_rows,
    check_a_call_with_the_shape_of_a_micro_batch_has_a_loss_of_its_own,
    check_a_pipeline_evaluates_the_loss_of_the_batch,
    check_other_losses_are_refused_on_all_ranks,
    check_plans_of_files_are_refused_too,
    check_sums_of_micro_batches_are_trained_where_they_are_asked_for,
)

if __name__ == "__main__":
    run_checks(CHECKS)
