"""Pipeline stages in real processes: many checks in one launch of four ranks, or of eight."""

from pathlib import Path

import pytest

from parallel.pipeline_ranks import CHECKS, SLOW_CHECKS
from torchrun import torchrun

SCRIPT = Path(__file__).with_name("pipeline_ranks.py")


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(SCRIPT, 4)


@pytest.fixture(scope="module")
def slow_output() -> str:
    return torchrun(SCRIPT, 8, "slow")


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_real_stages_train_as_one_device_does(check: str, output: str) -> None:
    assert f"passed {check}" in output, output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in SLOW_CHECKS])
def test_every_kind_of_stage_trains_as_one_device_does(check: str, slow_output: str) -> None:
    assert f"passed {check}" in slow_output, slow_output
