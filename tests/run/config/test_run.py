"""Keys that take a word in place of a number or a section."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwright as sw
from shardwright.errors import CheckpointError, ConfigError, DataError, PlanError, StrategyError
from shardwright.run import StepRecord, World
from shardwright.run.config import Run, parse
from shardwright.run.config.training import RankTraining, train_rank

MODEL = "model: {name: llama2_7b_tiny}\ndata: {name: text, seq_length: 32, batch_size: 8}\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    text = f"{MODEL}train: {{load: weights.pt}}\nparallel: {{save_strategies: out/cuts.json}}\n"
    (tmp_path / "run.yaml").write_text(text)
    return Run.from_file(tmp_path / "run.yaml")


def test_mem_coeff_is_a_positive_number_or_auto() -> None:
    found = [
        parse(f"{MODEL}parallel: {{mem_coeff: {each}}}").parallel.mem_coeff
        for each in ("2", "1e-3", "auto")
    ]
    assert found == [2.0, 0.001, "auto"]
    for wrong in ("0", "none", "[1]", "true"):
        with pytest.raises(ConfigError, match="mem_coeff: expected a positive number, or 'auto'"):
            parse(f"{MODEL}parallel: {{mem_coeff: {wrong}}}")


def test_recompute_is_a_section_or_auto() -> None:
    assert parse(f"{MODEL}parallel: {{recompute: auto}}").parallel.recomputes_as_needed
    assert not parse(f"{MODEL}parallel: {{recompute: {{}}}}").parallel.recomputes_as_needed
    with pytest.raises(ConfigError, match="recompute: expected a mapping, got 'all'"):
        parse(f"{MODEL}parallel: {{recompute: all}}")
    for key in ("operators: [silu]", "whole_blocks: [0]", "communication: false"):
        with pytest.raises(ConfigError, match="`auto: true` conflicts with the other keys"):
            parse(f"{MODEL}parallel: {{recompute: {{auto: true, {key}}}}}")


def test_recompute_auto_asks_the_plan_to_fit_into_memory(tmp_path: Path) -> None:
    def planned(parallel: str) -> sw.Plan:
        file = tmp_path / "run.yaml"
        file.write_text(f"{MODEL}parallel: {{mode: data_parallel, {parallel}}}\n")
        return Run.from_file(file).plan(devices=2)

    assert planned("recompute: {}").recompute
    assert not planned("recompute: auto, memory_limit: 1GB").recompute
    with pytest.raises(StrategyError, match="recompute='auto' needs a memory limit"):
        planned("recompute: auto")


def test_weights_are_loaded_before_the_first_step(run: Run) -> None:
    with pytest.raises(CheckpointError, match=r"train.load: .*weights.pt: no such file"):
        run.check_checkpoints()
    torch.manual_seed(5)
    given = run.model()
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.add_(1.0)
    sw.save_state_dict(given, run.folder / "weights.pt")
    run.check_checkpoints()
    net = run.model()
    run.checkpoint_policy.begin(net, torch.optim.SGD(net.parameters()), None, run.numbers)
    for name, value in net.state_dict().items():
        assert torch.equal(value, given.state_dict()[name]), name


def test_the_strategies_of_the_plan_are_saved_where_it_says(run: Run) -> None:
    path = run.save_strategies(run.plan(devices=2))
    assert path == run.folder / "out/cuts.json"
    assert "lm_head" in path.read_text()


def test_it_trains_on_files_of_tokens_and_is_evaluated_on_another(tmp_path: Path) -> None:
    tokens = (np.arange(4000) * 7 % 97).astype("uint16")
    tokens.tofile(tmp_path / "train.bin")
    np.save(tmp_path / "val.npy", tokens[500:])
    text = """
