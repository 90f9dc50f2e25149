"""Numbers that change from call to call become inputs of programs, or are named once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from core.parallel.python_calls_ranks import Weighted

STEPS = 12


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = self.linear(x).tanh()
        return x.mean()


class Signed(nn.Module):
    """Reads the sign of a number, and makes tensors of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        scale = torch.tensor([alpha, 2.0])
        return self.linear(x).sum() * math.copysign(1.0, alpha) * scale.sum(), scale


def planned(net: nn.Module, *args: Any) -> Any:
    return sw.parallelize(net, sw.plan(net, (torch.ones(4, 8), *args), devices=1))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def captures(caplog: pytest.LogCaptureFixture) -> int:
    return sum("captured the model for" in record.getMessage() for record in caplog.records)


def set_argument(net: nn.Module, value: float) -> tuple[float, ...]:
    return (value,)


def set_attribute(net: nn.Module, value: float) -> tuple[float, ...]:
    vars(net)["beta"] = value
    return (0.5,)


def set_attribute_of_submodule(net: nn.Module, value: float) -> tuple[float, ...]:
    vars(net.get_submodule("inner"))["scale"] = value
    return (0.5,)


@pytest.mark.parametrize("change", [set_argument, set_attribute, set_attribute_of_submodule])
@pytest.mark.parametrize("trains", [False, True])
def test_a_number_with_another_value_in_each_call_becomes_an_input(
    change: Callable[[nn.Module, float], tuple[float, ...]],
    trains: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, eager, x = Weighted(), Weighted(), torch.randn(4, 8)
    eager.load_state_dict(net.state_dict())
    net = planned(net, 0.5)
    call = net.train_step if trains else net
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for step in range(STEPS):
            args = change(net, step / 7)
            assert args == change(eager, step / 7)
            loss = eager(x, *args)
            torch.testing.assert_close(call(x, *args), loss)
            net.zero_grad()
            eager.zero_grad()
    assert captures(caplog) <= 5 and not warnings(caplog)


def test_other_shapes_and_modes_read_the_number_too() -> None:
    net, eager = Weighted(), Weighted()
    eager.load_state_dict(net.state_dict())
    net = planned(net, 0.5)
    for step in range(STEPS):
        x, training = torch.randn(4 + step % 2, 8), step % 3 > 0
        eager.beta = net.beta = step / 5
        got, wanted = net.train(training)(x, step / 7), eager.train(training)(x, step / 7)
        torch.testing.assert_close(got, wanted)


def test_a_tensor_in_place_of_a_number_that_varies_is_a_call_of_its_own() -> None:
    net, eager, x = Weighted(), Weighted(), torch.randn(4, 8)
    eager.load_state_dict(net.state_dict())
    net = planned(net, 0.5)
    for step in range(5):
        net(x, step / 7)
    for alpha in (torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64), torch.tensor(3)):
        torch.testing.assert_close(net(x, alpha), eager(x, alpha))
    alphas = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]
    for model, alpha in zip((net, eager), alphas, strict=True):
        model(x, alpha).backward()
    torch.testing.assert_close(alphas[0].grad, alphas[1].grad)


def test_a_number_that_cannot_be_an_input_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    net, eager, x = Looping(), Looping(), torch.ones(4, 8)
    eager.load_state_dict(net.state_dict())
    net = planned(net, 1)
    for count in range(2, 2 + STEPS):
        torch.testing.assert_close(net(x, count), eager(x, count))
    (message,) = warnings(caplog)
    assert "captured 8 times, once for each value of `count`, " in message
    assert "use few values" in message


