"""What `test_local_map.py` runs on every rank: programs that capture refuses, on real processes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from torchrun import run_checks


class Branching(nn.Module):
    """Takes another branch where rows are large."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.large(row) if row.norm() > 2.5 else self.small(row) for row in x]
        return torch.stack(rows)


class Scaled(nn.Module):
    """Makes Python numbers of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.stack([self.linear(row) / max(row.abs().max().item(), 1.0) for row in x])


class Selected(nn.Module):
    """Computes only the rows that are chosen, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.sum(1).topk(int((x.sum(1) > 0).sum())).indices
        return torch.zeros_like(x).index_add(0, rows, self.linear(x[rows]).relu())


class CumulativeKernel(torch.autograd.Function):
    """A kernel in place, whose gradient is not that of its operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.cumsum_(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].flip(-1).cumsum(-1).flip(-1) * 0.5


class WithKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = CumulativeKernel.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return y


class Detour(nn.Module):
    """Computes weights of rows with numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = np.tanh(np.abs(x.detach().numpy()).sum(1))
        return self.linear(x) * torch.from_numpy(weights)[:, None]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            return x
        y: Tensor = checkpoint(lambda x: self.linear(x).tanh(), x, use_reentrant=False)
        return y


PROGRAMS: tuple[Callable[[], nn.Module], ...] = (
    *(Branching, Scaled, Selected, WithKernel, Detour),
    Checkpointed,
)


class Model(nn.Module):
    """A layer that capture refuses between two that it takes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 8), layer, nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y: Tensor = self.layer(self.first(x))
        return functional.mse_loss(self.last(y), target)


LEVELS: tuple[Any, ...] = (None, sw.OptimizerParallel("level3", threshold=0))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return 2 * torch.randn(8, 4), torch.randn(8, 3)


def compare(net: nn.Module, single: nn.Module, plan: sw.Plan, call: tuple[Any, ...]) -> None:
    """Losses, gradients and parameters of three steps with those of one device."""
    planned = sw.parallelize(net, plan)
    ours = torch.optim.AdamW(planned.parameters(), 0.05)
    theirs = torch.optim.AdamW(single.parameters(), 0.05)
    for _ in range(3):
        loss, wanted = planned(*call), single(*call)
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(loss, wanted)
        for (name, mine), other in zip(
            planned.named_parameters(), single.parameters(), strict=True
        ):
            grad = mine.grad
            assert grad is not None, name
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            other_grad = torch.zeros_like(other) if other.grad is None else other.grad
            torch.testing.assert_close(full, other_grad, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def a_layer_gives_the_gradients_of_one_device() -> None:
    for number, make in enumerate(PROGRAMS):
        for level in LEVELS[number % 2 :][:1]:
            torch.manual_seed(0)
            net = Model(make())
            single = copy.deepcopy(net)
            with (
                pytest.raises(sw.CaptureError, match=r"sw\.local_map")
                if make is not Checkpointed
                else (pytest.raises(sw.CaptureError))
            ):
                sw.capture(net, batch())
            sw.local_map(net.layer, "b _h -> b _h")
            plan = sw.plan(net, batch(), devices=dist.get_world_size(), hsdp=level)
            compare(net, single, plan, batch())


def a_whole_model_gives_the_gradients_of_one_device() -> None:
    for number, make in enumerate(PROGRAMS):
        for level in LEVELS[1 - number % 2 :][:1]:
            torch.manual_seed(0)
            net = Model(make())
            single = copy.deepcopy(net)
            sw.local_map(net, "b _, b _ -> ()", partial="mean")
            plan = sw.plan(net, batch(), devices=dist.get_world_size(), hsdp=level)
            compare(net, single, plan, batch())


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.project = sw.local_map(projected, "b s, s k -> b k", partial="sum")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.project(x, self.weight), target)


def projected(x: Tensor, weight: Tensor) -> Tensor:
    """A matrix product over the columns that are not all zero."""
    used = [n for n in range(len(weight)) if x[:, n].any()]
    return x[:, used] @ weight[used]


def a_function_gives_partial_sums() -> None:
    for strategy in (((1, 2), (2, 1)), ((2, 1), (1, 1)), None):
        torch.manual_seed(0)
        net = Clipped()
        single = copy.deepcopy(net)
        if strategy is not None:
            vars(net)["project"] = sw.shard(net.project, strategy)
        plan = sw.plan(net, batch(), devices=dist.get_world_size())
        compare(net, single, plan, batch())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y.relu().mean()


def changed_buffers_are_equal_on_all_ranks() -> None:
    torch.manual_seed(0)
    net = Normed()
    x, size = batch()[0], dist.get_world_size()
    parts = []
    for part in x.chunk(size):
        parts.append(copy.deepcopy(net))
        parts[-1](part)
    sw.local_map(net, "b _ -> ()", partial="mean")
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=size))
    planned(x).backward()
    wanted = torch.stack([part.norm.running_var for part in parts]).mean(0)
    torch.testing.assert_close(planned.norm.running_var, wanted)
    assert planned.norm.num_batches_tracked.item() == 1


def copies_averages_and_other_lengths_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    outer = nn.ModuleDict({"net": Model(Selected())})
    net, single = outer["net"], copy.deepcopy(outer["net"])
    sw.local_map(net.get_submodule("layer"), "b _h -> b _h")
    plan = sw.plan(net, batch(), devices=dist.get_world_size(), hsdp=LEVELS[1])
    assert sw.parallelize(net, plan) is outer["net"]
    before = copy.deepcopy(net)
    average = get_ema_multi_avg_fn(0.5)
    ours, theirs = (AveragedModel(each, multi_avg_fn=average) for each in (net, single))
    for each, averaged in ((net, ours), (single, theirs)):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            each(*batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(each)  # type: ignore[no-untyped-call]
    assert not torch.equal(before(*batch()), net(*batch()))
    ours.eval()
    for rows in (8, 4, 3, 1):
        part = tuple(tensor[:rows] for tensor in batch())
        with torch.no_grad():
            torch.testing.assert_close(ours(*part), theirs(*part))
            with sw.whole(net) as model:
                torch.testing.assert_close(model(*part), single(*part))


def a_wrong_result_is_refused() -> None:
    ranks = dist.get_world_size()

    def refused(layer: Callable[[Tensor], Tensor], notation: str, message: str) -> None:
        class Wrong(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                assert x.norm().item() > 0
                return layer(x)

        net = Model(Wrong())
        sw.local_map(net.layer, notation)
        planned = sw.parallelize(net, sw.plan(net, batch(), devices=ranks))
        with pytest.raises(sw.CaptureError, match=message):
            planned(*batch())

    refused(lambda x: x[:1], "b _h -> b _h", r"result 0 is \[1, 8\] on this rank")
    refused(lambda x: x.double(), "b _h -> b _h", r"dtypes=\(torch.float64,\)")
    refused(lambda x: x.mul_(2), "b _h -> b _h", "changes input 0 in place")
    refused(lambda x: x + dist.get_rank(), "_b _h -> _b _h", "differs between ranks")


CHECKS = (
    a_layer_gives_the_gradients_of_one_device,
    a_whole_model_gives_the_gradients_of_one_device,
    a_function_gives_partial_sums,
    changed_buffers_are_equal_on_all_ranks,
    copies_averages_and_other_lengths_are_those_of_one_device,
    a_wrong_result_is_refused,
)

if __name__ == "__main__":
    run_checks(CHECKS)
