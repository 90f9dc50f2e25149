"""Optimizer parallel and micro-batches in real processes: one launch of four ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from features.optimizer_parallel_ranks import CHECKS, SLOW_CHECKS


def launched(*arguments: str) -> str:
    script = Path(__file__).with_name("optimizer_parallel_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", str(script)]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout + done.stderr[-6000:]


@pytest.fixture(scope="module")
def output() -> str:
    return launched()


@pytest.fixture(scope="module")
def slow_output() -> str:
    return launched("slow")


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_real_processes_train_as_one_device_does(check: str, output: str) -> None:
    assert f"passed {check}" in output, output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in SLOW_CHECKS])
def test_every_level_trains_as_one_device_does(check: str, slow_output: str) -> None:
    assert f"passed {check}" in slow_output, slow_output
