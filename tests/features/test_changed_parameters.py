"""Parameters that `forward` changes without autograd: trained as the eager module trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import random_plan, random_recompute
from shardwright.core.graph.float64 import graph_in_float64
from shardwright.core.parallel.simulate_ranks import simulate
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.errors import CaptureError, PlanError

BATCH, WIDTH = 8, 12


class Teacher(nn.Module):
    """An average of a student's parameters, which need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def average(self) -> None:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for mean, parameter in pairs:
                mean.mul_(0.9).add_(parameter, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.average()
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


class TeacherByData(Teacher):
    def average(self) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for mean, parameter in pairs:
            mean.data.lerp_(parameter.data, 0.1)


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH, max_norm=0.5)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 3).long().abs() % 16
        loss: Tensor = self.head(self.embedding(tokens)).square().mean()
        return loss


class Changed(nn.Module):
    """A linear layer whose weight is changed before it is read."""

    def __init__(self, change: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.linear.weight)
        loss: Tensor = self.head(self.linear(x).tanh()).square().mean()
        return loss + self.linear.weight.t()[1].sum()


@torch.no_grad()
def clamp(weight: nn.Parameter) -> None:
    weight.clamp_(-0.1, 0.1)


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def set_data(weight: nn.Parameter) -> None:
    weight.data = weight.data / weight.data.norm()


def change_a_detached_row(weight: nn.Parameter) -> None:
    weight.detach()[2] *= 0.5


@torch.no_grad()
def change_views_one_after_another(weight: nn.Parameter) -> None:
    weight[0].mul_(0.5)
    weight.t()[1:3, 2:] = 0.25
    weight.view(-1)[::5].copy_(weight.view(-1)[1::5] * 2)


@torch.no_grad()
def normalize_rows(weight: nn.Parameter) -> None:
    weight.copy_(weight / weight.norm(dim=1, keepdim=True))


class ChangedAfterUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        with torch.no_grad():
            self.linear.bias.add_(0.1)
            self.linear.weight.clamp_(-0.1, 0.1)
        return loss


class SpectralNorm(nn.Module):
    """Its power iteration writes into buffers by `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "teacher": Teacher,
    "teacher by data": TeacherByData,
    "max_norm": MaxNorm,
    "clamp": lambda: Changed(clamp),
    "clamp data": lambda: Changed(clamp_data),
    "set data": lambda: Changed(set_data),
    "detached row": lambda: Changed(change_a_detached_row),
    "views": lambda: Changed(change_views_one_after_another),
    "rows": lambda: Changed(normalize_rows),
    "after use": ChangedAfterUse,
    "spectral norm": SpectralNorm,
}


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(BATCH, WIDTH, dtype=torch.float64) for _ in range(count)]


def check_training(net: nn.Module, plan: sw.Plan, steps: list[Tensor]) -> None:
    """Steps of SGD with momentum on simulated ranks leave the tensors of the eager module."""
    assert plan.graph is not None
    partitioned = plan.partition(graph_in_float64(plan.graph))
    mine = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    mine = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in mine.items()}
    trained = [name for name, t in mine.items() if t.requires_grad]
    eager = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), 0.1, momentum=0.9)
    own = torch.optim.SGD([mine[name] for name in trained], 0.1, momentum=0.9)
    for batch in steps:
        eager.zero_grad()
        loss = net(batch)
        loss.backward()
        eager.step()
        outcome = simulate(partitioned, mine, mine, [batch])
        torch.testing.assert_close(outcome.outputs[0], loss.detach())
        assert outcome.replica_difference < 1e-9
        with torch.no_grad():
            for name, value in outcome.updates.items():
                mine[name].copy_(value)
        for name in trained:
            mine[name].grad = outcome.gradients.get(name)
        own.step()
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        torch.testing.assert_close(mine[name], tensor, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("seed", "name"), list(enumerate(MODELS)))
def test_a_random_plan_trains_what_the_eager_module_trains(seed: int, name: str) -> None:
    torch.manual_seed(seed)
    net = MODELS[name]().double()
    steps = batches()
    graph = sw.capture(net, (steps[0],))
    recompute = random_recompute(graph, seed) if seed % 2 else {}
    plan = replace(random_plan(graph, (4, 6)[seed // 2 % 2], seed), recompute=recompute)
    check_training(net, plan, steps)


@pytest.mark.parametrize("name", MODELS)
def test_a_parallel_module_on_one_device_trains_what_the_eager_module_trains(name: str) -> None:
    torch.manual_seed(1)
    net = MODELS[name]().double()
    steps = batches()
    sw.recompute(net)
    parallel = sw.parallelize(net, sw.plan(net, (steps[0],), devices=1), copy=True)
    for each in (net, parallel):
        optimizer = torch.optim.SGD((p for p in each.parameters() if p.requires_grad), 0.1)
        for batch in steps:
            optimizer.zero_grad()
            each(batch).backward()
            optimizer.step()
    for (key, wanted), got in zip(
        (*net.named_parameters(), *net.named_buffers()),
        (*parallel.parameters(), *parallel.buffers()),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, msg=lambda text, n=key: f"{n}: {text}")


def test_a_changed_trained_parameter_is_refused_where_it_would_be_read_too_early() -> None:
    net, (batch,) = MaxNorm().double(), batches(1)
    with pytest.raises(PlanError, match=r"'embedding.weight' is trained, and `forward` changes it"):
        sw.plan(sw.Pipeline(net, 2, loss_reduction="sum"), (batch,), devices=2)
    with pytest.raises(PlanError, match=r"'embedding.weight' .* level3"):
        sw.plan(net, (batch,), devices=2, hsdp=OptimizerParallel("level3", threshold=0))


def test_a_changed_parameter_is_refused_where_the_change_would_be_rounded() -> None:
    net = Teacher()
    message = r"mean.mul_\(0.9\).* parameter 'teacher.0.weight', which is stored in torch.float32"
    with pytest.raises(CaptureError, match=message):
        sw.plan(net, (torch.randn(BATCH, WIDTH),), devices=2, compute_dtype="bfloat16")


def test_a_changed_teacher_is_trained_in_micro_batches() -> None:
    torch.manual_seed(2)
    net = Teacher()
    batch = torch.randn(BATCH, WIDTH)
    plan = sw.plan(sw.Pipeline(net, 2, loss_reduction="sum"), (batch,), devices=1)
    parallel = sw.parallelize(net, plan, copy=True)
    parallel.train_step(batch)
    for piece in batch.chunk(2):
        net(piece).backward()
    for (name, wanted), got in zip(net.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
        torch.testing.assert_close(got.grad, wanted.grad, msg=name)
