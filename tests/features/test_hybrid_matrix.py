"""All dimensions at once, in every legal combination: one launch of eight ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from features.hybrid_cases import CASES, Case


@pytest.fixture(scope="module")
def output() -> str:
    script = Path(__file__).with_name("hybrid_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=8", str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    return done.stdout + done.stderr[-6000:]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_combination_trains_as_one_device_does(case: Case, output: str) -> None:
    assert f"passed {case.name};" in output, output