class Mixed(nn.Module):
    """Reads numbers that can be inputs next to counts of loops, branches and a remainder."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.options = nn.Linear(8, 8), 1, {"count": 1, "scale": 1.0}

    def forward(self, x: Tensor, alpha: float, numbers: dict[str, int], seed: int = 1) -> Tensor:
        for _ in range(self.count + numbers["count"] + int(self.options["count"])):
            x = self.linear(x).tanh()
        x = x * 2 if alpha < 0.5 else x
        return x.mean() * alpha * self.options["scale"] * (seed % 7)


def set_count(net: Mixed, step: int) -> tuple[Any, ...]:
    net.count = 2 + step % 3
    return step / 7, {"count": 1}


def set_count_in_argument(net: Mixed, step: int) -> tuple[Any, ...]:
    return step / 7, {"count": 2 + step % 3}


def set_count_in_attribute(net: Mixed, step: int) -> tuple[Any, ...]:
    net.options |= {"count": 2 + step % 3, "scale": step / 5}
    return 1.0, {"count": 1}


def set_branch(net: Mixed, step: int) -> tuple[Any, ...]:
    return step / STEPS, {"count": 1}


def set_large_integer(net: Mixed, step: int) -> tuple[Any, ...]:
    return 1.0, {"count": 1}, 2 + step if step < STEPS else 2**70 + step


@pytest.mark.parametrize(
    "change",
    [set_count, set_count_in_argument, set_count_in_attribute, set_branch, set_large_integer],
)
def test_other_numbers_and_guards_leave_a_number_an_input(
    change: Callable[[Mixed, int], tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    net, eager, x = Mixed(), Mixed(), torch.randn(4, 8)
    eager.load_state_dict(net.state_dict())
    net = planned(net, 0.5, {"count": 1})
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for step in range(2 * STEPS):
            args = change(net, step)
            assert args == change(eager, step)
            torch.testing.assert_close(net(x, *args), eager(x, *args))
    assert captures(caplog) <= 10


@dataclass(frozen=True)
class Options:
    scale: float = 1.0


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(8, 8), [1.0, 2.0]
        self.options, self.frozen = {"mode": "a", "scale": 1.0}, Options()
        self.space = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scales[1] * self.options["scale"] * self.frozen.scale
        x = self.linear(x) if self.options["mode"] == "a" else x + self.linear.in_features
        return x.mean() * scale * self.space.scale * self.space.inner.scale


def set_item_of_list(net: Configured, step: int) -> None:
    net.scales[1] = step / 7


def set_item_of_dict(net: Configured, step: int) -> None:
    net.options |= {"scale": step / 7, "mode": "ab"[step // 5 % 2]}


def replace_dict(net: Configured, step: int) -> None:
    net.options = {"scale": step / 7, "mode": "a"}


def replace_dataclass(net: Configured, step: int) -> None:
    net.frozen = replace(net.frozen, scale=step / 7)


def set_fields(net: Configured, step: int) -> None:
    net.space.scale, net.space.inner.scale = step / 7, step / 5


@pytest.mark.parametrize(
    "change", [set_item_of_list, set_item_of_dict, replace_dict, replace_dataclass, set_fields]
)
def test_a_number_in_a_container_or_object_becomes_an_input(
    change: Callable[[Configured, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    net, eager, x = Configured(), Configured(), torch.randn(4, 8)
    eager.load_state_dict(net.state_dict())
    net = sw.parallelize(net, sw.plan(net, (x,), devices=1))
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for step in range(STEPS):
            change(net, step)
            change(eager, step)
            torch.testing.assert_close(net(x), eager(x))
    assert captures(caplog) <= 6 and not warnings(caplog)


class Namesake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.alpha = nn.Linear(8, 8), 2.0

    def forward(self, x: Tensor, alpha: float) -> Tensor:
        return self.linear(x).mean() * alpha * self.alpha


def test_an_attribute_with_the_name_of_an_argument_does_not_hide_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, x = planned(Namesake(), 0.5), torch.ones(4, 8)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for step in range(STEPS):
            torch.testing.assert_close(net(x, step / 7), net.linear(x).mean() * (step / 7) * 2.0)
    assert captures(caplog) <= 5


def test_a_number_that_begins_to_change_later_becomes_an_input_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, x = planned(Namesake(), 0.5), torch.ones(4, 8)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for step in range(2 * STEPS):
            net.alpha = max(STEPS, step) / 5
            wanted = net.linear(x).mean() * (step / 7) * net.alpha
            torch.testing.assert_close(net(x, step / 7), wanted)
    assert captures(caplog) <= 10 and not warnings(caplog)


@pytest.mark.parametrize(
    "values", [(1.0, 0.0, -0.0, 0.0), (0.5, 1.5, 2.5, 0.0, -0.0, 1.0, -0.0, 0.0)]
)
def test_zeros_of_both_signs_and_tensors_of_a_number_equal_those_of_pytorch(
    values: tuple[float, ...],
) -> None:
    net, eager, x = Signed(), Signed(), torch.ones(4, 8)
    eager.load_state_dict(net.state_dict())
    net = planned(net, values[0])
    for value in values:
        torch.testing.assert_close(net(x, value), eager(x, value))


def test_the_tensors_of_the_remedy_need_no_capture(caplog: pytest.LogCaptureFixture) -> None:
    net, x = planned(Weighted(), torch.tensor(1.0)), torch.ones(4, 8)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for step in range(STEPS):
            alpha: Any = torch.tensor(step / 7)
            net.gamma.fill_(step)
            wanted: Tensor = net.inner(x).mean() * alpha * step
            torch.testing.assert_close(net(x, alpha), wanted)
    assert not captures(caplog)
