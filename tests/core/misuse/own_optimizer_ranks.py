"""Optimizers that DTensors alone cannot run, on two ranks with sharded parameters, and eagerly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim.swa_utils import AveragedModel
from transformers.optimization import Adafactor

import shardwright as sw
from shardwright.core.misuse.unsupported_operators import _refuse_fully_shard
from shardwright.core.runtime.muon_adamw import MuonAdamW, table_shapes

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchrun import run_checks

STEPS = 3
PLANS: Mapping[str, Mapping[str, Any]] = {
    "tensor parallel": {"mem_coeff": 1e4},
    "HSDP": {"mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}},
}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(32, 16), nn.Linear(16, 24)
        self.head = nn.Linear(24, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.up(self.table(ids)).relu())
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def model() -> Words:
    torch.manual_seed(0)
    return Words()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(32, (2, 8, 4), generator=generator)
    return ids, labels


class OwnOptimizer(torch.optim.Optimizer):
    """Calls `update` for each parameter, with its state."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                self.update(parameter, parameter.grad, self.state[parameter], group["lr"])

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class OrdinaryState(OwnOptimizer):
    """Keeps ordinary tensors of the full shapes."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["mean"], state["square"] = torch.zeros(p.shape), torch.zeros(p.shape)
        state["mean"].mul_(0.9).add_(grad, alpha=0.1)
        state["square"].lerp_(grad.square(), 0.1).addcmul_(grad, grad, value=0.01)
        p.addcdiv_(state["mean"], state["square"].sqrt() + 1e-3, value=-lr)
        p.mul_(torch.full(p.shape, 0.999))


class Shampoo(OwnOptimizer):
    """Roots of sums of `g g^T`, as ordinary matrices, by a decomposition."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        for dim, size in enumerate(grad.shape):
            sums = state.setdefault(dim, torch.eye(size))
            rows = grad.transpose(0, dim).reshape(size, -1)
            sums.add_(rows @ rows.t())
            values, vectors = torch.linalg.eigh(sums)
            root = vectors @ values.pow(-0.5 / grad.ndim).diag() @ vectors.t()
            grad = (root @ rows).reshape(grad.transpose(0, dim).shape).transpose(0, dim)
        p.add_(grad, alpha=-lr)


class Sparsified(OwnOptimizer):
    """Sorts, masks, and assigns elements."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        limit = grad.abs().flatten().kthvalue(5).values
        kept = grad.clone()
        kept[grad.abs() < limit] = 0
        kept[kept > 10 * limit] *= 0.5
        p.add_(kept + kept.sort(0).values.cumsum(0), alpha=-lr)


class ListState(OwnOptimizer):
    """Operators on lists, whose momentum is ordinary."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        gradients = [parameter.grad for parameter in parameters]
        state = [self.state[p].setdefault("mean", torch.zeros(p.shape)) for p in parameters]
        torch._foreach_mul_(state, 0.9)
        torch._foreach_add_(state, gradients)
        torch._foreach_add_(parameters, state, alpha=-0.01)


class ScheduleFree(OwnOptimizer):
    """Interpolates towards a copy of the parameters, by operators on lists."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        gradients = [parameter.grad for parameter in parameters]
        copies = [self.state[p].setdefault("copy", p.clone()) for p in parameters]
        squares = [self.state[p].setdefault("square", torch.zeros_like(p)) for p in parameters]
        torch._foreach_mul_(squares, 0.9)
        torch._foreach_addcmul_(squares, gradients, gradients, value=0.1)
        scaled = torch._foreach_div(gradients, torch._foreach_add(squares, 1e-2))
        torch._foreach_lerp_(parameters, copies, weight=0.5)
        torch._foreach_sub_(copies, scaled, alpha=1e-3)


class Distance(OwnOptimizer):
    """Learns its rate from the distance to the first parameters, and keeps gradients in a list."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        first = state.setdefault("first", p.flatten().clone())
        gradients = state.setdefault("gradients", [])
        gradients.append(grad.clone())
        distance = torch.dot(grad.flatten(), first - p.flatten()).abs().item()
        p.sub_(torch.stack(gradients[-3:]).median(0).values, alpha=lr * (1 + distance))


class AssignedData(OwnOptimizer):
    """Assigns `.data` of parameters, gradients and copies of its own, as Lion and SVRG do."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        anchor = state.setdefault("anchor", p.detach().clone().requires_grad_())
        grad.data = grad.data.clamp(-0.01, 0.01)
        p.data = p.data * 0.999 - lr * (grad + 0.1 * (p.data - anchor)).sign()
        anchor.data = anchor.data * 0.5 + p.data * 0.5


class SharpnessAware(OwnOptimizer):
    """Climbs, restores `.data` from copies, and descends, as SAM does."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        state["before"] = p.data.clone()
        p.add_(torch.pow(p, 2) * grad / grad.norm(), alpha=0.05)
        climbed = p.data
        p.data = state["before"]
        p.data.add_(climbed, alpha=-lr)


