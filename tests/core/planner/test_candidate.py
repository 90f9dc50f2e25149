"""Decisions on a cluster whose nodes are smaller than the number of devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.partition.fold_axes import dtensor_axes
from shardwright.core.planner import candidate


@pytest.mark.parametrize("devices", [24, 40, 48])
def test_data_parallel_scales_alike_on_any_number_of_nodes(devices: int) -> None:
    between = seconds(16) + (seconds(64) - seconds(16)) * (devices - 16) / 48
    assert seconds(devices) == pytest.approx(between, rel=0.1)


def seconds(devices: int) -> float:
    """Of a step with as many rows on each device."""
    with torch.device("meta"):
        layers = [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
        net = sw.WithLoss(nn.Sequential(*layers), nn.MSELoss())
        batch = torch.empty(64 * devices, 4096), torch.empty(64 * devices, 4096)
    plan = sw.plan(net, batch, devices=devices, mode="data_parallel", cluster="h100")
    assert plan.step_time is not None
    return plan.step_time


def test_llama_on_1024_devices_has_a_mesh_of_few_axes_and_is_no_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four layers of LLaMA 2 70B: their search divides the axes of a node in several places."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
        num_hidden_layers=4,
    )  # fmt: skip
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
        ids = torch.empty((128, 4096), dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    graph = sw.capture(net, (), inputs, compute_dtype=torch.bfloat16)
    options = {"devices": 1024, "cluster": "h100", "compute_dtype": "bfloat16"}
    aligned = sw.plan(graph, **options)
    monkeypatch.setattr(candidate, "MAX_PARAMETER_AXES", 1024)
    searched = sw.plan(graph, **options)
    axes = [len(dtensor_axes(plan.partitioned)) for plan in (aligned, searched)]
    assert axes[0] <= 5 < axes[1]
    assert aligned.step_time is not None and searched.step_time is not None
    assert aligned.step_time <= searched.step_time
