"""Which samples each rank feeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.plan import Plan
from shardwright.errors import DataError
from shardwright.run import BatchSampler, local_batch

X, Y = torch.arange(96.0).view(12, 8), torch.arange(12) % 4
NET = sw.WithLoss(nn.Linear(8, 4), nn.CrossEntropyLoss())
WHOLE = replace(sw.plan(NET, (X, Y), devices=4), mesh=prime_mesh(4))
CUT = replace(WHOLE, arrivals={"x": ((0, 1), ()), "y": ((0, 1),)})
HALVES = replace(WHOLE, arrivals={"x": ((1,), ()), "y": ((1,),)})


def epoch(plan: Plan, rank: int, **options: object) -> list[list[int]]:
    return list(BatchSampler(30, plan, rank, 12, **options))  # type: ignore[arg-type]


def test_every_rank_is_given_the_whole_batch_where_it_arrives_whole() -> None:
    batches = epoch(WHOLE, 0)
    assert epoch(WHOLE, 3) == batches
    assert [len(batch) for batch in batches] == [12, 12]
    assert len({row for batch in batches for row in batch}) == 24


def test_the_parts_of_all_ranks_are_the_whole_batch_in_order() -> None:
    parts = [epoch(CUT, rank) for rank in range(4)]
    joined = [[row for part in parts for row in part[number]] for number in range(2)]
    assert joined == epoch(WHOLE, 0)


def test_ranks_that_hold_the_same_block_are_given_the_same_samples() -> None:
    assert epoch(HALVES, 0) == epoch(HALVES, 2) != epoch(HALVES, 1) == epoch(HALVES, 3)


def test_ranks_of_other_stages_follow_their_place() -> None:
    assert epoch(CUT, 4 + 1) == epoch(CUT, 1)


def test_every_epoch_has_an_order_of_its_own() -> None:
    sampler = BatchSampler(24, WHOLE, 0, 12)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_an_epoch_goes_on_from_any_sample() -> None:
    sampler = BatchSampler(30, WHOLE, 0, 6)
    order = [row for batch in sampler for row in batch]
    sampler = BatchSampler(30, WHOLE, 0, 8)
    sampler.set_epoch(0, sample=12)
    assert len(sampler) == 2
    assert list(sampler) == [order[12:20], order[20:28]]
    with pytest.raises(DataError, match=r"the last batch has 2 samples, but .* into 4 shards"):
        BatchSampler(32, CUT, 0, 8, drop_last=False).set_epoch(0, sample=14)


def test_an_uneven_last_batch_is_kept_if_asked_and_if_it_can_be_cut() -> None:
    assert [len(batch) for batch in epoch(WHOLE, 0, drop_last=False)] == [12, 12, 6]
    assert [len(batch) for batch in epoch(HALVES, 0, drop_last=False)] == [6, 6, 3]
    with pytest.raises(DataError, match=r"the last batch has 6 samples, but .* into 4 shards"):
        epoch(CUT, 0, drop_last=False)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(
        DataError,
        match="a batch has 10 samples, but dataset_strategy divides a batch into 4 shards",
    ):
        BatchSampler(30, CUT, 0, 10)
    with pytest.raises(DataError, match="use a batch_size of at most 30"):
        BatchSampler(30, CUT, 0, 40)


def test_inputs_that_arrive_cut_differently_have_no_common_list_of_samples() -> None:
    mixed = replace(WHOLE, arrivals={"x": ((0,), ())})
    with pytest.raises(DataError, match=r"shards the inputs .* differently along the batch"):
        epoch(mixed, 0)
    x, y = local_batch(mixed, 2, (X, Y))
    assert torch.equal(x, X[6:]) and torch.equal(y, Y)


def test_a_whole_batch_is_cut_as_the_inputs_arrive() -> None:
    parts = [local_batch(CUT, rank, (X, Y)) for rank in range(4)]
    assert torch.equal(torch.cat([x for x, _ in parts]), X)
    assert torch.equal(torch.cat([y for _, y in parts]), Y)
    with pytest.raises(DataError, match="the batch has 1 tensors, but the model has 2 inputs"):
        local_batch(CUT, 0, (X,))