class Transposing(OwnOptimizer):
    """Transposes gradients in place, as Shampoo of `torch_optimizer` does."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        for dim in range(grad.ndim):
            grad = grad.data.transpose_(0, dim).contiguous()
            grad = (grad / grad[0].norm()).transpose_(0, dim)
        p.data.add_(grad.unsqueeze(0).squeeze_(0), alpha=-lr)


class Overwriting(OwnOptimizer):
    """Copies gradients into memory that had other contents on each rank."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        copied = torch.full(p.shape, float(dist.get_rank())).copy_(grad)
        scaled = torch.full(p.shape, float(dist.get_rank()))
        torch.mul(copied / copied.norm(), grad.detach().abs() + 1, out=scaled)
        p.sub_(scaled, alpha=lr)


class Drawing(OwnOptimizer):
    """Draws like one device, by operators that read what they are given too."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        signs = torch.randint_like(p, 0, 2).mul_(2).sub_(1)
        chance = torch.bernoulli(p.detach().sigmoid()) + torch.poisson(p.detach().abs())
        dropped = nn.functional.dropout(grad, 0.5) + torch.empty_like(p).geometric_(0.3)
        p.sub_(signs * chance + dropped + torch.normal(p.detach(), 0.1), alpha=lr)


class Noisy(OwnOptimizer):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(grad.sign() + torch.randn(p.shape), alpha=lr)


OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adafactor of transformers": lambda net: Adafactor(net.parameters(), beta1=0.9),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=1e-2),
    "Rprop": lambda net: torch.optim.Rprop(net.parameters(), lr=1e-3),
    "Rprop of lists": lambda net: torch.optim.Rprop(net.parameters(), lr=1e-3, foreach=True),
    "fused SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, fused=True),
    "fused Adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1, fused=True),
    "ordinary state": lambda net: OrdinaryState(net.parameters()),
    "Shampoo": lambda net: Shampoo(net.parameters()),
    "sparsified": lambda net: Sparsified(net.parameters()),
    "lists": lambda net: ListState(net.parameters()),
    "schedule-free": lambda net: ScheduleFree(net.parameters()),
    "distance": lambda net: Distance(net.parameters()),
    "assigned data": lambda net: AssignedData(net.parameters()),
    "sharpness-aware": lambda net: SharpnessAware(net.parameters()),
    "transposing": lambda net: Transposing(net.parameters()),
    "overwriting": lambda net: Overwriting(net.parameters()),
    "drawing": lambda net: Drawing(net.parameters()),
    "noisy": lambda net: Noisy(net.parameters()),
    "Muon and AdamW": lambda net: MuonAdamW(net.parameters(), tables=table_shapes(net)),
}
TOLERANCES = {"Muon and AdamW": 1e-4}
"""Muon amplifies the last digits of gradients: it rounds them to bfloat16."""


def planned(**options: Any) -> nn.Module:
    net = model()
    net = sw.parallelize(net, sw.plan(net, batch(), devices=2, **options))
    assert any(not p.is_replicate() for x in net.parameters() for p in x.placements)  # type: ignore[attr-defined]
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        net(*batch()).backward()
        optimizer.step()


def full(net: nn.Module) -> list[Tensor]:
    """The full parameters."""
    parameters = [p.detach() for p in net.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


def assert_trains_alike(net: nn.Module, name: str) -> None:
    eager = model()
    train(eager, OPTIMIZERS[name](eager))
    train(net, OPTIMIZERS[name](net))
    for got, wanted in zip(full(net), full(eager), strict=True):
        difference = (got - wanted).abs().max().item()
        assert difference < TOLERANCES.get(name, 3e-6), (name, difference)


def optimizers_train_as_on_one_device() -> None:
    for options in PLANS.values():
        net = planned(**options)
        start = deepcopy(net.state_dict())
        for name in OPTIMIZERS:
            net.load_state_dict(start)
            assert_trains_alike(net, name)


def averages_take_the_place_of_parameters_and_give_it_back() -> None:
    results = []
    for net in (planned(**PLANS["tensor parallel"]), model()):
        shadows = {name: p.data * 0.5 for name, p in net.named_parameters()}
        before = {name: p.data for name, p in net.named_parameters()}
        losses = [net(*batch())]
        for values in (shadows, before):
            for name, p in net.named_parameters():
                p.data = values[name]
            losses.append(net(*batch()))
        next(iter(shadows.values())).zero_()
        losses.append(net(*batch()))
        assert losses[0] == losses[2] == losses[3] != losses[1]
        results.append(torch.stack(losses).detach())
    torch.testing.assert_close(*results)


def data_that_cannot_share_memory_is_refused() -> None:
    net = planned(**PLANS["HSDP"])
    first: Any = next(net.parameters())
    for value, found in [
        (torch.zeros(first.shape), "an ordinary tensor"),
        (first.detach().redistribute(placements=[Replicate()]), r"a DTensor with placements"),
        (first.detach().bfloat16(), r"shape \(32, 16\) and torch.bfloat16"),
    ]:
        with pytest.raises(sw.PlanError, match=rf"`.data` .*{found}.*\n.*`p.copy_\(value\)`"):
            first.data = value
    with pytest.raises(sw.PlanError, match=r"set_.* is not supported"):
        first.data.set_(first.detach().clone())
    loss, head = net(*batch()), cast(Any, net.head)
    head.weight.data = head.weight.data * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def change_in_place(mean: nn.Parameter, parameter: nn.Parameter) -> None:
    mean.mul_(0.5).add_(parameter, alpha=0.5)


def assign_data(mean: nn.Parameter, parameter: nn.Parameter) -> None:
    mean.data = mean.data * 0.5 + parameter.data * 0.5


def an_average_of_the_users_own_follows() -> None:
    for change in (change_in_place, assign_data):
        averages = []
        for trained in (planned(**PLANS["HSDP"]), model()):
            average = deepcopy(model())
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            for _ in range(STEPS):
                train(trained, optimizer, steps=1)
                with torch.no_grad():
                    for pair in zip(average.parameters(), trained.parameters(), strict=True):
                        change(*pair)
            averages.append(full(average))
        for got, wanted in zip(*averages, strict=True):
            torch.testing.assert_close(got, wanted)


class Normalized(nn.Sequential):
    """A model with buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean(0)[0]  # type: ignore[no-any-return]


