"""Models with several outputs in real processes: one launch of four ranks, many checks inside."""

from pathlib import Path

import pytest

from parallel.output_ranks import CHECKS
from torchrun import torchrun

SCRIPT = Path(__file__).with_name("output_ranks.py")


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(SCRIPT, 4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_any_outputs_train_as_on_one_device(check: str, output: str) -> None:
    assert f"passed {check}" in output, output
