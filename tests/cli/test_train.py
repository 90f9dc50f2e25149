"""`shardwright train`: what it writes, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forked import python
from mindformers.files import small
from shardwright.cli import app
from shardwright.core.plan.measured import PROFILE_FILE, Measured
from shardwright.run.config.run import Run

CONFIG = """
model: {target: "profiled_net:Net"}
loss: mse
data: {target: "profiled_net:pairs", batch_size: 8}
optimizer: {name: adamw, learning_rate: 0.1}
train: {steps: 3, log_every: 1, device: cpu}
"""

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


def pairs():
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(64, 16, generator=drawn), torch.randn(64, 4, generator=drawn)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "profiled_net.py").write_text(NET)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("0", "should be greater than or equal to 1"),
        ("x", "unable to parse string as an integer"),
        (
            "3",
            "needs 4 steps, the first for warm-up, but only 3 remain use at most --profile 2",
        ),
    ],
)
def test_a_number_of_steps_that_cannot_be_profiled_is_one_error(
    config: Path, tmp_path: Path, steps: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--profile", steps, "--log-dir", str(tmp_path / "log")]
    result = CliRunner().invoke(app, ["train", str(config), *options])
    assert result.exit_code
    said = " ".join(f"{result.output} {result.exception}".replace("│", " ").split())
    assert message in said
    assert not (tmp_path / "log" / "1").exists()


@pytest.mark.distributed
def test_a_profiled_run_sends_the_bytes_that_were_predicted(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    options = ("--devices", "2", "--profile", "1", "--log-dir", str(log))
    ended = python("-m", "shardwright", "train", str(config), *options)
    assert ended.status == 0, ended.errors
    measured = Measured.load(log)
    assert [rank.rank for rank in measured.ranks] == [0, 1] and measured.steps == 1
    planned = {(t.kind, t.over): (t.count, t.bytes) for t in measured.predicted[0]}
    for rank in measured.ranks:
        assert {(t.kind, t.over): (t.count, t.bytes) for t in rank.collectives} == planned != {}
        assert (
            rank.component_seconds["matrix products"] > 0
            and rank.peak_bytes > 0
            and rank.seconds > 0
        )
        with gzip.open(log / "1" / f"rank.{rank.rank}" / "trace.json.gz", "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"net.first", "bucket 0"} <= names
    page = (log / "1" / "profile.html").read_text(encoding="utf-8")
    assert "Predicted against measured" in page
    assert PROFILE_FILE in {path.name for path in (log / "1").iterdir()}
    lines = (log / "1" / "rank.0" / "steps.jsonl").read_text().splitlines()
    exposed = [json.loads(line)["exposed_communication"] for line in lines]
    assert len(exposed) == 3 and all(seconds > 0 for seconds in exposed)
    # The profile also counts what starts a collective and joins what it gave. Where processes share
    # cores, a wait also lasts until its own process runs again.
    assert exposed[1] < 4 * measured.ranks[0].component_seconds["communication"] + 1e-3


def test_strategies_of_a_saved_plan_are_saved_too(tmp_path: Path) -> None:
    config, plan = tmp_path / "run.yaml", tmp_path / "plan.json"
    parallel = {"parallel_mode": 2, "full_batch": True, "strategy_ckpt_save_file": "cuts.json"}
    text = small(model__model_config__num_layers=1, only_save_strategy=True, parallel=parallel)
    config.write_text(str(text))
    Run.from_file(config).plan(devices=2).save(plan)
    result = CliRunner().invoke(app, ["train", str(config), "--plan", str(plan)])
    assert result.exit_code == 0, result.output
    assert "lm_head" in (tmp_path / "cuts.json").read_text()
