"""Plans against experts' by the predicted time of a step, on models of two layers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindformers.files import small
from shardwright.cli.compare import comparison_table, too_large_text
from shardwright.core.cost.cluster_file import cluster_to_yaml
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.memory import bytes_text as size
from shardwright.errors import ConfigError
from shardwright.run.config import run as config_run
from shardwright.run.config.graph_cache import graphs_folder
from shardwright.tools.compare import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    GRID,
    TENSOR_PARALLEL,
    compare_predicted,
)
from shardwright.tools.compare.alternatives import step_seconds_bound
from shardwright.tools.compare.predicted import GridComparison, expert_run

CLUSTER = "ascend910b"
LARGE = {
    "model__model_config__hidden_size": 4096,
    "model__model_config__num_heads": 32,
    "model__model_config__vocab_size": 32000,
    "model__model_config__seq_length": 4096,
}
"""Two layers of LLaMA 2 7B."""


def written(folder: Path, data: int, model: int, stages: int, **changes: Any) -> Path:
    """The file of an expert's configuration of a LLaMA of two layers."""
    numbers = {
        "parallel__parallel_mode": 1,
        "parallel__enable_parallel_optimizer": True,
        "parallel_config__data_parallel": data,
        "parallel_config__model_parallel": model,
        "parallel_config__pipeline_stage": stages,
        "parallel_config__micro_batch_num": 2 * stages,
        "model__model_config__hidden_size": 512,
        "model__model_config__num_layers": 2,
        "model__model_config__seq_length": 256,
    }
    file = folder / "expert.yaml"
    file.write_text(yaml.safe_dump(small(**(numbers | changes))))
    return file


@pytest.mark.parametrize(
    ("parts", "changes"),
    [
        ((1, 8, 1), {"parallel_config__use_seq_parallel": True}),
        ((2, 2, 2), {"runner_config__batch_size": 1}),
    ],
)
def test_the_automatic_plan_is_never_slower_than_another_that_fits(
    tmp_path: Path, parts: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    found = compare_predicted(written(tmp_path, *parts, **LARGE, **changes), CLUSTER)
    assert found.auto_is_fastest, found
    assert found.speed_up >= 0.999


def test_sharded_parameters_that_take_longer_than_computation_are_gathered_by_few(
    tmp_path: Path,
) -> None:
    changes = {
        "model__model_config__hidden_size": 2048,
        "model__model_config__num_heads": 64,
        "model__model_config__seq_length": 64,
        "parallel_config__micro_batch_num": 1,
        "runner_config__batch_size": 1,
    }
    comparison = GridComparison(
        expert_run(written(tmp_path, 16, 1, 1, **changes)), load_cluster("h100"), 16
    )
    best = min(comparison.megatron_plan(parts).step_time or 0.0 for parts in comparison.grid())
    found = comparison.automatic().step_time
    assert found is not None and found < 1.1 * best


def test_all_ways_have_the_same_batch_and_those_that_do_not_divide_are_left_out(
    tmp_path: Path,
) -> None:
    found = compare_predicted(written(tmp_path, 2, 4, 1), CLUSTER)
    assert found.global_batch == 4
    # Four samples cannot be divided among eight devices.
    assert [each.kind for each in found.alternatives] == [EXPERT, AUTO, TENSOR_PARALLEL, GRID]
    assert found.of_kind(DATA_PARALLEL) is None
    tokens = {round(each.seconds * each.tokens_per_second) for each in found.alternatives}
    assert tokens == {4 * 256}
    shown = [next(iter(column.cells)) for column in comparison_table([found]).columns]
    expert, data, *_, speed_up = shown[3:]
    assert found.alternatives[0].bytes > 0
    said = [f"{size(found.alternatives[0].memory)}", f"sends {size(found.alternatives[0].bytes)}"]
    assert str(expert).splitlines()[1:] == said
    assert (data, speed_up) == ("-", f"{found.speed_up:.1%}")


def test_ways_that_do_not_fit_are_named_with_their_need_and_not_counted(tmp_path: Path) -> None:
    limit = {"context__max_device_memory": "11.5GB", "runner_config__batch_size": 2}
    found = compare_predicted(written(tmp_path, 4, 2, 1, **LARGE, **limit), CLUSTER)
    assert [each.kind for each in found.too_large] == [TENSOR_PARALLEL]
    assert found.auto_is_fastest
    assert too_large_text(found) == (
        "small: excluded, over the memory limit of 11.5 GiB: tensor parallel 1·8·1 (11.6 GiB)"
    )


def test_the_limit_of_a_file_without_one_is_the_memory_of_the_cluster(tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    h100 = load_cluster("h100")
    small.write_text(cluster_to_yaml(replace(h100, device=replace(h100.device, memory=10**6))))
    found = compare_predicted(written(tmp_path, 8, 1, 1), str(small))
    assert found.limit == 10**6
    assert not any(each.fits for each in found.alternatives)


def test_a_model_is_captured_once_for_plans_and_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, 8, 1, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHARDWRIGHT_GRAPH_CACHE")
    run = expert_run(file)
    run.plan(8)
    assert len(list(graphs_folder().iterdir())) == 1
    monkeypatch.setattr(config_run, "capture", None)
    comparison = GridComparison(run, load_cluster(CLUSTER), 8)
    # What the plan pinned is of its own model.
    assert comparison.graph.module_tags == {}


def test_no_way_is_faster_than_the_bound_by_which_it_may_be_left_out(tmp_path: Path) -> None:
    run = expert_run(written(tmp_path, 4, 2, 1, parallel_config__micro_batch_num=4))
    comparison = GridComparison(run, load_cluster(CLUSTER), 8)
    cluster, points = load_cluster(CLUSTER), list(comparison.grid())
    assert (4, 2, 1) in points
    for parts in points:
        seconds = comparison.megatron_plan(parts).step_time
        assert seconds is not None
        bound = step_seconds_bound(
            comparison.graph, cluster, parts, run.config.parallel.micro_batches
        )
        assert 0 < bound <= seconds, parts


def test_only_an_experts_configuration_is_compared(tmp_path: Path) -> None:
    file = written(tmp_path, 8, 1, 1, parallel__parallel_mode=2)
    with pytest.raises(ConfigError, match="not an expert configuration"):
        compare_predicted(file, CLUSTER)


def test_the_experts_plan_has_the_stages_and_shards_of_experts_of_its_file(tmp_path: Path) -> None:
    experts = {"moe_config__expert_num": 8, "moe_config__num_experts_chosen": 2}
    changes = {
        "model__model_config__num_layers": 5,
        "model__model_config__offset": [1, 0],
        "parallel_config__expert_parallel": 4,
    }
    run = expert_run(written(tmp_path, 4, 1, 2, **experts, **changes))
    _, plan = GridComparison(run, load_cluster(CLUSTER), 8).expert()
    assert [plan.row(f"model.layers.{n}.mlp.experts").stage for n in range(5)] == [0, 0, 0, 1, 1]
    sizes = plan.mesh.device_matrix
    axes = plan.cuts["model.layers.0.mlp.experts"]["e"]
    assert prod(sizes[axis] for axis in axes) == 4


def test_schedules_of_several_chunks_are_not_compared(tmp_path: Path) -> None:
    interleaved = {
        "model__model_config__num_layers": 4,
        "model__model_config__pp_interleave_num": 2,
        "parallel__pipeline_config__pipeline_interleave": True,
    }
    file = written(tmp_path, 4, 1, 2, **interleaved)
    with pytest.raises(ConfigError, match="interleaved_1f1b has several chunks per stage"):
        compare_predicted(file, CLUSTER)
