"""Datasets, read by each rank as planned, from any position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import shardwright as sw
from shardwright.core.checkpoint.dataloader import PlannedLoader
from shardwright.core.checkpoint.sampler import BatchSampler
from shardwright.errors import DataError

SIZED = type("Sized", (), {"__len__": lambda self: 8})()
SAMPLES = TensorDataset(torch.arange(20).float().view(20, 1), torch.arange(20))


def plan(strategy: str = "full_batch", devices: int = 1) -> sw.Plan:
    net = sw.WithLoss(nn.Linear(1, 20), nn.CrossEntropyLoss())
    batch = (torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))
    return sw.plan(net, batch, devices=devices, dataset_strategy=strategy)


def numbers(loader: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    loader = sw.dataloader(SAMPLES, 4, plan())
    first, second = numbers(loader), numbers(loader)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(20))
    assert first != second
    assert numbers(sw.dataloader(SAMPLES, 4, plan(), shuffle=False))[1] == [4, 5, 6, 7]


def test_a_rank_reads_only_its_part() -> None:
    read: list[int] = []

    class Counted(Dataset[Tensor]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Tensor:
            read.append(index)
            return torch.tensor(index)

    parts, split = [], plan("data_parallel", 2)
    for rank in range(2):
        read.clear()
        for _ in PlannedLoader(Counted(), BatchSampler(20, split, rank, 4), {}):
            pass
        parts.append(list(read))
    assert [len(part) for part in parts] == [10, 10]
    assert sorted(parts[0] + parts[1]) == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_is_gone_on_from_with_another_size_of_batch(workers: int) -> None:
    whole = sw.dataloader(SAMPLES, 4, plan(), seed=3, num_workers=workers)
    wanted = [flat(numbers(whole)), flat(numbers(whole))]
    loader = sw.dataloader(SAMPLES, 4, plan(), seed=3, num_workers=workers)
    numbers(loader)
    batches = iter(loader)
    taken = flat([next(batches)[1].tolist() for _ in range(2)])
    resumed = sw.dataloader(SAMPLES, 6, plan(), seed=3)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == 2
    assert taken + flat(numbers(resumed)) == wanted[1]
    assert flat(numbers(resumed)) != wanted[0]


def test_a_position_after_the_last_batch_is_the_beginning_of_the_next_epoch() -> None:
    loader = sw.dataloader(SAMPLES, 4, plan())
    for _ in loader:
        state = loader.state_dict()
    resumed = sw.dataloader(SAMPLES, 4, plan())
    resumed.load_state_dict(state)
    assert numbers(resumed) == []
    assert numbers(resumed) == numbers(loader)


def test_a_position_in_another_order_is_refused() -> None:
    state = sw.dataloader(SAMPLES, 4, plan(), seed=1).state_dict()
    with pytest.raises(DataError, match="'seed' was 1 when it was saved, but is 2"):
        sw.dataloader(SAMPLES, 4, plan(), seed=2).load_state_dict(state)


def test_ragged_batches_datasets_without_a_length_and_other_samplers_are_refused() -> None:
    ragged: Any = [torch.ones(1 + n) for n in range(8)]
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"samples of a batch differ in shape .*\n.*collate_fn"):
            list(sw.dataloader(ragged, 4, plan(), num_workers=workers))

    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(())

    with pytest.raises(DataError, match="Endless has no length"):
        sw.dataloader(Endless(), 4, plan())
    for wrong, words in (
        (SIZED, "no sample indices"),
        (DataLoader(SAMPLES), "`DataLoader` is not"),
    ):
        with pytest.raises(DataError, match=words):
            sw.dataloader(wrong, 4, plan())
    with pytest.raises(DataError, match="list is empty"):
        sw.dataloader([], 4, plan())
    odd: Any = [{"a": 1} if n % 2 else {"b": 1} for n in range(8)]
    for samples in (odd, [None] * 8):
        with pytest.raises(DataError, match="samples of a batch cannot be joined"):
            list(sw.dataloader(samples, 4, plan()))
    with pytest.raises(DataError, match="`sampler` is not supported: the loader draws"):
        sw.dataloader(SAMPLES, 4, plan(), sampler=range(20))
    with pytest.raises(DataError, match="less than one batch of 40"):
        sw.dataloader(SAMPLES, 40, plan())
    for size in (0, -1, 2.5):
        with pytest.raises(DataError, match="is not a positive integer"):
            sw.dataloader(SAMPLES, size, plan())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="plan=None"):
        sw.dataloader(SAMPLES, 4, None)  # type: ignore[arg-type]
