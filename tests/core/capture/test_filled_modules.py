"""What modules make in their first call, captured before and after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.usefixtures("untried_suggestions")


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
    mask_in_a_buffer: "makes the buffer 'mask'(?s:.*)call the model once",
    parameter_of_the_first_call: "makes the parameter 'scale'(?s:.*)call the model once",
    layer_of_the_first_call: "makes the submodule 'last'(?s:.*)call the model once",
    another_shape: r"changes the shape or dtype of the buffer 'mean' from \[\] .* to \[8, 8\]",
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


def by_name(net: Lazy, x: Tensor) -> Tensor:
    net.mean = net.mean * 0.9 + x.detach().mean() * 0.1
    return x * net.mean


def by_registration(net: Lazy, x: Tensor) -> Tensor:
    net.register_buffer("mean", net.mean * 0.9 + x.detach().mean() * 0.1)
    return x * net.mean


def in_the_dict_of_buffers(net: Lazy, x: Tensor) -> Tensor:
    net._buffers["mean"] = net.mean * 0.9 + x.detach().mean() * 0.1
    return x * net.mean


def without_gradients(net: Lazy, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean = net.mean * 0.9 + x.mean() * 0.1
    return x * net.mean


def through_the_gradient_of_its_old_value(net: Lazy, x: Tensor) -> Tensor:
    y = x * x * net.mean
    net.mean = net.mean + x.detach().mean()
    return y


def twice_and_in_place(net: Lazy, x: Tensor) -> Tensor:
    net.mean = net.mean * 0.9
    net.mean.add_(1)
    net.mean = net.mean + x.detach().mean()
    return x - net.mean


def exchanged(net: Lazy, x: Tensor) -> Tensor:
    net.mean, net.before = net.before, net.mean
    return x * net.mean


def handed_on(net: Lazy, x: Tensor) -> Tensor:
    before = net.mean
    net.mean = before + x.detach().mean()
    net.before = before
    return x * (net.mean - net.before)


ASSIGNED = [
    *(by_name, by_registration, in_the_dict_of_buffers, without_gradients, exchanged, handed_on),
    *(through_the_gradient_of_its_old_value, twice_and_in_place),
]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def assigning(fill: Callable[[Lazy, Tensor], Tensor]) -> Lazy:
    torch.manual_seed(0)
    net = Lazy(fill)
    net.register_buffer("before", torch.zeros(()))
    return net


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("fill", ASSIGNED)
def test_a_buffer_that_is_assigned_is_updated_at_any_depth(
    fill: Callable[[Lazy, Tensor], Tensor], depth: int
) -> None:
    net, eager = assigning(fill), assigning(fill)
    root: nn.Module = net
    for _ in range(depth):
        root = Outer(root)
    x = torch.randn(8, 4)
    plan = sw.plan(root, (x,), devices=1)
    assert plan.graph is not None
    names = {buffer.name for buffer, _ in plan.graph.updates}
    assert "inner." * depth + "mean" in names
    planned = sw.parallelize(root, plan, copy=True)
    for _ in range(3):
        torch.testing.assert_close(planned(x), eager(x))
    buffers = {name.rpartition(".")[2]: b for name, b in planned.named_buffers()}
    torch.testing.assert_close(buffers, dict(eager.named_buffers()))


def test_a_buffer_that_is_assigned_is_updated_on_several_devices() -> None:
    net, x = Outer(assigning(handed_on)), torch.randn(8, 4)
    plan = sw.plan(net, (x,), devices=4, mode="data_parallel")
    assert sw.check(net, (x,), None, plan).passes()


def test_a_buffer_that_the_parent_assigns_is_updated() -> None:
    class Parent(Outer):
        def forward(self, x: Tensor) -> Tensor:
            self.inner.mean = self.inner.mean + 1
            return super().forward(x)

    net, x = Parent(assigning(lambda net, x: x * net.mean)), torch.randn(8, 4)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1), copy=True)
    losses = [planned(x).item() for _ in range(2)]
    torch.testing.assert_close(losses[1], losses[0] * (3 / 2) ** 2)


def test_the_old_value_of_an_assigned_buffer_is_returned() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            before = self.steps
            self.steps = before + x
            return before[:1]

    net = Returning()
    planned = sw.parallelize(net, sw.plan(net, (torch.ones(2),), devices=1), copy=True)
    assert [planned(torch.ones(2)).item() for _ in range(3)] == [0, 1, 2]


def another_buffer(net: Lazy, x: Tensor) -> Tensor:
    net.mean = net.before
    return x * net.mean


def view_of_a_parameter(net: Lazy, x: Tensor) -> Tensor:
    net.mean = net.linear.bias.detach()[0]
    return x * net.mean


def another_parameter(net: Lazy, x: Tensor) -> Tensor:
    net.linear.bias = nn.Parameter(net.linear.bias * 0.9)
    return x


def frozen_parameter(net: Lazy, x: Tensor) -> Tensor:
    net.linear.bias.requires_grad_(False)
    return x


def without_the_buffer(net: Lazy, x: Tensor) -> Tensor:
    del net.mean
    return x


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (another_buffer, "shares memory with 'before' to the buffer 'mean'(?s:.*)`copy_`"),
        (view_of_a_parameter, "shares memory with 'linear.bias' to the buffer 'mean'(?s:.*)`clone"),
        (another_parameter, "replaces the parameter 'linear.bias'(?s:.*)copy_"),
        (frozen_parameter, "`requires_grad` of the parameter 'linear.bias'(?s:.*)before `plan`"),
        (without_the_buffer, "removes the buffer 'mean'"),
    ],
)
def test_what_cannot_be_an_update_is_refused_by_name(
    fill: Callable[[Lazy, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(sw.CaptureError, match=message):
        sw.plan(assigning(fill), (torch.randn(8, 4),), devices=2)


def test_an_assigned_buffer_with_two_names_is_refused_by_both() -> None:
    class Both(Outer):
        def __init__(self) -> None:
            super().__init__(assigning(by_name))
            self.register_buffer("mean", self.inner.mean)

    with pytest.raises(sw.CaptureError, match=r"several names, \['mean', 'inner.mean'\]"):
        sw.plan(Both(), (torch.randn(8, 4),), devices=2)
