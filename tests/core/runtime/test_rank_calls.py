"""Ranks that wait for each other in different calls are named on all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrun import torchrun

SCRIPT = Path(__file__).with_name("lone_ranks.py")

NAMED = {
    "evaluates": "rank 0 in evaluation forward pass 1 .*, ranks 1-2 in",
    "evaluates_during_a_backward_pass": (
        r"rank 0 in evaluation forward pass 1 \(lone_ranks.py, line \d+\), ranks 1-2 in backward "
        r"pass 4 \(lone_ranks.py, line \d+\)"
    ),
    "evaluates_before_a_barrier": "rank 0 in evaluation forward pass 1 .*, ranks 1-2 in `barrier`",
    "makes_its_first_call_before_a_barrier": (
        "rank 0 in training forward pass 1 .*, ranks 1-2 in `barrier`"
    ),
    "saves_before_a_barrier": "rank 0 in save_checkpoint 1 .*, ranks 1-2 in `barrier`",
    "saves_a_state_dict": "rank 0 in save_state_dict 1 .*, ranks 1-2 in train_step 1",
    "gathers": "rank 0 in whole 1 .*, ranks 1-2 in backward pass 4",
    "leaves_out_a_backward_pass": "rank 0 in train_step 1 .*, ranks 1-2 in backward pass 4",
}


@pytest.mark.distributed
@pytest.mark.parametrize("case", NAMED)
def test_a_rank_that_calls_alone_is_named_on_all_ranks(case: str, tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 3, case, str(tmp_path))
    for rank in range(3):
        said = re.search(rf"rank {rank} raised (\w+) in (\d+) s: (.*)", printed)
        assert said and said[1] in ("DataError", "RuntimeError") and int(said[2]) < 30, printed
        assert said[1] == "DataError" or "barrier" in case, printed
    assert re.search(f"the ranks wait for each other: {NAMED[case]}", printed), printed


@pytest.mark.distributed
def test_a_rank_whose_others_make_no_call_waits_no_longer_than_the_time_out(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 3, "outlasts_the_others", str(tmp_path))
    assert re.search(r"rank 0 raised DataError in 1\d s: rank 0 has waited 10 s for", printed), (
        printed
    )


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["is_slow", "is_refused_alone"])
def test_a_rank_that_is_slow_or_refused_by_itself_goes_on(case: str, tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 3, case, str(tmp_path))
    assert all(f"rank {rank} passed" in printed for rank in range(3)), printed
