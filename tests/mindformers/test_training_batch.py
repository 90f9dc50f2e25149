"""The rule of four rows for the global batch."""

from __future__ import annotations

import pytest

from mindformers.files import run_of


@pytest.mark.parametrize(
    ("stages", "full_batch", "size"),
    [
        (1, False, 2 * 16 * 3 * 5),
        (1, True, 2 * 4 * 3 * 5),
        (2, False, 2 * 16 * 3 * 7),
        (2, True, 2 * 4 * 3 * 7),
    ],
)
def test_the_global_batch_follows_the_four_rows(stages: int, full_batch: bool, size: int) -> None:
    batch = run_of(
        parallel__full_batch=full_batch,
        parallel_config__pipeline_stage=stages,
        parallel_config__micro_batch_num=7,
        runner_config__gradient_accumulation_steps=5,
        micro_batch_interleave_num=3,
    ).batch
    assert batch.global_batch(devices=16) == size
    assert batch.micro_batches() == (21 if stages > 1 else 15)


def test_the_formula_is_said_with_its_numbers() -> None:
    batch = run_of(parallel_config__pipeline_stage=2, parallel_config__micro_batch_num=8).batch
    assert batch.formula(16) == (
        "global batch 64 = batch_size 2 · data_parallel 4 · micro_batch_interleave_num 1 ·"
        " micro_batch_num 8"
    )


def test_where_no_search_decides_all_devices_count_and_nothing_is_interleaved() -> None:
    run = run_of(
        parallel__parallel_mode=0,
        parallel_config__pipeline_stage=2,
        parallel_config__micro_batch_num=8,
        runner_config__gradient_accumulation_steps=5,
        micro_batch_interleave_num=3,
    )
    assert run.batch.global_batch(devices=16) == 2 * 16 * 5
    assert "micro_batch_interleave_num is 1: the mode is data_parallel" in run.notes


def test_the_runner_overrides_the_dataset_and_says_so() -> None:
    run = run_of(train_dataset__batch_size=6)
    assert run.batch.size == 2
    assert "runner_config.batch_size 2 overrides train_dataset.batch_size 6" in run.notes
    assert run_of(runner_config__batch_size=None, train_dataset__batch_size=6).batch.size == 6


def test_accumulation_has_no_effect_with_stages_and_that_is_noted() -> None:
    run = run_of(
        parallel_config__pipeline_stage=2,
        parallel_config__micro_batch_num=2,
        runner_config__gradient_accumulation_steps=5,
    )
    assert any("gradient_accumulation_steps has no effect" in note for note in run.notes)
