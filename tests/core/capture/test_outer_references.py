"""References to modules of a model from outside: closures, and registries keyed by modules."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.outer_references import OuterReferences
from shardwright.core.capture.reachable_state import ReachableState
from shardwright.errors import CaptureError

Forward = Callable[[Any, Tensor], Tensor]
SCALES: dict[Any, float] = {}
SCALES_OF_IDS: dict[int, float] = {}
WEAK_SCALES: MutableMapping[nn.Module, float] = weakref.WeakKeyDictionary()
DOUBLED, SHIFTED = set[nn.Module](), list[nn.Module]()
CALLS: dict[nn.Module, int] = {}
REGISTRIES: tuple[Any, ...] = (SCALES, SCALES_OF_IDS, WEAK_SCALES, DOUBLED, SHIFTED, CALLS)


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a: nn.Module = nn.Linear(4, 4)
        self.b: nn.Module = nn.Linear(4, 4)
        a, b = self.a, self.b
        self.both = lambda x: b(a(x))
        self.reference = weakref.ref(a)
        self.called = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self, x).square().mean()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[self] = CALLS.get(self, 0) + 1
        result: Tensor = self.linear(x) * CALLS[self]
        return result


@pytest.fixture(autouse=True)
def registries() -> None:
    for registry in REGISTRIES:
        registry.clear()


def registered(forward: Forward) -> Net:
    net = Net(forward)
    SCALES[net.a], SCALES[net.a, "second"], SCALES_OF_IDS[id(net.a)] = 2.0, 3.0, 4.0
    WEAK_SCALES[net.a] = 5.0
    DOUBLED.add(net.a)
    SHIFTED.append(net.a)
    return net


def of_registries(net: Net, x: Tensor) -> Tensor:
    scale = SCALES.get(net.a, 1.0) * SCALES.get((net.a, "second"), 1.0)
    scale *= SCALES_OF_IDS.get(id(net.a), 1.0) * WEAK_SCALES.get(net.a, 1.0)
    scale += (net.a in DOUBLED) + 10 * (net.a in SHIFTED)
    return net.b(net.a(x)) * scale


def trains_as_eager(eager: nn.Module, planned: nn.Module, sizes: tuple[int, ...]) -> None:
    sw.parallelize(planned, sw.plan(planned, (torch.randn(sizes[0], 4),), devices=1))
    for size in sizes:
        x = torch.randn(size, 4)
        losses = planned(x), eager(x)
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    for own, other in zip(planned.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


FORWARDS: dict[str, Forward] = {
    "registries": of_registries,
    "a lambda over submodules": lambda net, x: net.both(x),
    "a weak reference": lambda net, x: net.b(net.reference()(x)),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_references_lead_to_the_traced_copy(name: str) -> None:
    eager, planned = registered(FORWARDS[name]), registered(FORWARDS[name])
    before = copy.copy(SCALES), dict(WEAK_SCALES), list(SHIFTED), DOUBLED | set()
    trains_as_eager(eager, planned, (8, 4))
    assert (SCALES, dict(WEAK_SCALES), SHIFTED, DOUBLED) == before


def test_a_model_whose_forward_is_a_closure_over_it_trains_as_eager() -> None:
    def closed_over(net: Net) -> Net:
        net.forward = lambda x: net.b(net.a(x)).square().mean()  # type: ignore[method-assign]
        return net

    made = partial(Net, lambda net, x: x)
    trains_as_eager(closed_over(made()), closed_over(made()), (8, 4))


def test_registries_that_layers_change_are_changed_in_each_call() -> None:
    eager = Net(lambda net, x: net.b(net.a(x)))
    eager.a, eager.b = Counting(), Counting()
    trains_as_eager(eager, copy.deepcopy(eager), (8, 8, 8))
    assert sorted(CALLS.values()) == [3, 3, 3, 3]


def test_check_runs_closures_on_the_copy_in_float64() -> None:
    net = Net(FORWARDS["a lambda over submodules"])
    x = torch.randn(8, 4)
    assert sw.check(net, (x,), None, sw.plan(net, (x,), devices=2)).gradient_difference < 1e-9


@pytest.mark.parametrize("key", [lambda net: net, id])
def test_registries_with_the_model_or_an_id_as_key_may_not_change(key: Any) -> None:
    def counted(net: Net, x: Tensor) -> Tensor:
        CALLS[key(net)] = CALLS.get(key(net), 0) + 1
        return net.a(x) * CALLS[key(net)]

    with pytest.raises(CaptureError, match="CALLS"):
        sw.plan(Net(counted), (torch.randn(8, 4),), devices=1)


def test_references_are_restored_after_an_error() -> None:
    net = registered(of_registries)
    twin = copy.deepcopy(net)
    references = OuterReferences(net, twin, ReachableState(twin), follow_ids=True)
    with pytest.raises(ZeroDivisionError), references.leading_to_copy() as any_found:
        assert any_found and twin.a in DOUBLED and id(twin.a) in SCALES_OF_IDS
        raise ZeroDivisionError
    assert [*DOUBLED, *SHIFTED, *WEAK_SCALES] == [net.a] * 3 and [*SCALES_OF_IDS] == [id(net.a)]
