"""Gradients that `forward` computes are operators, of which gradients can be taken again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.random_plans import check_random_plan, random_plan
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError


class Net(nn.Module):
    """Calls a function of itself and a batch."""

    def __init__(self, compute: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x).square().mean()


def grad(y: Tensor, x: Any, **options: Any) -> Any:
    found: Sequence[Any] = torch.autograd.grad(y.sum(), x, create_graph=True, **options)
    return found if isinstance(x, tuple) else found[0]


def forces(net: Net, x: Tensor) -> Tensor:
    positions = x.detach().requires_grad_(True)
    start, end = torch.arange(8), (torch.arange(8) + 3) % 8
    lengths = (positions[start] - positions[end]).norm(dim=-1, keepdim=True).expand(-1, 4)
    messages = torch.zeros(8, 4, dtype=x.dtype).index_add(0, end, net.linear(lengths).tanh())
    return -grad(net.energy(messages), positions)  # type: ignore[no-any-return]


def residual(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    u = net.norm(net.energy(x)).softmax(-1)
    first = grad(u[:, 0], x)
    second: Tensor = grad(first[:, 1], x)
    return second + first * u


def penalty(net: Net, x: Tensor) -> Tensor:
    mixed = (0.3 * x + 0.7 * net.linear(x).detach()).requires_grad_(True)
    score = net.critic(mixed)
    (gradient,) = torch.autograd.grad(
        score, mixed, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
    )
    return gradient.norm(2, dim=1) - 1


def without_graph(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(net.energy(x).sum(), x)
    return net.linear(x) * gradient


def inner_step(net: Net, x: Tensor) -> Tensor:
    hidden, weight = net.linear(x), net.energy[0].weight
    gradient = grad(functional.linear(hidden, weight).square().mean(), weight)
    return functional.linear(hidden, weight - 0.1 * gradient)


def of_several(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    hidden, unused = net.linear(x), x * 2
    of_x, of_hidden, none = grad(hidden.sin() * x, (x, hidden, unused), allow_unused=True)
    assert none is None
    return of_x * of_hidden  # type: ignore[no-any-return]


def detached(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    with torch.no_grad():
        factor = net.linear(x)
    return grad((net.linear(x) * net.linear(x).detach() * factor).sin(), x)  # type: ignore[no-any-return]


def changed_between(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    hidden = net.linear(x).sin()
    hidden.mul_(2)
    return grad(functional.silu(net.linear(hidden), inplace=True), x)  # type: ignore[no-any-return]


def with_checkpoint(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    return grad(checkpoint(net.energy, x, use_reentrant=False).sin(), x)  # type: ignore[no-any-return, union-attr]


def batched(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    directions = torch.eye(4, dtype=x.dtype)[:, None].expand(4, 8, 4)
    (jacobian,) = torch.autograd.grad(
        net.energy(x), x, directions, is_grads_batched=True, create_graph=True
    )
    return jacobian


def hessian(net: Net, x: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(  # type: ignore[no-any-return, no-untyped-call]
        lambda row: net.energy(row).sum(), x[0], create_graph=True
    )


def noisy(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    noise = torch.randn_like(x) * 0
    return grad((net.energy(x) + noise).sin(), x)  # type: ignore[no-any-return]


COMPUTE = [
    *(forces, residual, penalty, without_graph, inner_step, of_several, detached),
    *(changed_between, with_checkpoint, batched, hessian, noisy),
]


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_random_plan_trains_as_the_module_does(compute: Callable[[Net, Tensor], Tensor]) -> None:
    net, x = Net(compute), torch.randn(8, 4)
    graph = capture(net, (x,))
    check_random_plan(net, (x,), {}, graph, random_plan(graph, 4, len(compute.__name__)))


def test_batches_of_many_sizes_train_as_on_one_device() -> None:
    eager, x = Net(forces), torch.randn(8, 4)
    planned = sw.parallelize(copy.deepcopy(eager), sw.plan(eager, (x,), devices=1))
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (eager, planned)]
    for _ in range(5):
        x = torch.randn(8, 4)
        losses = [net(x) for net in (eager, planned)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0])
    for mine, wanted in zip(planned.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


def dropped(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    return grad(functional.dropout(net.linear(x)), x)  # type: ignore[no-any-return]


def in_autocast(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = net.linear(x)
    return grad(hidden.float().sin(), x)  # type: ignore[no-any-return]


def changed_before(net: Net, x: Tensor) -> Tensor:
    x = x * 2
    hidden = net.linear(x.requires_grad_(True))
    view = hidden.view(4, 8)
    view.relu_()
    return grad(hidden, x)  # type: ignore[no-any-return]


def with_statistics(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    return grad(net.batch_norm(net.linear(x)).sin(), x)  # type: ignore[no-any-return]


REFUSED = {
    dropped: "draws random numbers",
    in_autocast: "in or after an autocast region",
    changed_before: "a tensor that it changes in place",
    with_statistics: "batch norm that updates running statistics",
}


@pytest.mark.parametrize("compute", REFUSED)
def test_what_cannot_be_called_once_more_is_refused(
    compute: Callable[[Net, Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match=REFUSED[compute]):
        capture(Net(compute), (torch.randn(8, 4),))
