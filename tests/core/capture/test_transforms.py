"""Transforms of functions in `forward` are operators whose values and gradients are theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.random_plans import check_random_plan, random_plan
from torch import Tensor, func, nn
from torch.nn import functional

from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError

X = torch.randn(8, 4)


class Net(nn.Module):
    """Calls a function of itself and a batch."""

    def __init__(self, compute: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.models = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x).square().mean()


def ensemble(net: Net, x: Tensor) -> Tensor:
    first = net.models[0]
    stacked = {
        name: torch.stack([model.get_parameter(name) for model in net.models])
        for name, _ in first.named_parameters()
    }
    return torch.vmap(lambda p, x: func.functional_call(first, p, (x,)), (0, None))(stacked, x)


def without_gradient(net: Net, x: Tensor) -> Tensor:
    def function(row: Tensor) -> Tensor:
        with torch.no_grad():
            factor = net.linear(row)
        return net.linear(row) * factor

    return torch.vmap(function)(x)


def attention(net: Net, row: Tensor) -> Tensor:
    keys = row[None, :, None]
    return functional.scaled_dot_product_attention(keys * net.linear.weight[0, 0], keys, keys)


def pulled_back(net: Net, x: Tensor) -> Tensor:
    y, pull, doubled = func.vjp(lambda x: (net.models[0](x), x * 2), x, has_aux=True)
    return pull(y.sin())[0] + doubled


COMPUTE: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "rows": lambda net, x: torch.vmap(lambda row: net.norm(net.linear(row)).softmax(-1))(x),
    "pairs": lambda net, x: torch.vmap(
        torch.vmap(lambda one, other: (one - other).square().sum(), (None, 0)), (0, None)
    )(net.linear(x), x),
    "columns": lambda net, x: torch.vmap(
        lambda row, column: net.linear(row * column), in_dims=(0, 1), out_dims=1
    )(x, x.t()),
    "an ensemble": ensemble,
    "attention": lambda net, x: torch.vmap(lambda row: attention(net, row))(x),
    "cosines": lambda net, x: torch.vmap(
        lambda row: functional.cosine_similarity(net.linear(row), row, dim=0)
    )(x),
    "in place": lambda net, x: torch.vmap(lambda row: net.linear(row).add_(1).relu_())(x),
    "detached": lambda net, x: func.grad(
        lambda x: (net.linear(x) * net.linear(x).detach()).tanh().sum()
    )(x),
    "without gradient": without_gradient,
    "gradients of samples": lambda net, x: torch.vmap(
        func.grad(lambda row: net.norm(net.models[0](row)).softmax(-1)[0])
    )(x),
    "gradients and values": lambda net, x: torch.stack(
        [t.sum() for t in func.grad_and_value(lambda x: net.models[0](x).square().sum())(x)]
    ),
    "gradients of parameters": lambda net, x: func.grad(
        lambda p: func.functional_call(net.models[0], p, (x,)).square().sum()
    )(dict(net.models[0].named_parameters()))["0.weight"],
    "a jacobian": lambda net, x: torch.vmap(func.jacrev(net.models[0]))(x),
    "a forward jacobian": lambda net, x: torch.vmap(func.jacfwd(net.models[0]))(x),
    "a hessian": lambda net, x: func.hessian(lambda row: net.models[0](row).sum())(x[0]),
    "pushed forward": lambda net, x: func.jvp(net.models[0], (x,), (x.cos(),))[1],
    "pulled back": pulled_back,
}


@pytest.mark.parametrize("name", COMPUTE)
def test_a_random_plan_trains_as_the_transform_does(name: str) -> None:
    net = Net(COMPUTE[name])
    graph = capture(net, (X,))
    check_random_plan(net, (X,), {}, graph, random_plan(graph, 4, len(name)))


def with_hook(row: Tensor) -> Tensor:
    doubled = row * 2
    doubled.register_hook(lambda gradient: gradient * 2)
    return doubled.sum()


def for_cpu(x: Tensor) -> Tensor:
    values, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)
    return values  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "a hook": (lambda net, x: func.grad(with_hook)(x), r"(?s)hook on a tensor .* custom operator"),
    "a value": (lambda net, x: torch.vmap(lambda row: row * row.sum().item())(x), r"\.item\(\)"),
    "statistics": (
        lambda net, x: func.grad(lambda x: net.batch_norm(x).sum())(x),
        "mutate a captured Tensor",
    ),
    "an operator of CPUs": (
        lambda net, x: torch.vmap(lambda row: for_cpu(row[None, None, None]))(x),
        "flash_attention_for_cpu.*has a CPU kernel only",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_operators_cannot_do_is_refused(what: str) -> None:
    compute, message = REFUSED[what]
    with pytest.raises(CaptureError, match=message):
        capture(Net(compute), (X,))


def test_transforms_are_those_of_pytorch_after_a_capture() -> None:
    capture(Net(COMPUTE["rows"]), (X,))
    y: Any = torch.vmap(func.grad(lambda row: row.square().sum()))(X)
    assert torch.equal(y, 2 * X)