model: {name: llama2_7b_tiny, arguments: {num_layers: 1}}
data: {name: tokens, path: train.bin, seq_length: 32, batch_size: 8}
optimizer: {learning_rate: 0.1}
train: {steps: 4, evaluation: {path: val.npy, every: 2, batches: 3}}
"""
    (tmp_path / "run.yaml").write_text(text)
    run, steps = Run.from_file(tmp_path / "run.yaml"), list[StepRecord]()
    train_rank(run, run.plan(1), World.from_environment(), steps.append)
    first, second = (step.evaluation_loss for step in steps if step.evaluation_loss is not None)
    assert len(steps) == 4 and second < first

    (tmp_path / "run.yaml").write_text(text.replace("val.npy", "absent.npy"))
    with pytest.raises(DataError, match=r"train\.evaluation`: .*absent\.npy: no such file"):
        Run.from_file(tmp_path / "run.yaml").check_data()


def test_a_plan_for_parts_of_batches_is_refused(run: Run) -> None:
    batch = run.example_batch()
    plan = sw.plan(run.model(), batch, devices=2, dataset_strategy="data_parallel")
    with pytest.raises(
        PlanError, match="own shard of a batch, but a configured run passes the global batch"
    ):
        RankTraining.of(run, plan, torch.device("cpu"))


def test_the_number_of_micro_batches_is_chosen_for_the_run() -> None:
    text = f"{MODEL}parallel: {{cluster: a100, mode: data_parallel, micro_batches: "
    chosen, *fixed = (
        Run(parse(f"{text}{number}}}"), Path()).plan(2) for number in ("auto", "1", "2", "4")
    )
    fastest = min(fixed, key=lambda plan: plan.step_time or 0.0)
    assert chosen.step_time == pytest.approx(fastest.step_time)
    assert chosen.pipeline.micro_batches == fastest.pipeline.micro_batches
    with pytest.raises(ConfigError, match="micro_batches: expected a whole number of at least 1"):
        parse(f"{text}many}}")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("model: {name: llama2_7b}", "bfloat16"),
        ("model: {name: pangualpha_13b}", "bfloat16"),
        ("model: {name: llama2_7b_tiny}", None),
        ("model: {hf: {model_type: gpt2}}", None),
        ("model: {hf: {model_type: gpt2, dtype: bfloat16}}", "bfloat16"),
        ("model: {hf: {model_type: gpt2, torch_dtype: bfloat16}}", "bfloat16"),
        ("model: {hf: {model_type: gpt2, dtype: float16}}", "bfloat16"),
        ("model: {hf: {model_type: gpt2, dtype: float32}}", None),
        ("model: {hf: config.json}", "bfloat16"),
        ("model: {hf: .}", "bfloat16"),
        ("model: {name: llama2_7b}\nparallel: {compute_dtype: float32}", "float32"),
        ("model: {name: llama2_7b_tiny}\nparallel: {compute_dtype: bfloat16}", "bfloat16"),
        ("model: {name: llama2_7b}\ntrain: {dtype: float32}", None),
        ("model: {name: llama2_7b}\ntrain: {dtype: bfloat16}", None),
        ("model: {name: llama2_7b}\ntrain: {steps: 2}", "bfloat16"),
        ("model: {target: 'a:b'}", None),
    ],
)
def test_the_compute_dtype_is_that_of_the_configuration_of_the_model(
    tmp_path: Path, text: str, dtype: str | None
) -> None:
    named = {"model_type": "llama", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(named))
    (tmp_path / "run.yaml").write_text(text)
    assert Run.from_file(tmp_path / "run.yaml").compute_dtype == dtype


def test_a_published_model_is_planned_and_stored_in_the_dtypes_that_it_was_trained_in(
    tmp_path: Path,
) -> None:
    model = "model: {name: llama2_7b, arguments: {num_layers: 1}}\n"
    (tmp_path / "run.yaml").write_text(f"{model}data: {{name: text, seq_length: 8, batch_size: 2}}")
    plan = Run.from_file(tmp_path / "run.yaml").plan(2)
    assert plan.compute_dtype == "bfloat16"
    assert plan.graph is not None
    assert {each.stored_dtype for each in plan.graph.parameters} == {torch.float32}
