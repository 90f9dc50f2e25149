"""Experts that are drawn for traces."""

import pytest
import torch

from shardwright.core.capture.expert_conditions import (
    Condition,
    DrawnNumber,
    balance_experts,
    count_tokens,
    draw_scores,
    prefer_expert,
    prefer_first_experts,
    prefer_last_experts,
    shuffle_experts,
    skew_experts,
)
from shardwright.core.capture.known_values import RecordedCall


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(24, 4, 2), (9, 8, 1), (12, 6, 5)])
def test_a_preference_orders_all_experts_for_each_token(
    tokens: int, experts: int, top_k: int
) -> None:
    for preference in (balance_experts, skew_experts, prefer_first_experts, prefer_last_experts):
        order = preference(tokens, experts, top_k)
        assert torch.equal(order.sort(1).values, torch.arange(experts).expand(tokens, experts))
    chosen = skew_experts(tokens, experts, top_k)[:, :top_k]
    assert len(chosen.unique()) == experts


def test_tokens_choose_what_they_prefer() -> None:
    for preference in (balance_experts, skew_experts):
        scores = draw_scores(preference, (3, 5, 8), 1, 2, ascending=False)
        expected = preference(24, 5, 2)[:, :2].view(3, 8, 2).transpose(1, 2)
        assert torch.equal(scores.topk(2, 1).indices, expected)
        smallest = draw_scores(preference, (3, 5, 8), 1, 2, ascending=True)
        assert torch.equal(smallest.topk(2, 1, largest=False).indices, expected)


def test_half_of_the_experts_have_one_token_if_skewed() -> None:
    numbers = torch.bincount(skew_experts(24, 4, 2)[:, :2].flatten())
    assert numbers.tolist()[:2] == [1, 1]
    assert numbers.min() == 1


def test_draws_for_conditions_give_an_expert_any_number_of_tokens() -> None:
    for count in (0, 5, 24):
        assert int((count_tokens(count, 24, 4, 2)[:, :1] == 0).sum()) == count
    assert (prefer_expert(2, 24, 4, 1)[:, 0] == 2).all()
    assert (shuffle_experts(1, 24, 4, 2)[:, :2] < 2).all()


def test_too_few_tokens_for_all_experts_are_an_error() -> None:
    for preference in (balance_experts, skew_experts):
        with pytest.raises(ValueError, match=r"too few tokens \(2\) for 8 experts"):
            preference(2, 8, 1)


def test_a_drawn_number_records_its_comparisons() -> None:
    conditions: list[Condition] = []
    number = DrawnNumber(3, RecordedCall(int, ((3,), {})), conditions)
    assert number
    assert number == 3
    assert number > 2
    assert not number < 3
    assert len(conditions) == 4
    assert number + 1 == 4
    assert conditions[4].call is None
    assert {number: 1}[3] == 1
