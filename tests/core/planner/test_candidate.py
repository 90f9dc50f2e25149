"""Decisions on a cluster whose nodes are smaller than the number of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.fold_axes import dtensor_axes
from shardwright.core.planner import candidate
from shardwright.core.search import baselines
from shardwright.core.search.request import CutsOfGraph
from tools.compare.test_published_rows import planned


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
    h100 = load_cluster("h100")
    # Without latencies, steps of few bytes cost nothing, so more of them divide axes.
    levels = tuple(replace(level, latency=0.0) for level in h100.levels)
    options = {
        "devices": 1024,
        "cluster": replace(h100, levels=levels),
        "compute_dtype": "bfloat16",
    }
    aligned = sw.plan(graph, **options)
    monkeypatch.setattr(candidate, "MAX_PARAMETER_AXES", 1024)
    searched = sw.plan(graph, **options)
    axes = [len(dtensor_axes(plan.partitioned)) for plan in (aligned, searched)]
    assert axes[0] <= 5 < axes[1]
    assert aligned.step_time is not None and searched.step_time is not None
    assert aligned.step_time <= searched.step_time


def test_a_search_that_fails_is_not_repeated_for_other_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[tuple[int, ...]] = []

    def data_parallel(graph: Graph, mesh: DeviceMatrix) -> CutsOfGraph:
        searched.append(mesh.device_matrix)
        return baselines.data_parallel(graph, mesh)

    monkeypatch.setattr(
        baselines.DataParallel, "search", lambda _, each: data_parallel(each.graph, each.mesh)
    )
    with torch.device("meta"):
        net = sw.WithLoss(nn.Linear(4096, 4096), nn.MSELoss())
        # 12 samples cannot be divided among 8 devices.
        batch = torch.empty(12, 4096), torch.empty(12, 4096)
    sw.plan(net, batch, devices=8, cluster="h100", memory_limit="64MiB")
    assert searched == [(2, 2, 2)]


def test_schedules_with_one_and_with_two_backward_passes_share_no_predicted_seconds() -> None:
    searched = planned(
        stages=2, chunks=2, layers=4, sequence_parallel=True, tensor_parallel=2, data_parallel=2
    ).candidate
    predicted = []
    for schedules in (("zero_bubble_v",), ("interleaved_1f1b", "zero_bubble_v")):
        model = replace(searched.model, chunk_times={})
        for schedule in schedules:
            pipeline = replace(searched.pipeline, schedule=schedule)
            last = replace(searched, model=model, pipeline=pipeline).predicted
        assert last is not None
        predicted.append(last.seconds)
    assert predicted[0] == predicted[1]
