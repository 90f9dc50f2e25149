"""What a `local_map` may be, and what it may contain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from random_plans import check_random_plan, random_plan

ARGS = (torch.randn(8, 4, generator=torch.Generator().manual_seed(1)),)


class Around(nn.Module):
    """A layer with what `call` does with it, between two that are captured."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.last = nn.Linear(4, 8), layer, nn.Linear(8, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.layer, self.first(x))).square().mean()


class Part(nn.Module):
    """Two layers, that compute what `compute` says."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two, self.compute = nn.Linear(8, 8), nn.Linear(8, 8), compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


def needs_values(x: Tensor) -> None:
    if x.sum() > 1e9:
        raise ValueError("too large")


def check_plans(net: nn.Module, args: tuple[Any, ...] = ARGS) -> None:
    """Two random plans, and one with sharded parameters, equal one device."""
    graph = sw.capture(net, args)
    for seed in range(2):
        check_random_plan(net, args, {}, graph, random_plan(graph, 4, seed))
    level = sw.OptimizerParallel("level3", threshold=0)
    assert sw.check(net, args, None, sw.plan(net, args, devices=4, hsdp=level)).passes()


def keywords(part: Any, x: Tensor, scale: float, *, mask: Tensor, pair: tuple[int, Tensor]) -> Any:
    needs_values(x)
    return part.one(x * mask[:, None]) * scale * pair[0] + pair[1][:, None]


def chosen_experts(part: Any, x: Tensor) -> Tensor:
    """One expert gets all rows on every rank, and the other none."""
    rows = (x.abs().sum(1) > 0).nonzero()[:, 0]
    return x.index_add(0, rows, part.one(x[rows]) if len(rows) else part.two(x))


def half_trained(part: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        constant = part.two(x)
    return part.one(x) + constant, constant, x.detach().sum(-1)


def half_trained_by_values(part: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    needs_values(x)
    return half_trained(part, x)


def reentrant(part: Any, x: Tensor) -> Tensor:
    needs_values(x)
    y: Tensor = checkpoint(part.one, x, use_reentrant=True)
    return part.two(y.tanh())


def keyword_call(layer: nn.Module, y: Tensor) -> Tensor:
    mask = (y[:, 0] > 0).to(y.dtype)
    result: Tensor = layer(y, 2.0, mask=mask, pair=(3, y[:, 1]))
    return result


def joined(layer: nn.Module, y: Tensor) -> Tensor:
    first, second, rows = layer(y)
    result: Tensor = first * second + rows[:, None]
    return result


def plain(layer: nn.Module, y: Tensor) -> Tensor:
    result: Tensor = layer(y)
    return result


CASES: dict[str, tuple[Any, Any, str]] = {
    "keywords and other arguments": (keywords, keyword_call, "b _h, b, b -> b _h"),
    "parameters that are not used": (chosen_experts, plain, "b _h -> b _h"),
    "no gradient": (half_trained, joined, "b _h -> b _h, b _h, b"),
    "no gradient, by values": (half_trained_by_values, joined, "b _h -> b _h, b _h, b"),
    "reentrant checkpoint": (reentrant, plain, "b _h -> b _h"),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_give_the_gradients_of_one_device(name: str) -> None:
    compute, call, notation = CASES[name]
    net = Around(Part(compute), call)
    sw.local_map(net.layer, notation)
    check_plans(net)


def test_parameters_without_gradient_have_none() -> None:
    """As in eager code, so that an optimizer does not decay them."""
    net = Around(Part(half_trained), joined)
    sw.local_map(net.layer, "b _h -> b _h, b _h, b")
    sw.parallelize(net, sw.plan(net, ARGS, devices=1))
    net(*ARGS).backward()
    part: Any = net.layer
    assert part.two.weight.grad is None
    assert part.one.weight.grad is not None


def test_a_parameter_is_shared_between_two() -> None:
    class Product(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            needs_values(x)
            return x @ self.weight

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.one = sw.local_map(Product(self.weight), "b _h -> b _h")
            self.two = sw.local_map(Product(self.weight), "b _h -> b _h")

        def forward(self, x: Tensor) -> Tensor:
            return (self.two(self.one(x).tanh()) @ self.weight).square().mean()

    check_plans(Shared())


def test_partial_functions() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            function = functools.partial(scaled_product, factor=3)
            self.product = sw.local_map(function, "b _h, _h _j -> b _j")

        def forward(self, x: Tensor) -> Tensor:
            return self.product(x, self.weight).square().mean()

    net = Scaled()
    (call,) = (op.target for op in sw.capture(net, ARGS).ops if "local_map" in op.name)
    # Equal on all ranks: no address is in it.
    assert "scaled_product(factor=3)" in repr(call)
    check_plans(net)


def scaled_product(x: Tensor, weight: Tensor, factor: int) -> Tensor:
    return x @ weight * factor


@pytest.mark.parametrize("container", [tuple, list, dict])
def test_an_unknown_container_is_refused(container: Any) -> None:
    """Its first element would be the first row of the tensor."""

    def contained(part: Any, x: Tensor) -> Any:
        needs_values(x)
        return {0: part.one(x)} if container is dict else container([part.one(x)])

    net = Around(Part(contained), lambda layer, y: y + layer(y)[0])
    sw.local_map(net.layer, "b _h -> b _h")
    plan = sw.plan(net, ARGS, devices=2)
    message = f"returns a {container.__name__}.*assumed a tensor, as .*\nreturn a tensor"
    with pytest.raises(sw.CaptureError, match=message):
        sw.check(net, ARGS, None, plan)


@pytest.mark.parametrize(
    ("notation", "partial", "message"),
    [
        ("b _, b _ -> ()", None, r"result 0 has no dimension 'b'.*\n.*partial=\"mean\""),
        ("b _ -> b _, ()", None, r"result 1 has no dimension 'b'.*\n.*partial=\(None, \"mean\"\)"),
        (
            "b _ -> (), ()",
            ("sum", None),
            r"result 1 has no dimension 'b'.*\n.*partial=\('sum', \"mean\"\)",
        ),
    ],
)
def test_names_that_are_never_sharded_are_refused(
    notation: str, partial: Any, message: str
) -> None:
    with pytest.raises(sw.StrategyError, match=message):
        sw.local_map(nn.MSELoss(), notation, partial=partial)


WEIGHT = nn.Parameter(torch.ones(4, 4))
SOFTMAX = nn.Softmax(-1)


def test_functions_that_read_what_is_trained_are_refused() -> None:
    modules, weight = [nn.Linear(4, 4)], nn.Parameter(torch.ones(4, 4))
    functions: tuple[Callable[..., Any], ...] = (
        lambda x: x @ WEIGHT,
        lambda x: [row @ WEIGHT for row in x],
        lambda x: modules[0](x),
        modules[0].forward,
        functools.partial(scaled_product, weight=weight),
    )
    for function in functions:
        with pytest.raises(sw.StrategyError, match="is not among its arguments"):
            sw.local_map(function, "b _h -> b _h")
    sw.local_map(lambda x: SOFTMAX(x), "b _h -> b _h")


def test_declared_buffers_may_change() -> None:
    """Those of a part that needs values cannot be seen."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            needs_values(x)
            y: Tensor = self.linear(x)
            return y

    net = Around(Normed(), plain)
    sw.local_map(net.layer, "b _h -> b _h")
    message = r"changes its buffer '(.*)' in place.*\n.*`buffers=\('\1',\)`"
    with pytest.raises(sw.CaptureError, match=message):
        sw.check(net, ARGS, None, sw.plan(net, ARGS, devices=2))
    names = [name for name, _ in net.layer.named_buffers()]
    sw.local_map(net.layer, "b _h -> b _h", buffers=names)
    check_plans(net)
    alone = sw.local_map(Normed(), "b _h -> b _h")
    with pytest.raises(sw.CaptureError, match="local_map of the model changes its buffer"):
        args = (torch.randn(8, 8),)
        sw.check(alone, args, None, sw.plan(alone, args, devices=2))
    with pytest.raises(sw.StrategyError, match="the Normed has no buffer 'u'\npass names of its"):
        sw.local_map(net.layer, "b _h -> b _h", buffers=("u",))


class ScaledByConstant(torch.autograd.Function):
    """A product whose backward pass has no gradient of the second factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


def test_an_input_without_gradient_from_an_autograd_function_has_none() -> None:
    def scaled(part: Any, x: Tensor) -> Tensor:
        needs_values(x)
        result: Tensor = ScaledByConstant.apply(part.one(x), part.two.bias)  # type: ignore[no-untyped-call]
        return result

    net = Around(Part(scaled), plain)
    sw.local_map(net.layer, "b _h -> b _h")
    assert sw.check(net, ARGS, None, sw.plan(net, ARGS, devices=4, mode="data_parallel")).passes()


def test_a_changed_input_is_refused() -> None:
    def changed(part: Any, x: Tensor) -> Tensor:
        needs_values(x)
        x.mul_(2)
        result: Tensor = part.one(x)
        return result

    net = Around(Part(changed), plain)
    sw.local_map(net.layer, "b _h -> b _h")
    plan = sw.plan(net, ARGS, devices=2, mode="data_parallel")
    with pytest.raises(sw.CaptureError, match=r"changes input 0 in place.*\nchange a copy"):
        sw.check(net, ARGS, None, plan)
