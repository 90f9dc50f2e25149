"""The scripts in examples/: 8 processes give the losses of one device, and the losses fall."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from forked import python
from shardwright.run import Batches, MeanAbsoluteError, mnist_or_digits

EXAMPLES = Path(__file__).parents[1] / "examples"
LINE = re.compile(r"^epoch: (\d+), step: (\d+), loss is (\d+\.\d+)$", re.MULTILINE)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
STEPS = 8


def printed(script: str, *options: str, launcher: tuple[str, ...] = ()) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "DATA_PATH"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [str(EXAMPLES / f"{script}.py"), "--log-every", "1", *options]
    if not launcher:
        alone = python(*command, environment=environment)
        assert alone.status == 0, alone.errors[0]
        return alone.printed[0]
    ended = subprocess.run(
        [sys.executable, *launcher, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(text: str) -> dict[tuple[int, int], float]:
    """By epoch and step."""
    return {(int(epoch), int(step)): float(loss) for epoch, step, loss in LINE.findall(text)}


@cache
def on_one_device(script: str) -> dict[tuple[int, int], float]:
    """Of the whole run."""
    return losses(printed(script))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "mesh"),
    [
        pytest.param("ffn", "a 2, tp 4", marks=pytest.mark.slow),
        pytest.param("advanced", "a 2, b 2, c 2", marks=pytest.mark.slow),
        pytest.param("network", "", marks=pytest.mark.slow),
    ],
)
def test_8_processes_have_the_losses_of_one_device(script: str, mesh: str) -> None:
    text = printed(script, "--epochs", "1", "--steps", str(STEPS), launcher=TORCHRUN)
    assert f"Plan for 8 devices: {mesh}" in text
    many = losses(text)
    assert list(many) == [(0, step) for step in range(STEPS)]
    for place, loss in many.items():
        # In float32, where the order of the terms of a sum tells in the last digits.
        assert loss == pytest.approx(on_one_device(script)[place], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_training_loop_of_digits_has_the_losses_of_one_device() -> None:
    many = losses(printed("digits", launcher=TORCHRUN))
    one = on_one_device("digits")
    assert (
        list(many)
        == list(one)
        == [(epoch, step) for epoch in range(3) for step in range(0, 56, 10)]
    )
    assert one[2, 50] < 0.5 * one[0, 0]
    # In float32 the last digits tell the order of sums, and grow tenfold with every 15 steps.
    first = [place for place in one if place[0] == 0]
    assert [many[place] for place in first] == pytest.approx([one[p] for p in first], rel=1e-4)
    assert list(many.values()) == pytest.approx(list(one.values()), abs=0.01)


@pytest.mark.distributed
@pytest.mark.parametrize("script", ["ffn", "advanced"])
def test_the_loss_starts_at_ln_10_and_falls_below_1_within_100_steps(script: str) -> None:
    one = on_one_device(script)
    assert list(one) == [(epoch, step) for epoch in range(10) for step in range(56)]
    values = list(one.values())
    assert values[0] == pytest.approx(2.30, abs=0.02)
    assert max(values[90:100]) < 1
    assert max(values[-50:]) < 0.3


@pytest.mark.slow
@pytest.mark.distributed
def test_many_dimensions_at_once_have_the_loss_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATA_PATH", raising=False)
    logs = ("launch", "--devices", "8", "--log-dir", str(tmp_path))
    script = (str(EXAMPLES / "multiple_mixed.py"), "--epochs", "1", "--steps", str(STEPS))
    subprocess.run([sys.executable, "-m", "shardwright", *logs, *script], check=True, timeout=300)
    texts = [(tmp_path / "1" / f"rank.{rank}" / "stdout").read_text() for rank in range(8)]
    assert "Pipeline parallel 2 (1f1b), tensor parallel 4" in texts[0]
    last = {text.splitlines()[-1] for text in texts}
    assert len(last) == 1
    line = re.fullmatch(rf"epoch: 1 step: {STEPS}, loss is (\d+\.\d+)", last.pop())
    assert line is not None
    assert float(line[1]) == pytest.approx(_multiple_mixed_on_one_device(), rel=1e-5)


def _multiple_mixed_on_one_device() -> float:
    sys.path.insert(0, str(EXAMPLES))
    from multiple_mixed import Network

    torch.manual_seed(1)
    net = sw.WithLoss(Network(), MeanAbsoluteError())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for images, labels in islice(Batches(mnist_or_digits(), batch_size=32).epoch(0), STEPS):
        loss = net(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


WIDGET = "application/vnd.jupyter.widget-view+json"


def kinds_of_outputs(notebook: Any) -> list[list[set[str]]]:
    """Of each cell with code, what each of its outputs can be shown as beside plain text; without
    the bar of a long call, which goes away and leaves an empty text."""
    return [
        [
            set(output.get("data", ())) - {"text/plain"}
            for output in cell.outputs
            if output.output_type != "display_data"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    stored = nbformat.read(EXAMPLES / "from_model_to_report.ipynb", 4)
    notebook = nbformat.read(EXAMPLES / "from_model_to_report.ipynb", 4)
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "jupyter"))
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    assert kinds_of_outputs(notebook) == kinds_of_outputs(stored)
    displayed = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    assert any(WIDGET in each.get("data", ()) for each in displayed), "the bar is a widget"
    assert sum({"text/html"} in kinds for kinds in kinds_of_outputs(notebook)) == 6
    assert "Against other plans" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert sw.Plan.load(tmp_path / "plan.json").devices == 8
