"""All dimensions at once, in every legal combination: one launch of eight ranks."""

from pathlib import Path

import pytest

from features.hybrid_cases import CASES, Case
from torchrun import torchrun


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(Path(__file__).with_name("hybrid_ranks.py"), 8, timeout=3600)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_combination_trains_as_one_device_does(case: Case, output: str) -> None:
    assert f"passed {case.name};" in output, output
