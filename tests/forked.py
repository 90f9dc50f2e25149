"""Runs programs of Python in processes that are forked where torch is imported already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import TextIO, cast

SERVER = Path(__file__).with_name("fork_server.py")
TIMEOUT = 570.0
"""Seconds."""


@dataclass(frozen=True)
class Ended:
    """How processes ended.

    Args:
        status: 0, or that of one that failed.
        printed, errors: what each wrote to standard output and to standard error.
    """

    status: int
    printed: tuple[str, ...]
    errors: tuple[str, ...]


def forked(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    timeout: float = TIMEOUT,
) -> Ended:
    """Runs `python COMMAND` for each, with a script, `-m` and a module or `-c` and a text.

    Once one has failed, or after `timeout` seconds, the others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [[Path(folder) / f"{name}{i}" for i in range(len(commands))] for name in "oe"]
        for path in (*streams[0], *streams[1]):
            path.touch()
        requests = [
            {
                "command": list(command),
                "folder": str(Path.cwd()),
                "environment": dict(environment),
                "stdout": str(stdout),
                "stderr": str(stderr),
            }
            for command, environment, stdout, stderr in zip(
                commands, environments, *streams, strict=True
            )
        ]
        servers = _servers()
        for turn, server in enumerate(servers):
            print(json.dumps(requests[turn :: len(servers)]), file=server.stdin, flush=True)
        status = _status([cast(TextIO, server.stdout) for server in servers], timeout)
        return Ended(status, *(tuple(path.read_text() for path in paths) for paths in streams))


def python(*command: str, environment: Mapping[str, str] = os.environ) -> Ended:
    """`python COMMAND`."""
    return forked([command], [environment])


@cache
def _servers() -> tuple[subprocess.Popen[str], ...]:
    """Two, which order sets of strings differently, so that processes of one run do."""
    return tuple(
        subprocess.Popen(
            [sys.executable, str(SERVER)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for seed in ("1", "2")
    )


def _status(answers: Sequence[TextIO], timeout: float) -> int:
    """The first status that a server answers other than 0, once nothing runs anymore."""
    deadline, waiting, status = time.monotonic() + timeout, list(answers), 0
    while waiting and not status:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        waiting = [answer for answer in waiting if answer not in ready]
        found = [int(answer.readline() or -signal.SIGKILL) for answer in ready]
        status = next(filter(None, found), 0) if ready else -signal.SIGKILL
    if waiting:
        _end_servers()
    return status


def _end_servers() -> None:
    """With the processes that they have forked; the next are forked from new ones."""
    for server in _servers():
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    _servers.cache_clear()
