"""`parallelize` in real processes: one launch of four ranks, many checks inside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def output() -> str:
    script = Path(__file__).with_name("module_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.stdout + done.stderr[-6000:]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check",
    [
        "check_world_size",
        "check_parameters_are_shards",
        "check_deferred_parameters",
        "check_gradients_accumulate",
        "check_searched_plans",
        "check_random_plans",
        "check_compiled",
        "check_recomputed",
        "check_other_modes_and_batches",
        "check_dropout_on_ranks_seeded_apart",
        "check_inputs_that_arrive_cut",
    ],
)
def test_real_processes_train_as_one_device_does(check: str, output: str) -> None:
    assert f"passed {check}" in output, output
