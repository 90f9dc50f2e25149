"""The commands that measure this machine and plan for a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.core.cost.cluster import Cluster, LinkLevel
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.measure import measure_device
from shardwright.tools.compare import measure_processes

MODEL = """
from torch import nn

def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
"""

CONFIG = """
model: {target: "cluster_model:perceptron"}
data: {batch_size: 64}
"""

CLUSTER = """
device: {memory: 1 GB, rates: {float32: 1 GFLOP/s}, memory_bandwidth: 1 GB/s}
levels: [{name: link, bandwidth: 100 GB/s, latency: 0}]
"""


ROW = {
    "id": "tiny",
    "source": "a laboratory's page",
    "model": "tiny",
    "family": "gpt",
    "hidden": 256,
    "layers": 1,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 1024,
    "vocab": 320,
    "seq": 128,
    "hardware": "h100",
    "devices": 8,
    "data_parallel": 8,
    "tensor_parallel": 1,
    "stages": 1,
    "sequence_parallel": False,
    "sharded": "none",
    "micro_batch": 2,
    "global_batch": 16,
    "recompute": "none",
    "dtype": "bf16",
    "tokens_per_second_per_device": 100_000,
}


def test_calibrate_prints_and_keeps_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    link = LinkLevel("processes", 3e9, 1e-4)
    found = Cluster("local", measure_device(), (link,))
    monkeypatch.setattr(measure_processes, "measure_cluster", lambda *_: found)
    result = CliRunner().invoke(app, ["calibrate"])
    assert result.exit_code == 0, result.output
    assert "bandwidth: 3000000000.0" in result.output
    assert str(tmp_path / "shardwright" / "local.yaml") in result.output
    assert load_cluster("local").levels[0].bandwidth == 3e9


@pytest.fixture(autouse=True)
def module_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cluster_model", raising=False)


def test_plan_takes_a_cluster_by_its_path_or_name(tmp_path: Path) -> None:
    (tmp_path / "cluster_model.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    command = ["plan", str(tmp_path / "config.yaml"), "--devices", "4", "--json", "--cluster"]
    for given, name in ((str(tmp_path / "mine.yaml"), "mine"), ("a100", "a100")):
        result = CliRunner().invoke(app, [*command, given])
        assert result.exit_code == 0, result.output
        options = json.loads(result.stdout)["options"]
        assert (options["cost_model"], options["cluster"]) == ("time", name)


def test_a_cluster_beside_the_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "cluster_model.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text(CONFIG + "parallel: {cluster: mine.yaml}\n")
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    command = ["plan", str(tmp_path / "config.yaml"), "--devices", "4", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["options"]["cluster"] == "mine"


def test_calibrate_fits_a_cluster_to_published_runs(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [ROW]}))
    out = tmp_path / "fitted" / "h100.yaml"
    command = ["calibrate", "--from", str(tmp_path / "rows.json"), "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "1 runs on h100, predicted " in result.output
    assert out.read_text().startswith("# Efficiencies,")
    assert "#   a laboratory's page" in out.read_text()
    assert load_cluster(out).device.rates == load_cluster("h100").device.rates


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x.yaml"], "need --from"),
        (["--from", "rows.json"], "--from needs --out"),
        (
            ["--from", "rows.json", "--out", "x.yaml", "--devices", "2"],
            "cannot be combined with --devices",
        ),
        (["--from", "rows.json", "--out", "x.yaml"], "use --cluster with one of a100, h100"),
        (["--from", "none.json", "--out", "x.yaml"], "no such file"),
    ],
)
def test_calibrate_refuses_what_does_not_go_together(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [ROW, {**ROW, "id": "other", "hardware": "a100"}]
    Path("rows.json").write_text(json.dumps(rows))
    result = CliRunner().invoke(app, ["calibrate", *options])
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).replace("│", "").split())
    assert not Path("x.yaml").exists()
