"""Optimizer parallel and micro-batches in real processes: one launch of four ranks."""

from pathlib import Path

import pytest

from features.optimizer_parallel_ranks import CHECKS, SLOW_CHECKS
from torchrun import torchrun

SCRIPT = Path(__file__).with_name("optimizer_parallel_ranks.py")


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(SCRIPT, 4)


@pytest.fixture(scope="module")
def slow_output() -> str:
    return torchrun(SCRIPT, 4, "slow")


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_real_processes_train_as_one_device_does(check: str, output: str) -> None:
    assert f"passed {check}" in output, output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in SLOW_CHECKS])
def test_every_level_trains_as_one_device_does(check: str, slow_output: str) -> None:
    assert f"passed {check}" in slow_output, slow_output
