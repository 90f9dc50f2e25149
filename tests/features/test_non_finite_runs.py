"""Runs whose numbers stop being finite, from the command line: exit status and checkpoints."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from shardwright import cli
from shardwright.run.config import Run
from shardwright.run.launch.launch import LogFolder
from shardwright.run.loop.weights import load_weights

MODEL = """
import torch
from torch import nn

def data(value):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    x[37, 3] = float(value)
    return x, torch.randint(4, (64,), generator=generator)

def build():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
"""
CONFIG = """
model: {{target: "model_not_finite:build"}}
data: {{target: "model_not_finite:data", batch_size: 8, arguments: {{value: "{value}"}}}}
optimizer: {{name: momentum, momentum: 0.9, learning_rate: {rate}, weight_decay: {decay}}}
train: {{non_finite: {policy}, checkpoint: {{folder: saved, every: 1, keep: 20}}}}
"""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "model_not_finite", raising=False)
    (run_folder / "model_not_finite.py").write_text(MODEL)
    return run_folder


def train(monkeypatch: pytest.MonkeyPatch, devices: str, **values: object) -> int:
    """`shardwright train` in this process; its exit status."""
    keys = {"value": "1.0", "rate": 0.01, "decay": 0.0, "policy": "stop", **values}
    Path("run.yaml").write_text(CONFIG.format(**keys))
    arguments = ["run.yaml", "--devices", devices, "--log-dir", "logs"]
    monkeypatch.setattr(sys, "argv", ["shardwright", "train", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def saved() -> list[str]:
    """The checkpoints of the run, all of finite tensors."""
    run = Run.from_file("run.yaml")
    folders = sorted(Path("saved").glob("step-*"), key=lambda path: int(path.name[5:]))
    for each in folders:
        net = run.model()
        load_weights(net, each)
        for tensor in net.state_dict().values():
            assert torch.isfinite(tensor).all()
    return [each.name for each in folders]


def losses() -> list[float]:
    lines = LogFolder(Path("logs")).steps(0).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.distributed)])
def test_a_batch_that_is_not_finite_ends_the_run_and_leaves_its_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], devices: str
) -> None:
    assert train(monkeypatch, devices, value="nan") != 0
    text = capfd.readouterr().err
    assert "error: step 4 (epoch 0, batch 3: samples 24 to 31" in text
    assert "the batch itself: row 3 of input 0 contains nan" in text
    assert saved() == ["step-1", "step-2", "step-3"]


def test_such_a_batch_can_be_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(monkeypatch, "1", value="nan", policy="skip") == 0
    assert [number for number, loss in enumerate(losses()) if math.isnan(loss)] == [3]
    assert saved() == [f"step-{step}" for step in range(1, 9)]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_parameters_that_are_not_finite_are_not_saved(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    assert train(monkeypatch, "1", rate="1.0e+30", decay="1.0e+30", policy=policy) != 0
    assert "after step 1: parameter " in capfd.readouterr().err
    assert saved() == []
