"""Runs a script of the tests in real processes, as `torchrun` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def torchrun(script: Path, processes: int, *arguments: str, timeout: float = 570) -> str:
    """What the processes print, and the end of their errors."""
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={processes}")
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.stdout + done.stderr[-6000:]


def run_checks(checks: Sequence[Callable[[], None]]) -> None:
    """What such a script does: each check on each rank; the first rank prints which have passed."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    torch.set_num_threads(1)
    for check in checks:
        check()
        if dist.get_rank() == 0:
            print(f"passed {check.__name__}", flush=True)
    dist.destroy_process_group()
