"""State that the first call of `forward` fills."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.filled_state import check_filled, replaced_none


class Inner:
    def __init__(self) -> None:
        self.kind: int | None = None


class Outer:
    def __init__(self) -> None:
        self.inner = Inner()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.length = nn.Linear(4, 4), 2.0, 0
        self.config = Outer()

    @cached_property
    def scale(self) -> float:
        return self.factor * 2

    @cached_property
    def positions(self) -> Tensor:
        return torch.arange(4.0) * self.factor


class Cached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale * self.positions).sum()


class Configured(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.config.inner.kind is None:
            self.config.inner.kind = len(x)
        return self.linear(x).sum() * self.config.inner.kind


def planned(net: nn.Module, rows: int = 8) -> nn.Module:
    plan = sw.plan(net, (torch.ones(rows, 4),), devices=1)
    return sw.parallelize(net, plan, copy=True)


def test_a_cache_that_each_call_would_fill_equally_works_for_all_sizes() -> None:
    eager = Cached()
    net = planned(eager)
    for rows in (8, 4, 8):
        torch.testing.assert_close(net(torch.ones(rows, 4)), eager(torch.ones(rows, 4)))


def halve(net: nn.Module) -> None:
    net.factor = 1.0


@pytest.mark.parametrize(
    ("make", "change", "rows", "named"),
    [(Cached, halve, 8, "'positions' of a Cached"), (Configured, None, 4, r"'config.inner.kind'")],
)
def test_a_later_call_that_would_fill_it_otherwise_is_refused(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], None] | None, rows: int, named: str
) -> None:
    net = planned(make())
    net(torch.ones(8, 4))
    if change is not None:
        change(net)
    with pytest.raises(sw.CaptureError, match=f"fills the attribute {named}.*") as caught:
        net(torch.ones(rows, 4))
    assert "call the model once before `plan`" in str(caught.value)


def test_what_the_first_call_has_filled_before_the_plan_is_an_attribute() -> None:
    eager = Cached()
    eager(torch.ones(8, 4))
    eager.factor = 7.0
    net = planned(eager)
    torch.testing.assert_close(net(torch.ones(4, 4)), eager(torch.ones(4, 4)))


def test_equal_texts_of_several_calls_are_one_value() -> None:
    kept: dict[str, str] = {}
    check_filled({"a": "1"}, kept)
    check_filled({"a": "1", "b": "2"}, kept)
    assert kept == {"a": "1", "b": "2"}
    with pytest.raises(sw.CaptureError, match="fills the b"):
        check_filled({"b": "3"}, kept)


def test_only_attributes_that_were_none_and_are_plain_now_count_as_filled() -> None:
    none, one, values = ("NoneType", None), ("int", 1), ("list", 5)
    before = ("object", 3, ("a", none), ("b", one))
    assert replaced_none(before, ("object", 3, ("a", one), ("b", one))) == ["a"]
    assert replaced_none(before, ("object", 3, ("a", none), ("b", none))) is None
    assert replaced_none(before, ("object", 3, ("a", values), ("b", one))) is None
    assert replaced_none(before, ("object", 4, ("a", one), ("b", one))) is None
