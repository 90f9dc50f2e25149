"""Runs training programs on real processes, and collects how each ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from benchmarks.page import ROOT

RANKS, TIMEOUT = 4, 1800


@dataclass(frozen=True)
class Outcome:
    """How a program ended: `end` is one of `program_ranks.ENDS`, `why` empty if it was exact."""

    program: str
    plan: str
    end: str
    why: str


def outcomes(names: Sequence[str] = (), ranks: int = RANKS) -> list[Outcome]:
    """Every program under every plan, as on the rank on which it ended worst.

    Args:
        names: of programs; all if empty.

    Raises:
        RuntimeError: if the processes fail.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher, "-m", "benchmarks.program_ranks", folder, *names],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the processes failed:\n{done.stderr[-4000:]}")
    worst: dict[tuple[str, str], Outcome] = {}
    decoder = json.JSONDecoder()
    for start in (i for i, letter in enumerate(done.stdout) if done.stdout.startswith('{"end', i)):
        for program, plan, end, why in decoder.raw_decode(done.stdout[start:])[0]["ends"]:
            before = worst.get((program, plan))
            if before is None or before.end == "exact":
                worst[program, plan] = Outcome(program, plan, end, why)
    return list(worst.values())
