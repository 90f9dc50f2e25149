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
from shardwright.torch_internals.distributed import FakeStore

DEVICES = 256


@pytest.fixture
def group_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the groups that are made beside the world."""
    sizes: list[int] = []
    new_group = dist.distributed_c10d.new_group

    def counted(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(ranks))
        return new_group(ranks, *args, **kwargs)

    for module in (dist.distributed_c10d, dist.device_mesh):
        monkeypatch.setattr(module, "new_group", counted)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)
    yield sizes
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hsdp", "most"), [(None, 0), ({"shard_size": 8, "threshold": 0}, 1.2 * DEVICES)]
)
def test_a_rank_of_many_makes_few_groups_and_trains_at_once(
    hsdp: dict[str, int] | None, most: float, group_sizes: list[int]
) -> None:
    net, args, kwargs = llama(batch=DEVICES)
    plan = sw.plan(net, args, kwargs, devices=DEVICES, hsdp=hsdp)
    parallel = sw.parallelize(net, plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    parallel(*args, **kwargs).loss.backward()
    started = time.process_time()
    nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    optimizer.step()
    assert time.process_time() - started < 5
    assert len(plan.mesh.device_matrix) == 8
    assert len(group_sizes) <= most
