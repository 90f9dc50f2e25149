"""Runs a script of the tests on several ranks, in the environment that `torchrun` sets up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from inspect import getfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forked import TIMEOUT, forked
from shardwright.run.launch.rank_processes import rank_environments
from shardwright.run.launch.rendezvous_store import serve_store


def torchrun(script: Path, processes: int, *arguments: str, timeout: float = TIMEOUT) -> str:
    """What the ranks print, one after the other, and the end of their errors. Once one has failed,
    the others are killed."""
    with serve_store() as port:
        environments = rank_environments(processes, port, restart=0, max_restarts=0)
        ended = forked([(str(script), *arguments)] * processes, environments, timeout)
    return "".join(ended.printed) + "".join(ended.errors)[-6000:]


def checks_on_ranks(
    checks: Sequence[Callable[[], None]],
    processes: int,
    *arguments: str,
    timeout: float = TIMEOUT,
) -> Callable[[str], None]:
    """A test for each of the checks that a script makes, all in one launch of so many ranks.

    Args:
        arguments: of the script.
        timeout: seconds for all checks together.
    """

    @cache
    def output() -> str:
        return torchrun(Path(getfile(checks[0])), processes, *arguments, timeout=timeout)

    @pytest.mark.distributed
    @pytest.mark.parametrize("check", [check.__name__ for check in checks])
    def passes(check: str) -> None:
        assert f"passed {check}\n" in output(), output()

    return passes


def run_checks(checks: Sequence[Callable[[], None]]) -> None:
    """What such a script does: each check on each rank; the first rank prints which have passed."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    torch.set_num_threads(1)
    for check in checks:
        check()
        if dist.get_rank() == 0:
            print(f"passed {check.__name__}", flush=True)
    dist.destroy_process_group()
