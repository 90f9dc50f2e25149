"""Which ranks can never meet, from what each is doing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.agreement.rank_states import (
    REMEDY,
    RankState,
    difference_of_calls,
    exited_too_early,
    store_has_ended,
)

TRAINED = ("training forward pass 1", "backward pass 1")


def state(rank: int, *calls: str, inside: bool = True, waits_in: str = "") -> RankState:
    return RankState(rank, len(calls), calls, inside, waits_in, "train.py, line 7")


def test_ranks_in_different_calls_are_named_with_their_lines() -> None:
    states = [state(0, *TRAINED, "evaluation forward pass 1")]
    states += [state(rank, *TRAINED, "training forward pass 2") for rank in (1, 2, 3, 5)]
    assert difference_of_calls(states) == (
        "the ranks wait for each other: rank 0 in evaluation forward pass 1 (train.py, line 7),"
        f" ranks 1-3, 5 in training forward pass 2 (train.py, line 7)\n{REMEDY}"
    )


def test_a_call_that_one_rank_begins_again_is_named() -> None:
    inside = state(0, *TRAINED, "training forward pass 2")
    again = replace(inside, rank=1, is_retry=True)
    assert not difference_of_calls([again, replace(again, rank=0)])
    assert "rank 1 in training forward pass 2 (train.py, line 7), after one that was refused" in (
        difference_of_calls([inside, again])
    )


def test_a_store_that_has_ended_is_named() -> None:
    waiting = state(1, *TRAINED, "train_step 1")
    assert "rank 1 waits in train_step 1 (train.py, line 7)" in store_has_ended(waiting)


def test_calls_that_differ_before_calls_of_one_name_are_named() -> None:
    error = difference_of_calls(
        [
            state(0, *TRAINED, "training forward pass 2"),
            state(1, TRAINED[0], "training forward pass 2"),
        ]
    )
    assert error == (
        "the ranks wait for each other: ranks 0-1 in training forward pass 2 (train.py, line 7),"
        f" but rank 0 made backward pass 1 where rank 1 made training forward pass 2\n{REMEDY}"
    )


def test_a_call_that_others_left_out_is_found_when_they_make_the_next() -> None:
    behind = state(1, *TRAINED, "train_step 1")
    assert difference_of_calls([state(0, *TRAINED, "whole 1", "train_step 1"), behind])


@pytest.mark.parametrize(
    "other",
    [
        state(1, *TRAINED, inside=False),
        state(1, *TRAINED, "train_step 1"),
        state(1, *TRAINED, "train_step 1", "train_step 2"),
        state(1, *TRAINED, "train_step 1", inside=False, waits_in="barrier"),
    ],
    ids=["behind", "beside", "ahead", "ahead in a barrier"],
)
def test_ranks_that_may_only_be_slow_are_not_named(other: RankState) -> None:
    assert not difference_of_calls([state(0, *TRAINED, "train_step 1"), other])


def test_a_barrier_before_a_call_that_another_rank_makes_is_named() -> None:
    waiting = state(1, *TRAINED, inside=False, waits_in="barrier")
    said = difference_of_calls([state(0, *TRAINED, "whole 1"), waiting])
    assert "rank 1 in `barrier` (train.py, line 7)" in said


def test_calls_that_are_forgotten_are_not_compared() -> None:
    long = RankState(0, 1000, ("train_step 999", "train_step 1000"), True)
    assert not difference_of_calls([long, state(1, *TRAINED)])
    assert difference_of_calls([long, RankState(1, 1000, ("train_step 999", "whole 1"), True)])


def test_the_rank_that_ended_first_is_named_with_its_exception() -> None:
    waiting = state(0, *TRAINED, "train_step 1")
    first = RankState(2, 1, TRAINED[:1], False, exception="OSError: record 17")
    other = RankState(1, 2, TRAINED, False, exception="KeyError: 1")
    assert exited_too_early(waiting, [other, first]).startswith(
        "rank 2 ended after training forward pass 1 with OSError: record 17, but rank 0 waits in"
        " train_step 1 (train.py, line 7)"
    )


def test_a_rank_that_ended_after_the_call_is_not_named() -> None:
    calls = (*TRAINED, "train_step 1")
    assert not exited_too_early(state(0, *calls), [RankState(1, 3, calls, False)])


def test_a_state_is_read_as_it_is_written() -> None:
    written = state(3, *TRAINED, waits_in="all_reduce")
    assert RankState.from_json(written.to_json()) == written
