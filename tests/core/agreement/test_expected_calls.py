"""Of two ranks that call differently, at least one makes a call that it does not expect."""

from __future__ import annotations

import random

import pytest

from shardwright.core.agreement.expected_calls import CONTEXTS, ExpectedCalls

STEP = ["forward", "backward"]


@pytest.mark.parametrize("seed", range(20))
def test_different_calls_of_ranks_with_equal_calls_before_are_never_both_expected(
    seed: int,
) -> None:
    draw = random.Random(seed)
    kinds = ["forward", "backward", "clip", "save"][: draw.randint(2, 4)]
    pattern = [draw.choice(kinds) for _ in range(draw.randint(1, 12))]
    calls = [draw.choice(pattern) if draw.random() < 0.1 else k for k in 20 * pattern]
    ranks = ExpectedCalls(), ExpectedCalls()
    for call in calls:
        assert ranks[0].begin(call) == ranks[1].begin(call)
        other = draw.choice([kind for kind in kinds if kind != call])
        # What each would do next, which is not done.
        both = ranks[0].begin(call), ranks[1].begin(other)
        assert both.count(True) < 2
        ranks[0].undo()
        ranks[1].undo()


def test_a_loop_is_expected_once_its_pattern_has_been_seen() -> None:
    calls = ExpectedCalls()
    epoch = 30 * STEP + 5 * ["evaluation"] + ["save"]
    unexpected = [[calls.begin(call) for call in epoch].count(False) for _ in range(4)]
    # Training ends and begins in one context: eight steps of training.
    assert unexpected[2:] == [2, 2]


def test_a_call_that_was_refused_leaves_no_trace() -> None:
    refused, other = ExpectedCalls(), ExpectedCalls()
    for calls in (refused, other):
        for call in max(CONTEXTS) * STEP:
            calls.begin(call)
    assert not refused.begin("save")
    refused.undo()
    assert vars(refused)["_next"] == vars(other)["_next"]
    assert refused.begin("forward") and other.begin("forward")
