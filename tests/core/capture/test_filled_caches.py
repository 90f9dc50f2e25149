"""What a model keeps of tables that it makes once has values after a capture, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.filled_caches import CachedFunctions


def table(length: int) -> Tensor:
    return torch.arange(length).float().cos()


def in_a_closure() -> Callable[[int], Tensor]:
    kept: dict[int, Tensor] = {}

    def of(length: int) -> Tensor:
        if length not in kept:
            kept[length] = table(length)
        return kept[length]

    return of


def in_a_variable() -> Callable[[int], Tensor]:
    kept: Tensor | None = None

    def of(length: int) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = table(length)
        return kept

    return of


def in_a_list() -> Callable[[int], Tensor]:
    kept: list[Tensor] = []

    def of(length: int) -> Tensor:
        if not kept:
            kept.append(table(length))
        return kept[0]

    return of


def in_a_class() -> Callable[[int], Tensor]:
    class Tables:
        kept: Any = None

    def of(length: int) -> Tensor:
        if Tables.kept is None:
            Tables.kept = table(length)
        return Tables.kept  # type: ignore[no-any-return]

    return of


class Net(nn.Module):
    def __init__(self, of: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(8, 8), of

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.of(x.shape[1])).square().mean()


@pytest.mark.parametrize(
    "make", [in_a_closure, in_a_variable, in_a_list, in_a_class, lambda: lru_cache(table)]
)
def test_a_cache_that_capture_fills_has_values(make: Callable[[], Callable[[int], Tensor]]) -> None:
    net, x = Net(make()), torch.randn(8, 8)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1), copy=True)
    wanted = (net.linear(x) * table(8)).square().mean()
    with sw.whole(planned) as whole:
        for got in (planned(x), net(x), whole(x)):
            torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(planned.eval()(x[:4]), net(x[:4]))


def cached_in_a_tuple() -> Callable[[int], Tensor]:
    @lru_cache(4)
    def tables(length: int) -> tuple[Tensor, dict[str, Tensor]]:
        return table(length), {"sin": torch.arange(length).float().sin()}

    return lambda length: tables(length)[0] * tables(length)[1]["sin"]


def cached_without_bound() -> Callable[[int], Tensor]:
    return lru_cache(None)(table)


@pytest.mark.parametrize("make", [cached_in_a_tuple, cached_without_bound])
def test_cached_functions_are_traced_alike_each_time_and_checked(
    make: Callable[[], Callable[[int], Tensor]],
) -> None:
    net, x = Net(make()), torch.randn(8, 8)
    plan = sw.plan(net, (x,), devices=2)
    assert plan.fingerprint == sw.plan(net, (x,), devices=2).fingerprint
    assert sw.check(net, (x,), None, plan).passes()
    assert net.of(8).dtype == torch.float32
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1), copy=True)
    assert torch.equal(planned(x), net(x)) and torch.equal(planned(x[:4]), net(x[:4]))


def test_a_cached_tensor_that_the_next_call_would_not_draw_again_is_refused_by_name() -> None:
    @lru_cache(4)
    def projection(length: int) -> Tensor:
        return torch.randn(length)

    net, x = Net(projection), torch.randn(8, 8)
    with pytest.raises(sw.CaptureError, match=r"projection` caches, with `functools.lru_cache`"):
        sw.plan(net, (x,), devices=2)
    net(x)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1), copy=True)
    assert torch.equal(planned(x), net(x)) and torch.equal(planned(x), net(x))


def test_a_cache_that_replaces_another_after_a_scan_is_found() -> None:
    removed = lru_cache(table)
    CachedFunctions()
    del removed
    added = lru_cache(table)
    caches = CachedFunctions()
    added(3)
    assert [cache for cache, _ in caches.forget()] == [added]
    assert added.cache_info().currsize == 0
