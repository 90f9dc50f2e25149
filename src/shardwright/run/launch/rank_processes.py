"""Processes of local ranks: starting, monitoring and terminating them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

from shardwright.core.runtime.accelerator import LOOPBACK, loopback_interfaces
from shardwright.run.launch.log_folder import LogFolder
from shardwright.run.launch.rank_failure import RankEnd, RankError, requested_stop
from shardwright.run.launch.rendezvous_store import RUN_VARIABLE, store_settings

# Seconds between two polls of the processes.
POLL_SECONDS = 0.05

# Seconds to wait for the root cause after a rank has failed, possibly because of another rank: the
# failure of that other rank is the one to report.
GRACE_SECONDS = 2.0

# Seconds after SIGTERM until ranks are killed, and after SIGKILL until they are abandoned: a
# process may hang in the kernel.
SHUTDOWN_SECONDS = 5
ABANDON_SECONDS = 2

# Bytes at the end of a deleted log that the error of the run quotes.
LOG_BYTES = 4000

# Asks the kernel to kill the rank when its launcher dies. A process can ask this only for itself,
# so it runs before the rank's own code; it checks that the launcher has not already died.
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
        logs: the log folder of the run.
        stderr: the file `stderr`, also readable once it has been deleted.
        ended: monotonic clock in seconds when the end was observed; None while the process runs.
        seconds_stopped: seconds since a signal such as SIGSTOP stopped the process; 0 if it runs.
        stopped_by: the signal that stopped the process; None while it is not stopped.
        signals: signals that this launcher sent to the process.
    """

    rank: int
    process: subprocess.Popen[bytes]
    logs: LogFolder
    stderr: BinaryIO
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
        """Start `python <command>`, with stdout and stderr in the log folder.

        Args:
            environment: all environment variables of the process, except the error file.
            locks: file descriptors that the process inherits.
        """
        # -I -S (isolated, no site-packages): START_RANK needs the standard library only.
        start = ["-I", "-S", "-c", START_RANK, str(os.getpid())] if sys.platform == "linux" else []
        # The folder of an earlier attempt may have been deleted during the run.
        logs.rank(rank).mkdir(parents=True, exist_ok=True)
        stderr = logs.stderr(rank).open("w+b")
        with logs.stdout(rank).open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, *start, *command],
                env={**environment, "TORCHELASTIC_ERROR_FILE": str(logs.error(rank))},
                stdout=stdout,
                stderr=stderr,
                pass_fds=locks,
            )
        return RankProcess(rank, process, logs, stderr)

    def poll(self) -> bool:
        """Update the fields with the state of the process; return whether it is still running."""
        if self.ended is not None:
            return False
        if self.process.poll() is not None:
            self.ended = time.monotonic()
            return False
        # After a signal of this launcher the field stays: it tells why the launcher sent it.
        if not self.signals:
            self.stopped_by = _find_stop_signal(self.process.pid)
        self.seconds_stopped = self.seconds_stopped + POLL_SECONDS if self.stopped_by else 0.0
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, and add it to `signals`."""
        self.signals.add(number)
        self.process.send_signal(number)

    @property
    def end(self) -> RankEnd:
        """Exit status, signals and exception of the ended process."""
        return RankEnd(
            self.rank,
            self.process.pid,
            self.process.returncode,
            time.monotonic() if self.ended is None else self.ended,
            frozenset(self.signals),
            # A process that ended by itself had been continued.
            self.stopped_by if self.signals else None,
            RankError.read(self.logs.error(self.rank)),
            "" if self.logs.stderr(self.rank).exists() else self._read_stderr_tail(),
        )

    def _read_stderr_tail(self) -> str:
        size = os.fstat(self.stderr.fileno()).st_size
        content = os.pread(self.stderr.fileno(), LOG_BYTES, max(0, size - LOG_BYTES))
        return content.decode(errors="replace").strip()


def _find_stop_signal(pid: int) -> int | None:
    """Return the signal that has stopped a child process; None if the process is not stopped."""
    # WNOWAIT leaves the process waitable, so that `Popen.poll` still sees its end.
    try:
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if stopped is None else stopped.si_status


def wait_for_ranks(
    ranks: Sequence[RankProcess], timeout: timedelta, stop_signals: Collection[int]
) -> None:
    """Wait until all ranks have ended, or one has failed.

    If another rank may have caused a failure, waits up to `GRACE_SECONDS` until that rank fails.

    Args:
        timeout: longest time for which a rank may be stopped by a signal.
        stop_signals: stop signals that this process has received; the first one ends the wait.
    """
    grace_left = GRACE_SECONDS
    while grace_left > 0 and not stop_signals:
        running = [rank for rank in ranks if rank.poll()]
        # The code is None while the process runs, and 0 after success.
        failed = [rank.end for rank in ranks if rank.process.returncode]
        # Ranks that stop on request raise an error too, but have not failed.
        failed = [end for end in failed if requested_stop([end]) is None]
        if not running or any(end.is_root_cause for end in failed):
            return
        if any(rank.seconds_stopped > timeout.total_seconds() for rank in running):
            return
        grace_left -= POLL_SECONDS if failed else 0
        time.sleep(POLL_SECONDS)


def stop_ranks(ranks: Sequence[RankProcess], timeout: timedelta, stop_signals: Sized) -> None:
    """Send SIGTERM to running ranks, and wait until they have ended.

    Ranks of a run with checkpoints save a checkpoint before they end. Does nothing if a signal such
    as SIGSTOP has stopped a rank.

    Args:
        timeout: longest time to wait.
        stop_signals: stop signals that this process has received; a further one ends the wait.
    """
    received, deadline = len(stop_signals), time.monotonic() + timeout.total_seconds()
    running = [rank for rank in ranks if rank.poll()]
    if any(rank.stopped_by for rank in running):
        return  # A stopped rank would not receive the signal, and the others would wait for it.
    for rank in running:
        rank.send(signal.SIGTERM)
    while [rank for rank in ranks if rank.poll()]:
        if len(stop_signals) > received or time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def end_ranks(ranks: Sequence[RankProcess]) -> None:
    """Terminate running processes with SIGTERM, and kill processes that do not exit."""
    # SIGTERM stays pending for a stopped process: only SIGKILL reaches it.
    for rank in ranks:
        if rank.poll():
            rank.send(signal.SIGKILL if rank.stopped_by else signal.SIGTERM)
    _wait_until_ended(ranks, SHUTDOWN_SECONDS)
    for rank in ranks:
        if rank.poll():
            rank.send(signal.SIGKILL)
    _wait_until_ended(ranks, ABANDON_SECONDS)


def _wait_until_ended(ranks: Sequence[RankProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while [rank for rank in ranks if rank.poll()] and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 5)


def process_settings(num_local: int) -> dict[str, str]:
    """Return default environment variables of each of the `num_local` ranks of a node."""
    return {
        # Each rank would start one thread per core, and the ranks would compete for them.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_local)),
        # Otherwise the last lines of a killed rank are lost.
        "PYTHONUNBUFFERED": "1",
    }


def rank_environments(
    num_ranks: int,
    store_port: int | None,
    restart: int,
    max_restarts: int,
    store_folder: Path | None = None,
) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun sets it on a single node.

    Communication backends listen on the loopback interface unless the user sets another.

    Args:
        num_ranks: number of ranks.
        store_port: port of the `TCPStore` on this machine, for scripts; None without one.
        restart: number of restarts so far.
        max_restarts: maximum number of restarts.
        store_folder: private folder with the rendezvous file (`FileStore`); None to use the
            `TCPStore`.
    """
    size, run = str(num_ranks), uuid.uuid4().hex
    shared = {
        **loopback_interfaces(),
        **process_settings(num_ranks),
        # The user's variables override the defaults above, but none of those below.
        **os.environ,
        **({} if store_port is None else {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store_port)}),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        RUN_VARIABLE: run,
        **({} if store_folder is None else store_settings(store_folder, run)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
        "GROUP_WORLD_SIZE": "1",
    }
    return [
        {**shared, **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))}
        for rank in range(num_ranks)
    ]
