"""Whole training steps under `torch.compile`, on two real processes."""

from pathlib import Path

import pytest

from features.compiled_ranks import CHECKS
from torchrun import torchrun

SCRIPT = Path(__file__).with_name("compiled_ranks.py")


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(SCRIPT, 2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_a_compiled_program_is_one_graph_and_trains_as_it_does_uncompiled(
    check: str, output: str
) -> None:
    assert f"passed {check}" in output, output
