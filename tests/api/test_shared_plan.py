"""One plan for all ranks; one launch of three processes."""

from pathlib import Path

import pytest

from api.shared_plan_ranks import CHECKS
from torchrun import torchrun

SCRIPT = Path(__file__).with_name("shared_plan_ranks.py")


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(SCRIPT, 3)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_rank_0_plans_for_all(check: str, output: str) -> None:
    assert f"passed {check}" in output, output