def an_averaged_model_averages_buffers() -> None:
    x = torch.arange(64.0).view(8, 8).sin()
    averages = []
    for devices in (1, 2):
        torch.manual_seed(0)
        net: nn.Module = Normalized()
        if devices > 1:
            net = sw.parallelize(net, sw.plan(net, (x,), devices=devices, **PLANS["HSDP"]))
        average = AveragedModel(net, use_buffers=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(STEPS):
            net(x).backward()
            optimizer.step()
            average.update_parameters(net)
        with sw.whole(average.module) as module:
            averages.append({name: t.detach().clone() for name, t in module.state_dict().items()})
    torch.testing.assert_close(*averages)


def draws_that_differ_between_ranks_are_refused() -> None:
    net = planned(**PLANS["HSDP"])
    optimizer = Noisy(net.parameters())
    net(*batch()).backward()
    torch.manual_seed(dist.get_rank())
    with pytest.raises(sw.PlanError, match=r"in `Noisy.step`: .* differs between ranks"):
        optimizer.step()


def fully_shard_of_a_planned_model_is_refused() -> None:
    for options in PLANS.values():
        with pytest.raises(sw.PlanError, match=r"`fully_shard` .*sharded already\n.*level3"):
            fully_shard(planned(**options))


def fully_shard_of_another_model_on_an_equal_mesh_is_not_refused() -> None:
    mesh = next(planned(**PLANS["tensor parallel"]).parameters()).device_mesh
    other = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Replicate()] * mesh.ndim))
    # The check itself, since PyTorch asks for meshes that share a root.
    _refuse_fully_shard(other)


class Reducing(OwnOptimizer):
    """Reduces gradients itself, as optimizers for `torchrun` scripts without a wrapper do."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        part = torch.empty(p.numel() // dist.get_world_size())
        dist.reduce_scatter_tensor(part, grad.flatten())


def an_optimizer_that_communicates_is_named() -> None:
    net = planned(**PLANS["HSDP"])
    net(*batch()).backward()
    with pytest.raises(sw.PlanError, match=r"in `Reducing.step` .*\n.*variant for one device"):
        Reducing(net.parameters()).step()


def numbers_of_parameters_are_formatted_and_shards_not_saved() -> None:
    words: Any = Words()
    plan = sw.plan(words, batch(), devices=2, mode="data_parallel")
    for net in (sw.parallelize(words, plan), planned(**PLANS["HSDP"])):
        weight: Any = net.up.weight
        assert f"{weight.norm():.3f}" == f"{weight.full_tensor().norm():.3f}"
        with pytest.raises(sw.PlanError, match=r"`safetensors`.*\n.*sw.save_state_dict"):
            save({"weight": weight})


CHECKS = [
    numbers_of_parameters_are_formatted_and_shards_not_saved,
    optimizers_train_as_on_one_device,
    averages_take_the_place_of_parameters_and_give_it_back,
    data_that_cannot_share_memory_is_refused,
    an_average_of_the_users_own_follows,
    an_averaged_model_averages_buffers,
    draws_that_differ_between_ranks_are_refused,
    an_optimizer_that_communicates_is_named,
    fully_shard_of_a_planned_model_is_refused,
    fully_shard_of_another_model_on_an_equal_mesh_is_not_refused,
]

if __name__ == "__main__":
    run_checks(CHECKS)
