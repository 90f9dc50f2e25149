"""Samples of many lengths in batches of few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import DataError
from shardwright.run import PadToMultiple

PAD = PadToMultiple({"input_ids": 0, "labels": -100}, 8)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(input_ids).cumsum(1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def samples(*lengths: int) -> list[dict[str, Any]]:
    ids = [torch.randint(32, (length,)) for length in lengths]
    return [{"input_ids": each.tolist(), "labels": each} for each in ids]


def test_padded_samples_have_the_loss_of_the_samples_and_lengths_are_captured_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    torch.manual_seed(0)
    net = Language()
    parallel = sw.parallelize(net, sw.plan(net, kwargs=PAD(samples(8, 3)), devices=1), copy=True)
    for lengths in ((8, 1), (5, 6), (2, 7), (9, 3), (16, 16), (12, 1)):
        drawn = samples(*lengths)
        alone = [
            net(*(torch.as_tensor(s[n])[None] for n in ("input_ids", "labels"))) for s in drawn
        ]
        wanted = sum(n * loss for n, loss in zip(lengths, alone, strict=True)) / sum(lengths)
        torch.testing.assert_close(parallel(**PAD(drawn)), wanted)
    assert caplog.text.count("captured the model") == 1


def test_fields_that_are_not_padded_are_joined_and_missing_ones_refused() -> None:
    batch = PAD([{**sample, "weight": 0.5} for sample in samples(2, 3)])
    assert {name: list(value.shape) for name, value in batch.items()} == {
        "input_ids": [2, 8],
        "labels": [2, 8],
        "weight": [2],
    }
    with pytest.raises(DataError, match="has no field 'labels'; the first sample has 'input_ids'"):
        PAD([{"input_ids": [1]}])
    with pytest.raises(DataError, match="must be dicts"):
        PAD([torch.ones(2)])  # type: ignore[list-item]
    with pytest.raises(DataError, match="multiple=0"):
        PadToMultiple({}, 0)
