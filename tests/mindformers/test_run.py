"""Whole files of the MindFormers shape."""

from __future__ import annotations

from mindformers.files import run_of, small
from shardwright.mindformers.config_format import recognizes


def test_a_file_is_known_by_its_sections() -> None:
    assert recognizes(small())
    assert not recognizes({"model": {"target": "network:Network"}})
    assert not recognizes(None)


def test_keys_that_mean_nothing_are_listed_and_no_error() -> None:
    run = run_of(profile=True, runner_config__sink_mode=True, context__mode=0, processor={"a": 1})
    assert run.unused == ("runner_config.sink_mode", "profile", "context.mode", "processor")
    assert run_of().unused == ()


def test_a_misspelt_key_is_listed_with_what_is_meant() -> None:
    run = run_of(parallel_config__micro_batch_nums=8)
    assert run.unused == ("parallel_config.micro_batch_nums (did you mean micro_batch_num?)",)


def test_memory_data_and_strategy_file_are_read() -> None:
    run = run_of(
        context__max_device_memory="58GB",
        train_dataset__data_loader__dataset_dir="texts",
        parallel__strategy_ckpt_save_file="./strategy.ckpt",
    )
    assert run.memory_limit == 58 * 2**30
    assert (run.dataset, run.strategy_file) == ("texts", "./strategy.ckpt")
