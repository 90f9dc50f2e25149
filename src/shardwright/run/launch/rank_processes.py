"""The processes of local ranks: how they start, when they have failed, how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from shardwright.core.runtime.accelerator import LOOPBACK, loopback_interfaces
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.rank_failure import RankEnd, RankError

# Seconds between two looks at the processes.
POLL = 0.05

# Seconds that ranks have to fail too, after one failed that may have waited for another.
GRACE = 2.0

# How long ranks may take to exit after SIGTERM before they are killed, and after SIGKILL before
# they are left behind, in seconds: a process may hang in the kernel.
SHUTDOWN_SECONDS = 5
KILL_SECONDS = 2

# The kernel kills a rank whose launcher is gone. Only the process itself can ask for that; it does
# so before it becomes the rank, and the launcher may be gone by then.
START_RANK = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass
class RankProcess:
    """The process of one rank.

    Args:
        ended: when it was seen to have ended, on the monotonic clock.
        seconds_stopped: how long it has been stopped.
        signals: those that were sent to it.
    """

    rank: int
    process: subprocess.Popen[bytes]
    logs: LogFolder
    ended: float | None = None
    seconds_stopped: float = 0.0
    stopped_by: int | None = None
    signals: set[int] = field(default_factory=set)

    @staticmethod
    def start(
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        logs: LogFolder,
        locks: Collection[int],
    ) -> RankProcess:
        """Starts `python <command>`.

        Args:
            locks: file descriptors that the process inherits.
        """
        start = ["-I", "-S", "-c", START_RANK, str(os.getpid())] if sys.platform == "linux" else []
        with logs.stdout(rank).open("wb") as stdout, logs.stderr(rank).open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *start, *command],
                env={**environment, "TORCHELASTIC_ERROR_FILE": str(logs.error(rank))},
                stdout=stdout,
                stderr=stderr,
                pass_fds=locks,
            )
        return RankProcess(rank, process, logs)

    def poll(self) -> bool:
        """Whether it still runs."""
        if self.ended is not None:
            return False
        if self.process.poll() is not None:
            self.ended = time.monotonic()
            return False
        if not self.signals:
            self.stopped_by = _stop_signal(self.process.pid)
        self.seconds_stopped = self.seconds_stopped + POLL if self.stopped_by else 0.0
        return True

    def send(self, number: signal.Signals) -> None:
        self.signals.add(number)
        self.process.send_signal(number)

    @property
    def end(self) -> RankEnd:
        return RankEnd(
            self.rank,
            self.process.pid,
            self.process.returncode,
            time.monotonic() if self.ended is None else self.ended,
            frozenset(self.signals),
            self.stopped_by if self.signals else None,
            RankError.read(self.logs.error(self.rank)),
        )


def _stop_signal(pid: int) -> int | None:
    """The signal by which a child process is stopped, if it is."""
    try:
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if stopped is None else stopped.si_status


def wait_for_ranks(
    ranks: Sequence[RankProcess], timeout: timedelta, received: Collection[int]
) -> None:
    """Waits until all ranks have ended, or one has failed. A failure that another rank may explain
    is given some time for that.

    Args:
        timeout: how long a rank may be stopped.
        received: signals that this process received; the wait ends with the first.
    """
    patience = GRACE
    while patience > 0 and not received:
        running = [rank for rank in ranks if rank.poll()]
        failed = [rank.end for rank in ranks if rank.process.returncode]
        if not running or any(end.explains for end in failed):
            return
        if any(rank.seconds_stopped > timeout.total_seconds() for rank in running):
            return
        patience -= POLL if failed else 0
        time.sleep(POLL)


def end_ranks(ranks: Sequence[RankProcess]) -> None:
    """Ends the processes that still run: by SIGKILL those that are stopped, which no other signal
    reaches, or that do not heed SIGTERM."""
    for rank in ranks:
        if rank.poll():
            rank.send(signal.SIGKILL if rank.stopped_by else signal.SIGTERM)
    _await_end(ranks, SHUTDOWN_SECONDS)
    for rank in ranks:
        if rank.poll():
            rank.send(signal.SIGKILL)
    _await_end(ranks, KILL_SECONDS)


def _await_end(ranks: Sequence[RankProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while [rank for rank in ranks if rank.poll()] and time.monotonic() < deadline:
        time.sleep(POLL / 5)


@contextmanager
def serve_store() -> Iterator[int]:
    """Serves the store through which the ranks find each other, to this machine only: what ranks
    read from it is unpickled, so who writes to it runs code in them.

    Yields:
        Its port.
    """
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    yield port
    del store


def process_settings(num_local: int) -> dict[str, str]:
    """What the ranks of one machine get in their environment unless the user says otherwise."""
    return {
        # Cores are divided among the ranks.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_local)),
        # Otherwise the last lines of a killed rank are lost.
        "PYTHONUNBUFFERED": "1",
    }


def rank_environments(
    num_ranks: int, store_port: int, restart: int, max_restarts: int
) -> list[dict[str, str]]:
    """For each rank the environment that torchrun would set up, without other hosts: what the
    backends listen on is the loopback interface, unless the user chose another."""
    size = str(num_ranks)
    shared = {
        **loopback_interfaces(),
        **process_settings(num_ranks),
        **os.environ,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store_port),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
        "GROUP_WORLD_SIZE": "1",
    }
    return [
        {**shared, **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))}
        for rank in range(num_ranks)
    ]
