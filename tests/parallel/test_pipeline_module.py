"""Pipeline stages in real processes: one launch of eight ranks, many checks inside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def output() -> str:
    script = Path(__file__).with_name("pipeline_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=8", str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    return done.stdout + done.stderr[-6000:]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check",
    [
        "check_schedules",
        "check_parameters_in_unusual_places",
        "check_a_loss_before_the_last_stage",
        "check_own_parts_of_the_batch",
        "check_random_models",
        "check_compiled",
        "check_language_model",
        "check_outputs_reach_every_rank",
        "check_dropout",
        "check_what_is_refused",
    ],
)
def test_real_stages_train_as_one_device_does(check: str, output: str) -> None:
    assert f"passed {check}" in output, output
