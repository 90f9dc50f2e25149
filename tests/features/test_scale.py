"""One rank of many, on a process group that sends nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from sample_models import llama
from shardwright.core.layout.layout import Layout
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.distributed import FakeStore

DEVICES = 256


@pytest.fixture
def group_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the groups that are made beside the world."""
    sizes: list[int] = []
    new_group = dist.distributed_c10d.new_group

    def counted(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(ranks))
        return new_group(ranks, *args, **kwargs)

    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        monkeypatch.setattr(module, "new_group", counted)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)
    yield sizes
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hsdp", "groups"), [(None, []), ({"shard_size": 8, "threshold": 0}, [8, 32])]
)
def test_a_rank_of_many_makes_few_groups_and_trains_at_once(
    hsdp: dict[str, int] | None, groups: list[int], group_sizes: list[int]
) -> None:
    net, args, kwargs = llama(batch=DEVICES)
    plan = sw.plan(net, args, kwargs, devices=DEVICES, hsdp=hsdp)
    parallel = sw.parallelize(net, plan, copy=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    parallel(*args, **kwargs).loss.backward()
    started = time.process_time()
    nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    optimizer.step()
    assert time.process_time() - started < 20
    assert len(plan.mesh.device_matrix) == (1 if hsdp is None else 2)
    assert sorted(group_sizes) == groups


def test_what_a_search_finds_has_parameters_on_one_mesh_of_few_axes(
    group_sizes: list[int],
) -> None:
    net, args, kwargs = llama(batch=DEVICES // 8, width=64, vocabulary=512)
    plan = sw.plan(net, args, kwargs, devices=DEVICES)
    parallel = sw.parallelize(net, plan, copy=True)
    (mesh,) = {parameter.device_mesh for parameter in parallel.parameters()}
    # Of MLPs 8, of query heads 4, of key heads 2 devices share one.
    assert mesh.mesh_dim_names == ("dp", "tp0", "tp1", "tp2")
    assert mesh.shape == (32, 2, 2, 2)
    assert len(group_sizes) <= 16


def test_a_group_that_splits_gives_the_groups_of_an_axis_in_one_call(
    group_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[list[int]]] = []

    def split_group(parent: dist.ProcessGroup, ranks: list[list[int]], **_: Any) -> Any:
        calls.append(ranks)
        return parent

    monkeypatch.setattr("shardwright.core.runtime.devices.supports_split_group", lambda group: True)
    monkeypatch.setattr(dist, "split_group", split_group)
    Devices.of_process(Layout((2, 128), ("a", "b")), torch.device("cpu")).group((0, 1))
    assert calls == [
        [[rank, rank + 128] for rank in range(128)],
        [list(range(128)), list(range(128, 256))],
    ]
    assert not group_sizes
