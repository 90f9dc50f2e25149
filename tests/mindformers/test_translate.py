"""Files of the MindFormers shape are planned as Shardwright's own."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mindformers.files import run_of, small
from shardwright.cli import app
from shardwright.core.capture.naming import local_operator_name
from shardwright.core.cost.cluster import LinkLevel
from shardwright.core.cost.cluster_file import cluster_to_yaml as written_cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.planner.options import MEM_COEFFS
from shardwright.errors import ConfigError
from shardwright.mindformers import translate_run
from shardwright.run.config import Run


def written(folder: Path, **changes: Any) -> Path:
    """JSON is YAML."""
    file = folder / "run.yaml"
    file.write_text(json.dumps(small(**changes)))
    return file


def on_cluster(run: Run, cluster: str | None) -> Run:
    """On a cluster; `pairs.yaml` is one whose nodes have two devices."""
    pairs = replace(
        load_cluster("h100"),
        levels=(LinkLevel("pair", 1e9, 1e-6, 2), LinkLevel("network", 1e9, 1e-6)),
    )
    (run.folder / "pairs.yaml").write_text(written_cluster(pairs))
    parallel = run.config.parallel.model_copy(update={"cluster": cluster})
    return replace(run, config=run.config.model_copy(update={"parallel": parallel}))


def test_every_part_has_its_place() -> None:
    config = translate_run(
        run_of(
            seed=3,
            output_dir="out",
            runner_config__epochs=2,
            runner_config__gradient_accumulation_steps=2,
            model__model_config__pet_config={"pet_type": "lora", "lora_rank": 4},
            lr_schedule={"type": "CosineWithWarmUpLR", "warmup_ratio": 0.03},
            runner_wrapper__use_clip_grad=True,
            callbacks=[{"type": "CheckpointMonitor", "save_checkpoint_steps": 10}],
        ),
        devices=8,
    )
    assert config.model.sizes is not None and config.model.lora is not None
    assert (config.model.sizes["num_layers"], config.model.lora.rank) == (4, 4)
    assert (config.data.seq_length, config.data.batch_size) == (32, 2 * 4 * 2)
    assert config.optimizer.schedule is not None and not config.optimizer.decay_vectors
    assert (config.optimizer.schedule.warmup_ratio, config.optimizer.clip_norm) == (0.03, 1.0)
    assert config.parallel.micro_batches == 2
    assert (config.train.epochs, config.train.seed) == (2, 3)
    assert config.train.checkpoint is not None
    assert (config.train.checkpoint.folder, config.train.checkpoint.every) == ("out", 10)


def test_prefixes_are_a_section_of_the_model() -> None:
    pet = {"pet_type": "ptuning2", "pre_seq_len": 8, "dropout_prob": 0.0}
    config = translate_run(run_of(model__model_config__pet_config=pet), devices=8)
    assert config.model.prefix is not None and config.model.lora is None
    assert (config.model.prefix.tokens, config.model.prefix.projection) == (8, None)


@pytest.mark.parametrize("search", ["recursive_programming", None])
def test_a_file_is_planned_for_the_devices_that_there_are(tmp_path: Path, search: Any) -> None:
    run = Run.from_file(written(tmp_path, parallel__search_mode=search))
    plan = run.plan(devices=8)
    assert (plan.devices, plan.mode) == (8, "recursive_programming")
    assert plan.graph is not None
    assert plan.graph.input_values[0].shape == (8, 32)


def test_what_is_loaded_and_saved_has_its_place() -> None:
    saved = [{"type": "CheckpointMonitor", "save_checkpoint_steps": 10}]
    tuned = run_of(load_checkpoint="old", run_mode="finetune", callbacks=saved)
    config = translate_run(tuned, devices=8)
    assert (config.train.load, config.train.resume) == ("old", False)
    assert config.train.checkpoint is not None and config.train.checkpoint.folder == "output"
    resumed = run_of(load_checkpoint="old", resume_training=True, callbacks=saved)
    train = translate_run(resumed, devices=8).train
    assert train.checkpoint is not None
    assert (train.load, train.resume, train.checkpoint.folder) == (None, True, "old")
    named = run_of(parallel__strategy_ckpt_save_file="./strategy.ckpt")
    config = translate_run(named, devices=8)
    assert config.parallel.save_strategies == "./strategy.ckpt"
    assert "./strategy.ckpt: strategies of the plan are written as JSON" in named.notes


def test_mem_coeff_auto_is_the_smallest_that_fits_the_memory_of_a_device(tmp_path: Path) -> None:
    changes = {"parallel_config__mem_coeff": "auto", "context__max_device_memory": "1GB"}
    plan = Run.from_file(written(tmp_path, **changes)).plan(devices=8)
    assert plan.options["mem_coeff"] == MEM_COEFFS[0]


@pytest.mark.parametrize("cluster", [None, "h100"])
def test_a_batch_that_does_not_divide_ends_in_a_plan_that_works(
    tmp_path: Path, cluster: str | None
) -> None:
    plan = on_cluster(Run.from_file(written(tmp_path)), cluster).plan(devices=7)
    assert (plan.devices, plan.bytes) == (7, 0)


def test_an_experts_numbers_become_pins(tmp_path: Path) -> None:
    changes = {"parallel__parallel_mode": 1, "parallel_config__use_seq_parallel": True}
    plan = Run.from_file(written(tmp_path, **changes)).plan(devices=8)
    assert plan.row("model.layers.1.mlp.up_proj").strategy == ((4, 1, 1), (2, 1))
    with pytest.raises(ConfigError, match="= 8, but there are 16 devices"):
        Run.from_file(written(tmp_path, **changes)).plan(devices=16)


def test_the_sequence_is_cut_where_the_context_is_parallel(tmp_path: Path) -> None:
    changes = {
        "parallel__parallel_mode": 1,
        "parallel_config": {"data_parallel": 2, "model_parallel": 2, "context_parallel": 2},
        "model__model_config__use_flash_attention": True,
    }
    run = Run.from_file(written(tmp_path, **changes))
    assert run.plan(devices=8).row("model.layers.1.mlp.up_proj").strategy == ((2, 2, 1), (2, 1))
    changes["parallel_config"] = {"data_parallel": 1, "model_parallel": 2, "context_parallel": 4}
    changes["model__model_config__n_kv_heads"] = 2
    grouped = Run.from_file(written(tmp_path, **changes)).plan(devices=8)
    attention = grouped.row("model.layers.1.self_attn.scaled_dot_product_attention")
    assert attention.strategy[0] == (1, 2, 4, 1)


@pytest.mark.parametrize(
    ("said", "schedule", "layers"),
    [
        ({}, "1f1b", [0, 0, 1, 1]),
        ({"pipeline_interleave": True}, "interleaved_1f1b", [0, 1, 0, 1]),
        ({"pipeline_scheduler": "zero_bubble_v"}, "zero_bubble_v", [0, 1, 1, 0]),
    ],
)
def test_the_schedule_says_in_which_order_stages_have_layers(
    tmp_path: Path, said: Any, schedule: str, layers: list[int]
) -> None:
    file = written(
        tmp_path,
        parallel__parallel_mode=1,
        parallel__pipeline_config=said,
        parallel_config={"data_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4},
    )
    plan = Run.from_file(file).plan(devices=4)
    assert plan.pipeline.schedule == schedule
    stages = [plan.row(f"model.layers.{n}.mlp.up_proj").stage for n in range(4)]
    assert stages == layers


def test_an_experts_stages_are_equally_many_layers(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        parallel__parallel_mode=1,
        parallel_config={
            "data_parallel": 2,
            "model_parallel": 2,
            "pipeline_stage": 2,
            "micro_batch_num": 4,
        },
    )
    plan = Run.from_file(file).plan(devices=8)
    assert (plan.devices, plan.pipeline.stages, plan.pipeline.micro_batches) == (8, 2, 4)
    stage = {f"model.layers.{n}.mlp.up_proj": plan.pipeline.chunk_of for n in range(4)}
    assert [part[name] for name, part in stage.items()] == [0, 0, 1, 1]


def test_where_the_optimizer_is_parallel_parameters_are_stored_sharded(tmp_path: Path) -> None:
    file = written(tmp_path, parallel__enable_parallel_optimizer=True)
    plan = Run.from_file(file).plan(devices=8)
    assert plan.sharding == OptimizerParallel("level1", -1, 64)
    stored = plan.decisions.storage["model.embed_tokens.weight"]
    assert plan.mesh.size(axis for axes in stored for axis in axes) == 8


@pytest.mark.parametrize(
    ("keys", "folder"),
    [
        ({"save_graphs": True}, "graphs"),
        ({"save_graphs": 2, "save_graphs_path": "./graph"}, "./graph"),
        ({"save_graphs": "True"}, "graphs"),
        ({"save_graphs": 0, "save_graphs_path": "graph"}, None),
        ({"save_graphs": False}, None),
        ({}, None),
    ],
)
def test_graphs_are_saved_as_the_context_says(keys: dict[str, Any], folder: str | None) -> None:
    assert translate_run(run_of(context=keys), devices=8).parallel.save_graphs == folder


def test_stages_take_the_layers_and_recompute_the_blocks_that_are_listed() -> None:
    stages = {"pipeline_stage": 2, "micro_batch_num": 2, "data_parallel": 4}
    config = translate_run(
        run_of(
            parallel__parallel_mode=1,
            parallel_config=stages,
            model__model_config__offset=[-1, 1],
            recompute_config={"recompute": [0, 1], "select_recompute": [2, 2]},
        ),
        devices=8,
    )
    assert config.parallel.expert is not None and config.parallel.recompute is not None
    assert config.parallel.expert.layers == [1, 3]
    again = config.parallel.recompute
    assert (again.blocks, again.whole_blocks) == ([0, 2], [1])


def test_interleaved_chunks_take_the_layers_that_are_listed(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        parallel__parallel_mode=1,
        parallel__pipeline_config={"pipeline_interleave": True},
        parallel_config={"data_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4},
        model__model_config__num_layers=6,
        model__model_config__pp_interleave_num=2,
        model__model_config__offset=[[1, 0], [0, 1]],
    )
    plan = Run.from_file(file).plan(devices=4)
    assert plan.pipeline.schedule == "interleaved_1f1b"
    stages = [plan.row(f"model.layers.{n}.mlp.up_proj").stage for n in range(6)]
    assert stages == [0, 0, 1, 0, 1, 1]


def test_sequences_are_not_divided_in_time() -> None:
    run = run_of(
        parallel__parallel_mode=1,
        parallel__pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "seqpipe"},
        parallel_config__seq_split_num=8,
    )
    assert run.parallelism.schedule == "1f1b"
    assert "not seqpipe: sequences are not divided into seq_split_num 8 parts" in run.notes[0]


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ({"select_recompute": {r"feed_forward\.mul": [2]}}, {"mul"}),
        ({"recompute": True}, {"linear", "silu", "scaled_dot_product_attention"}),
        ({"select_recompute": True}, {"silu", "mul"}),
    ],
)
def test_blocks_or_what_is_cheap_in_them_are_computed_again(
    tmp_path: Path, said: Any, kinds: set[str]
) -> None:
    changes = {"model__model_config__use_flash_attention": True, "recompute_config": said}
    plan = Run.from_file(written(tmp_path, **changes)).plan(devices=8)
    assert plan.graph is not None
    again = {
        local_operator_name(plan.graph.by_name[name].target) for name in plan.decisions.recompute
    }
    assert kinds <= again
    assert ("embedding" in again, "rms_norm" in again) == (False, "recompute" in said)


@pytest.mark.parametrize(
    ("stored", "computed", "found"),
    [
        ("float32", "float16", ("float32", "bfloat16")),
        ("float16", "float16", ("bfloat16", None)),
        ("float32", "float32", ("float32", None)),
    ],
)
def test_parameters_may_be_stored_in_another_dtype_than_they_are_computed(
    stored: str, computed: str, found: tuple[str, str | None]
) -> None:
    run = run_of(
        model__model_config__param_init_type=stored, model__model_config__compute_dtype=computed
    )
    config = translate_run(run, devices=8)
    assert (config.train.dtype, config.parallel.compute_dtype) == found


def test_stages_are_chosen_and_memory_is_a_limit() -> None:
    run = run_of(
        parallel__auto_pipeline=True,
        parallel_config={"pipeline_stage": 2, "micro_batch_num": 8},
        context__max_device_memory="1GB",
    )
    parallel = translate_run(run, devices=32).parallel
    assert (parallel.stages, parallel.memory_limit) == ("auto", 2**30)


def test_as_many_stages_are_searched_as_there_are_micro_batches(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        parallel__auto_pipeline=True,
        parallel_config__pipeline_stage=2,
        parallel_config__micro_batch_num=6,
    )
    assert Run.from_file(file).for_devices(32).config.parallel.max_stages == 6


def test_stages_that_are_given_are_taken_and_others_suggested(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4, "data_parallel": 8}}
    silent = Run.from_file(written(tmp_path, **changes))
    assert not silent.config.parallel.suggest_stages
    run = Run.from_file(written(tmp_path, parallel__auto_pipeline=False, **changes))
    run = on_cluster(run, "pairs.yaml")
    with caplog.at_level(logging.INFO, "shardwright.search"):
        plan = run.plan(devices=8)
    assert plan.pipeline.stages == 2
    assert "searching stages in [1, 2, 4]" in caplog.text
    assert "of 1 to 4 stages, 0.0" in caplog.text


def test_gathers_that_are_made_again_free_what_was_gathered() -> None:
    config = translate_run(
        run_of(
            parallel__enable_parallel_optimizer=True,
            recompute_config={"parallel_optimizer_comm_recompute": True},
        ),
        devices=8,
    )
    assert config.parallel.hsdp is not None
    assert config.parallel.hsdp.level == "level3"


def test_where_every_device_counts_the_batch_grows_with_them(tmp_path: Path) -> None:
    run = Run.from_file(written(tmp_path, parallel__full_batch=False))
    assert [run.for_devices(n).config.data.batch_size for n in (2, 8)] == [4, 16]


def test_the_command_says_once_what_has_no_meaning(tmp_path: Path) -> None:
    file = written(tmp_path, profile=True, metric={"type": "PerplexityMetric"})
    found = CliRunner().invoke(app, ["plan", str(file), "--devices", "8", "--json"])
    assert found.exit_code == 0
    said = [line for line in found.stderr.splitlines() if "are ignored" in line]
    assert said == [f"{file}: 2 keys are ignored: profile, metric"]
    assert json.loads(found.stdout)["version"]


def test_a_mistake_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: parallel_config\.pipeline_stage: 9 "):
        Run.from_file(written(tmp_path, parallel_config__pipeline_stage=9))
