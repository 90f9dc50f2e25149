"""`recompute_config`: which blocks are recomputed, and which of their operators."""

from __future__ import annotations

from typing import Any

import pytest

from mindformers.files import run_of
from shardwright.errors import ConfigError
from shardwright.mindformers import translate_run
from shardwright.mindformers.recomputation import Recomputation, leading_blocks

STAGES = {"data_parallel": 4, "pipeline_stage": 2, "micro_batch_num": 2}
INTERLEAVED = {
    "parallel__parallel_mode": 1,
    "parallel__pipeline_config": {"pipeline_interleave": True},
    "parallel_config": STAGES,
    "model__model_config__num_layers": 8,
    "model__model_config__pp_interleave_num": 2,
}


def test_recomputation_is_as_said() -> None:
    assert run_of().training.recompute == Recomputation()
    section = {
        "recompute": True,
        "select_recompute": True,
        "mp_comm_recompute": False,
        "parallel_optimizer_comm_recompute": True,
    }
    found = run_of(recompute_config=section).training.recompute
    assert found == Recomputation(True, True, communication=False, gathers=True)


def recompute_section(select: Any, full: Any = False) -> Any:
    run = run_of(
        parallel__parallel_mode=1,
        parallel_config=STAGES,
        recompute_config={"recompute": full, "select_recompute": select},
    )
    section = translate_run(run, devices=8).parallel.recompute
    assert section is not None
    return section


def test_a_pattern_has_numbers_of_blocks_for_each_stage() -> None:
    patterns = {
        r"feed_forward\.mul": [1, 2],
        r"feed_forward\.w1\.activation\.silu": [0, 1],
        r"feed_forward\.w1\.reshape": [2, 2],
    }
    section = recompute_section(patterns, full=[0, 1])
    # Views save nothing; block 2 is recomputed fully.
    assert section.operators == {"mul": [0, 3], "silu": []}
    assert (section.blocks, section.whole_blocks) == (None, [2])


def test_a_list_of_patterns_stands_for_all_blocks() -> None:
    section = recompute_section([r"feed_forward\.w[13].*\.activation\.silu", r".*norm\.norm"])
    assert section.operators == {"silu": [0, 1, 2, 3], "rms_norm": [0, 1, 2, 3]}


def test_a_pattern_that_matches_nothing_has_a_note() -> None:
    run = run_of(recompute_config={"select_recompute": {r"feed_forward\.gate": True}})
    assert "select_recompute.feed_forward\\.gate has no effect" in run.notes[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({r"feed_forward\.mul": [1]}, r"mul: \[1\] does not fit 2 stages"),
        ({"[": True}, "is not a regular expression"),
        (
            {r"feed_forward\.mul": [1, 0], r"attention\.mul": [0, 1]},
            "another pattern of mul have different blocks",
        ),
        ([[1, 1], [1, 1]], "does not fit 2 stages"),
    ],
)
def test_patterns_and_numbers_that_contradict_each_other_are_errors(
    value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recompute_section(value)


def test_numbers_of_a_stage_are_divided_among_its_chunks() -> None:
    # Stages 0 and 1 have the chunks 0, 2 and 1, 3 with the blocks 0-1, 4-6 and 2-3, 7.
    assert leading_blocks((2, 2, 3, 1), 2, (3, 4)) == [0, 1, 2, 3, 4, 7]
    assert leading_blocks((2, 2, 3, 1), 2, (0, 1, 2, 0)) == [2, 4, 5]
    assert leading_blocks((2, 2), 2, True) == [0, 1, 2, 3]


def test_lists_of_lists_are_numbers_of_blocks_of_chunks() -> None:
    run = run_of(**INTERLEAVED, recompute_config={"recompute": [[2, 1], [0, 9]]})
    section = translate_run(run, devices=8).parallel.recompute
    assert section is not None and section.blocks == [0, 1, 2, 6, 7]
