"""Programs with named ranges are the same programs; without, they have nothing of them."""

import re
from dataclasses import replace

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from shardwright.core.lower.emit_program import lower
from shardwright.core.runtime.devices import Devices


def planned(devices: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], sw.Plan]:
    torch.manual_seed(0)
    net = sw.WithLoss(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), nn.MSELoss())
    batch = (torch.randn(8, 16), torch.randn(8, 8))
    return (
        net,
        batch,
        sw.plan(net, batch, devices=devices, hsdp={"threshold": 0}, mode="data_parallel"),
    )


def test_a_program_names_its_operators_only_if_it_is_asked_to() -> None:
    _, _, plan = planned(4)
    (chunk,) = plan.partitioned.chunks
    devices = Devices.of_rank(plan.partitioned.mesh, 0)
    plain = lower(chunk, devices)
    named = lower(chunk, replace(devices, named_ranges=True))
    assert "named_range" not in plain.source
    assert "    with named_range('net.0'): " in named.source
    ranges = re.compile(r"with named_range\(\S+\): ")
    assert ranges.sub("", named.source) == plain.source


def test_a_model_on_one_device_has_its_operators_in_the_trace() -> None:
    net, batch, plan = planned(1)
    expected = net(*batch)
    parallel = sw.parallelize(net, plan, named_ranges=True, copy=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss = parallel(*batch)
    assert loss.equal(expected)
    assert {"net.0", "net.2"} <= {each.name for each in seen.events() or ()}
