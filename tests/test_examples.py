"""The scripts in examples/: 8 processes give the losses of one device, and the losses fall."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LINE = re.compile(r"^epoch: (\d+), step: (\d+), loss is (\d+\.\d+)$", re.MULTILINE)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
STEPS = 8


def printed(script: str, *options: str, launcher: tuple[str, ...] = ()) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "DATA_PATH"}
    environment["OMP_NUM_THREADS"] = "1"
    ended = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{script}.py"), "--log-every", "1", *options],
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
    ("script", "mode", "pins"),
    [
        ("ffn", "sharding_propagation", 2),
        ("advanced", "semi_auto", 4),
        ("network", "recursive_programming", 0),
    ],
)
def test_8_processes_have_the_losses_of_one_device(script: str, mode: str, pins: int) -> None:
    text = printed(script, "--epochs", "1", "--steps", str(STEPS), launcher=TORCHRUN)
    assert "Plan for 8 devices" in text
    assert f"\n{mode}(" in text
    assert text.count("pinned") == pins
    found = losses(text)
    assert list(found) == [(0, step) for step in range(STEPS)]
    for place, loss in found.items():
        # In float32, where the order of the terms of a sum tells in the last digits.
        assert loss == pytest.approx(on_one_device(script)[place], rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("script", ["ffn", "advanced"])
def test_the_loss_starts_at_ln_10_and_falls_below_1_within_100_steps(script: str) -> None:
    found = on_one_device(script)
    assert list(found) == [(epoch, step) for epoch in range(10) for step in range(56)]
    values = list(found.values())
    assert values[0] == pytest.approx(2.30, abs=0.02)
    assert max(values[90:100]) < 1
    assert max(values[-50:]) < 0.3
