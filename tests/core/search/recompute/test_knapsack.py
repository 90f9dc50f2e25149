"""The cheapest choices that free enough, against trying all."""

from __future__ import annotations

import random
from itertools import product

import pytest

from random_cases import random_cases
from shardwright.core.search.recompute import knapsack
from shardwright.core.search.recompute.knapsack import KnapsackItem, cheapest


def random_blocks(seed: int) -> list[list[KnapsackItem]]:
    draw = random.Random(seed)
    return [
        [
            KnapsackItem(draw.randrange(1, 20), draw.randrange(1, 30))
            for _ in range(draw.randrange(4))
        ]
        for _ in range(draw.randrange(1, 6))
    ]


def total(blocks: list[list[KnapsackItem]], chosen: list[int]) -> tuple[int, float]:
    taken = [block[index] for block, index in zip(blocks, chosen, strict=True) if index >= 0]
    return sum(option.freed for option in taken), sum(option.cost for option in taken)


@random_cases(40)
def test_the_choice_is_the_cheapest_of_all_that_free_enough(seed: int) -> None:
    blocks = random_blocks(seed)
    needed = random.Random(seed).randrange(1, 40)
    every = [total(blocks, list(c)) for c in product(*(range(-1, len(b)) for b in blocks))]
    best = min((cost for freed, cost in every if freed >= needed), default=None)
    chosen = cheapest(blocks, needed)
    if best is None:
        assert chosen is None
    else:
        assert chosen is not None
        freed, cost = total(blocks, chosen)
        assert freed >= needed and cost == best


def test_eighty_equal_blocks_are_chosen_exactly() -> None:
    blocks = [[KnapsackItem(4, 7.0), KnapsackItem(21, 16.0), KnapsackItem(37, 36.0)]] * 80
    chosen = cheapest(blocks, 2000)
    assert chosen is not None
    freed, cost = total(blocks, chosen)
    assert freed >= 2000 and cost == 1680.0, "60 of 21 and 20 of 37: no other mix is cheaper"


def test_with_too_many_sums_choices_free_enough_and_none_is_needless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knapsack, "MAX_STATES", 3)
    for seed in range(40):
        blocks = random_blocks(seed)
        needed = random.Random(seed).randrange(1, 40)
        chosen = cheapest(blocks, needed)
        if chosen is None:
            assert sum(max((o.freed for o in block), default=0) for block in blocks) < needed
            continue
        freed, _ = total(blocks, chosen)
        assert freed >= needed
        spare = [blocks[n][index].freed for n, index in enumerate(chosen) if index >= 0]
        assert all(freed - size < needed for size in spare)
