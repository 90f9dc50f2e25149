"""The user's own model: its class, its methods, and for a while whole parameters."""

from __future__ import annotations

import gc
import inspect
import weakref
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from core.parallel.whole_models import Language, batch, language
from core.parallel.whole_ranks import CHECKS
from torchrun import checks_on_ranks

test_on_four_ranks = checks_on_ranks(CHECKS, 4)


def test_the_class_is_derived_from_the_users_and_named_like_it() -> None:
    net = language()
    parallel = sw.parallelize(net, sw.plan(net, batch(), devices=1), copy=True)
    assert isinstance(parallel, Language)
    assert type(parallel).__name__ == "Language"
    assert inspect.signature(parallel.forward) == inspect.signature(net.forward)
    assert type(net) is Language


def test_on_one_device_the_model_is_the_original_inside() -> None:
    net = language()
    parallel = sw.parallelize(net, sw.plan(net, batch(), devices=1), copy=True)
    with sw.whole(parallel):
        assert type(parallel) is Language
        assert torch.equal(parallel.generate(batch()[0], 2), net.generate(batch()[0], 2))
        with torch.no_grad():
            parallel.embed.weight.zero_()
    assert not parallel.embed.weight.any()


def test_a_model_that_is_not_planned_is_whole() -> None:
    net = language()
    with sw.whole(net) as whole:
        assert whole is net
    with pytest.raises(sw.PlanError, match="with 3, which is not a module"), sw.whole(3):  # type: ignore[arg-type]
        pass


def test_a_model_that_may_be_released_is_not_held_twice() -> None:
    def peak(**options: bool) -> float:
        """Peak bytes of `parallelize`, in multiples of the parameters."""
        net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32)))
        size = sum(parameter.nbytes for parameter in net.parameters())
        plan = sw.plan(net, (torch.ones(1, 64),), devices=1)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            sw.parallelize(net, plan, **options)
        events = sorted(profiled.events(), key=lambda event: event.time_range.start)
        held = accumulate(event.self_cpu_memory_usage for event in events)
        return max(held) / size

    assert peak(copy=True) >= 1
    assert peak(copy=True, release=True) < 0.1
    assert peak() < 0.1


@pytest.mark.parametrize("release", [False, True])
def test_a_model_is_left_as_it_is_unless_it_is_released(release: bool) -> None:
    net, eager = language(), language()
    parallel = sw.parallelize(net, sw.plan(net, batch(), devices=1), copy=True, release=release)
    assert torch.equal(parallel(*batch())[1], eager(*batch())[1])
    assert all((p.numel() == 0) is release for p in net.parameters())


def test_the_original_model_is_not_kept() -> None:
    net = language()
    parallel = sw.parallelize(net, sw.plan(net, batch(), devices=1), copy=True)
    original = weakref.ref(net)
    del net
    gc.collect()
    assert original() is None
    assert parallel(*batch())[1] is not None
