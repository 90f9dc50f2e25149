"""What modules make in their first call, captured before and after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw


class Lazy(nn.Module):
    """A linear layer and what `fill` adds to it."""

    def __init__(self, fill: Callable[[Lazy, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.fill = nn.Linear(4, 4), fill
        self.register_buffer("mean", torch.ones(()))
        self.tables: dict[int, Tensor] = {}
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.fill(self, self.linear(x)).square().mean()


def mask_in_a_buffer(net: Lazy, x: Tensor) -> Tensor:
    if not hasattr(net, "mask"):
        net.register_buffer("mask", torch.ones(len(x), len(x)).tril(), persistent=False)
    return net.get_buffer("mask") @ x


def parameter_of_the_first_call(net: Lazy, x: Tensor) -> Tensor:
    if not hasattr(net, "scale"):
        net.scale = nn.Parameter(torch.full((4,), 0.5))
    return x * net.get_parameter("scale")


def layer_of_the_first_call(net: Lazy, x: Tensor) -> Tensor:
    if not hasattr(net, "last"):
        net.last = nn.Linear(4, 2)
    result: Tensor = net.get_submodule("last")(x)
    return result


def another_shape(net: Lazy, x: Tensor) -> Tensor:
    if net.mean.ndim == 0:
        net.mean = torch.ones(len(x), len(x)).triu()
    return net.mean @ x


def in_a_dict(net: Lazy, x: Tensor) -> Tensor:
    if len(x) not in net.tables:
        net.tables[len(x)] = torch.ones(len(x), len(x)).tril()
    return net.tables[len(x)] @ x


FILLED = {
    mask_in_a_buffer: "makes the buffer 'mask'.*call the model once",
    parameter_of_the_first_call: "makes the parameter 'scale'.*call the model once",
    layer_of_the_first_call: "makes the submodule 'last'.*call the model once",
    another_shape: r"gives the buffer 'mean' another shape or dtype, \[8, 8\].* instead of \[\]",
    in_a_dict: "changes the attribute 'tables'.*if the model was called before `plan`",
}


@pytest.mark.parametrize("fill", FILLED, ids=lambda fill: str(fill.__name__))
def test_what_the_first_call_makes_is_refused_before_it_and_exact_after(
    fill: Callable[[Lazy, Tensor], Tensor],
) -> None:
    net, x = Lazy(fill), torch.randn(8, 4)
    with pytest.raises(sw.CaptureError, match=FILLED[fill]):
        sw.plan(net, (x,), devices=2)
    net(x)
    plan = sw.plan(net, (x,), devices=4, mode="data_parallel")
    assert sw.check(net, (x,), None, plan).passes()


def moved_by_name(net: Lazy, x: Tensor) -> Tensor:
    net.mean = net.mean * 0.9 + x.detach().mean() * 0.1
    return x * net.mean


def moved_by_registration(net: Lazy, x: Tensor) -> Tensor:
    net.register_buffer("mean", net.mean * 0.9 + x.detach().mean() * 0.1)
    return x * net.mean


@pytest.mark.parametrize("fill", [moved_by_name, moved_by_registration])
def test_a_buffer_that_is_assigned_is_updated(fill: Callable[[Lazy, Tensor], Tensor]) -> None:
    net, x = Lazy(fill), torch.randn(8, 4)
    plan = sw.plan(net, (x,), devices=4, mode="data_parallel")
    assert plan.graph is not None and [b.name for b, _ in plan.graph.updates] == ["mean"]
    assert sw.check(net, (x,), None, plan).passes()


def test_a_buffer_that_is_replaced_unseen_is_refused() -> None:
    def replace(net: Lazy, x: Tensor) -> Tensor:
        net._buffers["mean"] = net.mean * 0.9
        return x * net.mean

    with pytest.raises(sw.CaptureError, match=r"in the place of the buffer 'mean'.*`copy_`"):
        sw.plan(Lazy(replace), (torch.randn(8, 4),), devices=2)
