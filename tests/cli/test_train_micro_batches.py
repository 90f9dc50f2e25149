"""`shardwright train` with micro-batches and stages trains as one device does on whole batches."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from forked import python

CONFIG = """
model: {target: "weighted_net:Net"}
loss: none
data: {target: "weighted_net:pairs", batch_size: 8}
optimizer: {name: sgd, learning_rate: 0.1}
train: {epochs: 3, log_every: 1, device: cpu, dtype: float64}
"""

NET = '''
"""A net whose loss is no plain mean: ignored labels, class weights, and a second divisor."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = torch.linspace(-1, 1, parameter.numel()).sin().view(parameter.shape)

    def forward(self, x, labels):
        z = self.second(self.first(x).relu())
        weights = torch.arange(1.0, 5, dtype=z.dtype)
        counted = torch.nn.functional.cross_entropy(z, labels, weights, ignore_index=0)
        return counted + (z.square().mean(1) * (labels > 1)).sum() / (labels > 1).sum()


def pairs():
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=drawn, dtype=torch.float64)
    return x, torch.tensor([0, 1, 0, 2, 0, 3, 0, 1])
'''


def eager_losses() -> list[float]:
    module = importlib.import_module("weighted_net")
    net, batch = module.Net().double(), module.pairs()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["micro_batches: 4", "micro_batches: 4, stages: 2"])
def test_a_loss_that_is_no_plain_mean_is_trained_as_on_one_device(
    parallel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weighted_net.py").write_text(NET)
    (tmp_path / "config.yaml").write_text(f"{CONFIG}parallel: {{{parallel}}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ("--devices", "2", "--log-dir", str(tmp_path / "log"))
    ended = python("-m", "shardwright", "train", str(tmp_path / "config.yaml"), *options)
    assert ended.status == 0, ended.errors
    lines = (tmp_path / "log" / "1" / "rank.0" / "steps.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses == pytest.approx(eager_losses(), rel=1e-12)
