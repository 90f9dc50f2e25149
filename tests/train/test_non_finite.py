"""Losses, gradients and parameters that are not finite, on one device and on four processes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from torchrun import torchrun
from train.non_finite_ranks import CHECKS, DISTRIBUTED_CHECKS

SCRIPT = Path(__file__).with_name("non_finite_ranks.py")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_one_device(check: Callable[[], None]) -> None:
    check()


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(SCRIPT, 4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in DISTRIBUTED_CHECKS])
def test_on_four_processes(check: str, output: str) -> None:
    assert f"passed {check}" in output, output
