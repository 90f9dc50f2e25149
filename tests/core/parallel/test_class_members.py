"""Methods that are replaced between calls take effect; classes of any memory layout are planned."""

from __future__ import annotations

import abc
import types
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.parallel.class_members import ClassMembers

BATCH = torch.linspace(-1, 1, 32).reshape(4, 8)
T = TypeVar("T")


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def activated(self, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def factor() -> float:
        return 1.0

    def unused(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(self.linear(x)) * self.factor() * self.__dict__.get("gain", 1.0)


def fresh() -> nn.Module:
    """A model of a class of its own."""

    class Derived(Activated):
        pass

    torch.manual_seed(0)
    return nn.Sequential(Derived(), nn.Linear(8, 1))


def set_attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda net: setattr(net[0], name, value)


def set_in_class(base: int, name: str, value: Any) -> Callable[[Any], None]:
    return lambda net: setattr(type(net[0]).__mro__[base], name, value)


CHANGES = {
    "a method of an instance": set_attribute("activated", torch.tanh),
    "a bound method": lambda net: setattr(
        net[0], "activated", types.MethodType(lambda self, x: x.cos(), net[0])
    ),
    "a method of the class": set_in_class(0, "activated", lambda self, x: x.tanh()),
    "a static method": set_in_class(0, "factor", staticmethod(lambda: 2.0)),
    "an attribute that `__dict__` has": set_attribute("gain", 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_member_that_is_replaced_between_calls_takes_effect(change: str) -> None:
    eager, net = fresh(), fresh()
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1))
    for _ in range(2):
        torch.testing.assert_close(planned(BATCH), eager(BATCH))
        for each in (eager, planned):
            CHANGES[change](each)
    torch.testing.assert_close(deepcopy(planned)(BATCH), eager(BATCH))


def test_a_method_of_a_base_class_is_replaced_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, net = fresh(), fresh()
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1))
    with monkeypatch.context() as patched:
        patched.setattr(Activated, "activated", lambda self, x: x.tanh())
        torch.testing.assert_close(planned(BATCH), eager(BATCH))
    torch.testing.assert_close(planned(BATCH), eager(BATCH))


def test_other_new_attributes_are_no_change() -> None:
    net = fresh()
    members = ClassMembers(dict(net.named_modules()))
    set_attribute("note", 1)(net)
    assert members.have_changed()
    assert members.update([]) == ([], {}) and not members.have_changed()


@pytest.mark.parametrize("base", [abc.ABC, Generic[T]])
def test_a_base_without_a_dict_may_come_before_modules(base: Any) -> None:
    def fill(namespace: dict[str, Any]) -> None:
        namespace["forward"] = lambda self, x: self.linear(x).tanh().mean()

    net = types.new_class("Net", (base, Activated), exec_body=fill)()
    eager = deepcopy(net)
    planned = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1))
    assert planned is net and isinstance(net, type(eager))
    torch.testing.assert_close(deepcopy(planned)(BATCH), eager(BATCH))
    with sw.whole(planned) as whole:
        assert type(whole) is type(eager)
        torch.testing.assert_close(whole(BATCH), eager(BATCH))
        copied = deepcopy(whole)
    assert planned.programs
    # A copy of the whole model is an ordinary module, which may be planned.
    again = sw.parallelize(copied, sw.plan(copied, (BATCH,), devices=1))
    again(BATCH).backward()


def test_code_without_the_name_of_a_module_is_planned() -> None:
    namespace: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.linear(x).mean()", namespace)
    net = type("Net", (Activated,), {"forward": namespace["forward"]})()
    assert sw.check(net, (BATCH,), None, sw.plan(net, (BATCH,), devices=2)).passes()
