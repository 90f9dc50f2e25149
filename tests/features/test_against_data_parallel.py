"""No preset is better than what the search by seconds is taken for."""

from __future__ import annotations

import pytest

import shardwright as sw
from sample_models import llama


@pytest.mark.parametrize("hsdp", [None, {"level": "level1"}])
@pytest.mark.parametrize("cluster", ["h100", "ascend910b"])
@pytest.mark.parametrize("devices", [8, 16])
def test_a_plan_is_never_slower_than_data_parallel(
    cluster: str, devices: int, hsdp: dict[str, str] | None
) -> None:
    net, args, kwargs = llama(batch=16, sequence=64, layers=4, heads=8, width=256, vocabulary=4096)
    graph = sw.capture(net, args, kwargs)
    found = sw.plan(graph, devices=devices, cluster=cluster, hsdp=hsdp, mem_coeff=1e-6)
    preset = sw.plan(graph, devices=devices, cluster=cluster, hsdp=hsdp, mode="data_parallel")
    assert found.step_time is not None and preset.step_time is not None
    assert found.step_time <= preset.step_time * (1 + 1e-6)
    assert found.mode == "recursive_programming"


def test_what_is_pinned_is_kept() -> None:
    net, args, kwargs = llama(batch=16, layers=2, width=256, vocabulary=4096)
    sw.shard(net.get_submodule("lm_head"), in_strategy=((1, 1, 1), (8, 1)))
    found = sw.plan(net, args, kwargs, devices=8, cluster="h100")
    assert found.row("lm_head").strategy == ((1, 1, 1), (8, 1))
