"""Runs a module of the benchmarks on real processes, or any in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.page import ROOT

TIMEOUT = 1800


def torchrun(module: str, ranks: int, *arguments: str) -> str:
    """What the processes print; each computes on one thread.

    Raises:
        RuntimeError: if a process fails.
        subprocess.TimeoutExpired: if they take longer than half an hour.
    """
    launcher = ("torch.distributed.run", f"--nproc-per-node={ranks}")
    return python(*launcher, "-m", f"benchmarks.{module}", *arguments)


def python(*arguments: str, folder: Path = ROOT) -> str:
    """What `python -m` prints in `folder`; it computes on one thread.

    Raises:
        RuntimeError: if a process fails.
        subprocess.TimeoutExpired: if it takes longer than half an hour.
    """
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a process failed:\n{done.stderr[-4000:]}")
    return done.stdout
