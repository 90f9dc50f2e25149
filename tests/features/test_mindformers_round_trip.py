"""Strategies that one run's file saves are read back by another's, and give the same plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindformers.files import small
from shardwright.core.plan import Plan
from shardwright.run.config import Run

SEMI = {"parallel__parallel_mode": 1, "parallel_config__data_parallel": 2}
STAGES = {"parallel_config__pipeline_stage": 2, "parallel_config__micro_batch_num": 4}


def planned(file: Path, text: str, devices: int = 8) -> Plan:
    """The plan of a file, whose strategies are saved where it says."""
    file.write_text(text)
    run = Run.from_file(file).for_devices(devices)
    plan = run.plan(devices)
    run.save_strategies(plan)
    return plan


def check_same(first: Plan, second: Plan) -> None:
    assert first.cuts == second.cuts
    assert first.storage == second.storage
    assert first.pipeline.chunk_of == second.pipeline.chunk_of
    assert (first.forward_bytes, first.backward_bytes) == (
        second.forward_bytes,
        second.backward_bytes,
    )
    assert first.memory.peak == second.memory.peak


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_config__mem_coeff": 64, "parallel__enable_parallel_optimizer": True},
        {**STAGES, "model__model_config__pet_config": {"pet_type": "lora", "lora_rank": 4}},
        {**SEMI, **STAGES, "parallel_config__use_seq_parallel": True},
        {**SEMI, "parallel_config__context_parallel": 2, "model__arch__type": "QwenForCausalLM"},
        {"context__max_device_memory": "3MB", "model__arch__type": "Baichuan13BV2ForCausalLM"},
    ],
    ids=["searched", "stages and adapters", "an expert's stages", "context", "fitted"],
)
def test_a_plan_comes_back_from_the_strategies_that_it_saved(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    saves = small(parallel__strategy_ckpt_save_file="strategy.ckpt", **changes)
    loads = small(parallel__strategy_ckpt_load_file="strategy.ckpt", **changes)
    first = planned(tmp_path / "saves.yaml", json.dumps(saves))
    assert first.cuts
    check_same(first, planned(tmp_path / "loads.yaml", json.dumps(loads)))


@pytest.mark.parametrize("mode", ["recursive_programming", "semi_auto"])
def test_a_plan_of_the_own_shape_comes_back(mode: str, tmp_path: Path) -> None:
    text = (
        "model: {name: llama2_7b_tiny}\ndata: {name: text, seq_length: 32, batch_size: 8}\n"
        "parallel: {mem_coeff: 16, "
    )
    first = planned(tmp_path / "saves.yaml", f"{text}save_strategies: cuts.json}}")
    again = f"{text}strategies: cuts.json, mode: {mode}}}"
    check_same(first, planned(tmp_path / "loads.yaml", again))
