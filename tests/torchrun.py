"""Runs a script of the tests in real processes, as `torchrun` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
