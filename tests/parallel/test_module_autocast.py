"""Autocast around and inside of planned models: one launch of four ranks, many checks inside."""

from pathlib import Path

import pytest

from parallel.autocast_ranks import CHECKS
from torchrun import torchrun

SCRIPT = Path(__file__).with_name("autocast_ranks.py")


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(SCRIPT, 4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_autocast_is_that_of_one_device(check: str, output: str) -> None:
    assert f"passed {check}" in output, output
