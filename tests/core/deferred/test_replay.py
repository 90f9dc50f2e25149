"""A record is run with the memory of what is kept and of one tensor, and draws what it must."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from shardwright.core.deferred import Deferred, values_of
from shardwright.core.deferred.replay import plan_replay

SIZE = 512 * 512 * 4


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that is allocated at one time while `function` runs, of PyTorch's own."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = function()
    results = profiled.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert kept is not None
    return peak


def deferred_layers(count: int) -> nn.Module:
    """Every weight is drawn when it is made, and drawn again when all are there."""
    with sw.no_init_parameters():
        net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(count)))
        for layer in net:
            nn.init.normal_(layer.weight)
    return net


def test_memory_is_that_of_what_is_kept_and_one_parameter() -> None:
    net = deferred_layers(16)
    parameters = dict(net.named_parameters())
    few = peak_bytes(lambda: values_of(parameters, lambda name, whole: whole[:32].clone()))
    # A sixteenth of each of sixteen, and one; the states of the generator take 5 KB a draw.
    assert 2 * SIZE <= few <= 2.25 * SIZE
    all_of_them = peak_bytes(lambda: values_of(parameters, lambda name, whole: whole))
    assert all_of_them >= 16 * SIZE


def test_tensors_are_kept_in_the_order_in_which_they_are_finished() -> None:
    with sw.no_init_parameters():
        net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        nn.init.zeros_(net[0].weight)
    order: list[str] = []

    def keep(name: str, whole: Tensor) -> Tensor:
        order.append(name)
        return whole

    values_of(dict(net.named_parameters()), keep)
    assert order == ["1.weight", "0.weight"]


def test_only_the_draws_that_are_needed_run_once_all_are_known() -> None:
    net = deferred_layers(4)
    weight = net[3].weight
    assert isinstance(weight, Deferred)
    record = weight._record
    wanted = {"weight": record.storage_view(weight)}
    # First every draw before it runs, as the generator's state after them is not known.
    assert len(plan_replay(record, wanted, ()).steps) == 8
    first = values_of({"weight": weight}, lambda name, whole: whole)["weight"]
    assert len(plan_replay(record, wanted, ()).steps) == 1
    again = values_of({"weight": weight}, lambda name, whole: whole)["weight"]
    assert torch.equal(first, again)


def test_what_is_overwritten_is_drawn_but_not_kept() -> None:
    torch.manual_seed(0)
    wanted = torch.empty(3).uniform_().normal_()
    torch.manual_seed(0)
    with sw.no_init_parameters():
        tensor = torch.empty(3).uniform_().normal_()
    got = values_of({"tensor": tensor}, lambda name, whole: whole)["tensor"]
    assert torch.equal(got, wanted)
