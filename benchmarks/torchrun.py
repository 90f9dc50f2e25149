"""Runs a module of the benchmarks on real processes."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.page import ROOT

TIMEOUT = 1800


def torchrun(module: str, ranks: int, *arguments: str) -> str:
    """What the processes print; each computes on one thread.

    Raises:
        RuntimeError: if a process fails.
        subprocess.TimeoutExpired: if they take longer than half an hour.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a process failed:\n{done.stderr[-4000:]}")
    return done.stdout
