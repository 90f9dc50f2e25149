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
    "evaluates_before_a_barrier": (
        "rank 0 in evaluation forward pass 1 .*, ranks 1-2 in `barrier` 1 "
    ),
    "makes_its_first_call_before_a_barrier": (
        "rank 0 in training forward pass 1 .*, ranks 1-2 in `barrier`"
    ),
    "parallelizes_before_a_barrier": (
        r"rank 0 in parallelize 1 \(lone_ranks.py, line \d+\), ranks 1-2 in `barrier` "
    ),
    "saves_before_a_barrier": "rank 0 in save_checkpoint 1 .*, ranks 1-2 in `barrier`",
    "saves_a_state_dict": "rank 0 in save_state_dict 1 .*, ranks 1-2 in train_step 1",
    "gathers": "rank 0 in whole 1 .*, ranks 1-2 in backward pass 4",
    "calls_another_model": (
        "rank 0 in model 2's training forward pass 1 .*, ranks 1-2 in training forward pass 4"
    ),
    "clips": "rank 0 in clip_grad_norm_ 1 .*, ranks 1-2 in training forward pass 4",
    "prints_a_norm": "rank 0 in DTensor redistribution 1 .*, ranks 1-2 in training forward pass 4",
    "reduces_a_number": "rank 0 in `all_reduce` 1 .*, ranks 1-2 in training forward pass 4",
    "reduces_a_number_in_a_group_of_its_own": (
        "rank 0 in `all_reduce` 1 .*, ranks 1-2 in training forward pass 4"
    ),
    "leaves_out_a_backward_pass": "rank 0 in train_step 1 .*, ranks 1-2 in backward pass 4",
}

ENDED = {
    "parallelizes_when_the_others_have_ended": (
        "ranks? .* ended before its first call, but rank 0 waits in parallelize 1"
    ),
    "ends": (
        "rank 0 ended after backward pass 3 with OSError: record 17 is damaged, but rank [12] waits"
        r" in training forward pass 4 \(lone_ranks.py, line \d+\) / see the log of that rank"
    ),
    "ends_before_a_checkpoint": (
        "rank 0 ended after backward pass 3, but rank [12] waits in save_checkpoint 1 .* / make the"
        " same calls on all ranks"
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize("case", NAMED)
def test_a_rank_that_calls_alone_is_named_on_all_ranks(case: str, tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 3, case, str(tmp_path))
    for rank in range(3):
        said = re.search(rf"rank {rank} raised (\w+) in (\d+) s: (.*)", printed)
        assert said and said[1] == "DataError" and int(said[2]) < 30, printed
    assert re.search(f"the ranks wait for each other: {NAMED[case]}", printed), printed


@pytest.mark.distributed
@pytest.mark.parametrize("case", ENDED)
def test_a_rank_that_has_ended_is_named_on_those_that_wait_for_it(
    case: str, tmp_path: Path
) -> None:
    printed = torchrun(SCRIPT, 3, case, str(tmp_path))
    for rank in (0,) if case.startswith("parallelizes") else (1, 2):
        said = re.search(rf"rank {rank} raised CommunicationError in (\d+) s: (.*)", printed)
        assert said and int(said[1]) < 20 and re.match(ENDED[case], said[2]), printed


@pytest.mark.distributed
def test_calls_of_two_threads_at_once_are_named_on_all_ranks(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 3, "evaluates_in_a_thread", str(tmp_path))
    for rank in range(3):
        said = re.search(rf"rank {rank} raised DataError in (\d+) s: (.*)", printed)
        assert said and int(said[1]) < 30, printed
        assert re.match(
            "two threads of a rank make collective calls at once: rank 0 is in evaluation forward "
            r"pass 1 \(lone_ranks.py, line \d+\), and thread 'MainThread' begins train_step",
            said[2],
        ), printed


@pytest.mark.distributed
def test_a_rank_whose_others_make_no_call_waits_no_longer_than_the_time_out(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 3, "outlasts_the_others", str(tmp_path))
    assert re.search(
        r"rank 0 raised CommunicationError in [5-9] s: rank 0 has waited 5 s for", printed
    ), printed


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        "is_slow",
        "is_refused_alone",
        "is_waited_for_in_an_asynchronous_collective",
        "calls_in_turn_in_threads",
    ],
)
def test_a_rank_that_is_slow_or_refused_by_itself_goes_on(case: str, tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, 3, case, str(tmp_path))
    assert all(f"rank {rank} passed" in printed for rank in range(3)), printed
