"""Modes, their checks, and what they exclude."""

from __future__ import annotations

from typing import Any

import pytest

from mindformers.files import run_of
from shardwright.core.partition.decisions import OptimizerParallel


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"use_parallel": False}, "stand_alone"),
        ({"parallel__parallel_mode": 0}, "data_parallel"),
        ({"parallel__parallel_mode": None}, "data_parallel"),
        ({"parallel__parallel_mode": 1}, "semi_auto"),
        ({"parallel__parallel_mode": "semi_auto_parallel"}, "semi_auto"),
        ({"parallel__search_mode": "recursive_programming"}, "recursive_programming"),
        ({"parallel__search_mode": "sharding_propagation"}, "sharding_propagation"),
        ({"parallel__search_mode": "dynamic_programming"}, "recursive_programming"),
        ({"parallel__auto_parallel_search_mode": "sharding_propagation"}, "sharding_propagation"),
    ],
)
def test_the_mode_is_that_of_the_numbers_and_the_search(changes: Any, mode: str) -> None:
    assert run_of(**changes).parallelism.mode == mode


def test_a_search_takes_any_number_of_devices_that_its_stages_divide() -> None:
    run_of(parallel_config__pipeline_stage=2, parallel_config__micro_batch_num=2).check_devices(6)
    chosen = run_of(
        parallel__auto_pipeline=True,
        parallel_config__pipeline_stage=2,
        parallel_config__micro_batch_num=2,
    )
    chosen.check_devices(7)


def test_stages_are_bounded_by_micro_batches_alone() -> None:
    found = run_of(
        parallel__auto_pipeline=True,
        parallel_config__pipeline_stage=2,
        parallel_config__micro_batch_num=3,
    )
    assert found.parallelism.max_stages == 3


def test_what_a_mode_excludes_is_set_right_and_noted() -> None:
    run = run_of(parallel__parallel_mode=0)
    assert not run.parallelism.full_batch
    assert run.parallelism.model_parallel == 1
    assert "full_batch is False, not True: the mode is data_parallel" in run.notes
    searched = run_of(parallel_config__vocab_emb_dp=True)
    assert not searched.parallelism.vocab_emb_dp
    assert "vocab_emb_dp is False: the mode is recursive_programming" in searched.notes
    assert run_of(parallel__parallel_mode=1).parallelism.vocab_emb_dp


@pytest.mark.parametrize(
    ("config", "sharding"),
    [
        ({}, OptimizerParallel("level1", -1, 64)),
        ({"parallel_optimizer_threshold": 0}, OptimizerParallel("level1", -1, 0)),
        ({"gradient_accumulation_shard": True}, OptimizerParallel("level2", -1, 64)),
        ({"optimizer_weight_shard_size": 2}, OptimizerParallel("level1", 2, 64)),
        ({"optimizer_weight_shard_size": 3}, OptimizerParallel("level1", 3, 64)),
    ],
)
def test_parameters_are_stored_sharded_where_the_optimizer_is(
    config: Any, sharding: OptimizerParallel
) -> None:
    changes: Any = {"parallel__parallel_optimizer_config": config}
    assert run_of(**changes).parallelism.sharding is None
    changes["parallel__enable_parallel_optimizer"] = True
    assert run_of(**changes).parallelism.sharding == sharding


def test_mem_coeff_is_any_positive_number_or_auto() -> None:
    given = (0.01, "0.1", 1024, "auto", None)
    found = [run_of(parallel_config__mem_coeff=m).parallelism.mem_coeff for m in given]
    assert found == [0.01, 0.1, 1024, "auto", 0.1]


def test_a_number_of_shards_that_does_not_divide_the_replicas_has_no_effect() -> None:
    run = run_of(
        parallel__parallel_mode=1,
        parallel__enable_parallel_optimizer=True,
        parallel__parallel_optimizer_config={"optimizer_weight_shard_size": 3},
    )
    assert run.parallelism.sharding == OptimizerParallel("level1", -1, 64)
    note = "optimizer_weight_shard_size 3 has no effect: it does not divide data_parallel 4"
    assert note in run.notes
