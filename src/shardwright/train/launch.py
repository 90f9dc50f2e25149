"""Launches ranks as local processes with torch.distributed's elastic launcher.

The processes run the given command in the environment that torchrun would set up, so a rank cannot
tell, and need not know, who launched it. Rank N writes to `<log folder>/1/rank.N/stdout` and
`stderr`. If a rank fails or is killed, the others are terminated, and all are restarted if
requested; with `launch_elastic` on the devices that remain.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from shardwright.errors import ConfigError
from shardwright.runtime.collective_errors import CommunicationError

# How long ranks may take to exit after SIGTERM before they are killed.
SHUTDOWN_SECONDS = 5

# Signals that indicate a lost device; SIGABRT is not one of them, libraries raise it on errors.
DEVICE_LOSS_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class LogFolder:
    """The log folder of one run: `<root>/1/rank.N/…`."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "1"

    def rank(self, rank: int) -> Path:
        return self.run / f"rank.{rank}"

    def stdout(self, rank: int) -> Path:
        return self.rank(rank) / "stdout"

    def stderr(self, rank: int) -> Path:
        return self.rank(rank) / "stderr"

    def error(self, rank: int) -> Path:
        """The exception that terminated the rank, as written by torch.distributed's `record`."""
        return self.rank(rank) / "error.json"

    def steps(self, rank: int) -> Path:
        """One JSON line per training step."""
        return self.rank(rank) / "steps.jsonl"

    @property
    def plan(self) -> Path:
        return self.run / "plan.json"

    def clear(self, num_ranks: int, keep_steps: bool = False) -> None:
        """Remove the logs of an earlier run, and create a folder for each of `num_ranks` ranks.

        Args:
            keep_steps: keep the step log, which a resumed run continues.
        """
        steps = self.steps(0)
        record = steps.read_bytes() if keep_steps and steps.exists() else None
        for old in self.run.glob("rank.[0-9]*"):
            shutil.rmtree(old)
        for rank in range(num_ranks):
            self.rank(rank).mkdir(parents=True)
        if record is not None:
            steps.write_bytes(record)

    def archive_attempt(self) -> None:
        """Rename the logs of all ranks, to `stdout.attempt-0` for example, before a restart."""
        for folder in self.run.glob("rank.[0-9]*"):
            attempt = len(list(folder.glob("stdout.attempt-*")))
            for name in ("stdout", "stderr", "error.json"):
                if (folder / name).exists():
                    (folder / name).rename(folder / f"{name}.attempt-{attempt}")


class RankFailedError(Exception):
    """A rank failed or was killed; the message gives the rank, the reason and its log.

    Args:
        kind, text: type name and message of the exception that terminated it, if any.
        lost: the ranks that were killed.
    """

    def __init__(
        self, message: str, kind: str = "", text: str = "", lost: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.text = text
        self.lost = lost


class StoppedError(Exception):
    """The run was stopped by a signal to the launching process, such as Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name}; all ranks have been terminated"
        )
        self.number = number


def launch(
    command: Sequence[str],
    num_ranks: int,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    on_restart: Callable[[int], None] = lambda number: None,
) -> None:
    """Run `python <command>` as `num_ranks` local processes and wait for all of them.

    Args:
        max_restarts: how many times all ranks are restarted after a failure.
        on_restart: called before each restart with its number, from 1 on.

    Raises:
        RankFailedError: if a rank failed and there are no restarts left; the others are terminated.
        StoppedError: if this process received SIGINT, SIGTERM, SIGHUP or SIGQUIT; all ranks are
            terminated.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        logs_specs=_RankLogs(logs, on_restart),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    with _contain_launcher(), _threads_per_rank(num_ranks):
        try:
            launch_agent(config, sys.executable, list(command))
        except ChildFailedError as error:
            raise first_failure(error.failures, logs) from None
        except SignalException as error:
            raise StoppedError(error.sigval) from None


class _RankLogs(LogsSpecs):
    """The log files of `LogFolder` in place of the launcher's own naming."""

    def __init__(self, logs: LogFolder, on_restart: Callable[[int], None]) -> None:
        super().__init__(log_dir=str(logs.run))
        self._logs, self._on_restart = logs, on_restart

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called before each start of the ranks with their environments."""
        restart = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self._logs.archive_attempt()
        if restart > 0:
            self._on_restart(restart)
        for rank, environment in envs.items():
            environment["TORCHELASTIC_ERROR_FILE"] = str(self._logs.error(rank))
            # Otherwise the last lines of a killed rank are lost.
            environment["PYTHONUNBUFFERED"] = "1"
        return LogsDest(
            stdouts={rank: str(self._logs.stdout(rank)) for rank in envs},
            stderrs={rank: str(self._logs.stderr(rank)) for rank in envs},
            error_files={rank: str(self._logs.error(rank)) for rank in envs},
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._logs.run)


def first_failure(failures: dict[int, ProcessFailure], logs: LogFolder) -> RankFailedError:
    """The first failure, which made the other ranks fail while waiting for this one."""
    start = min(failure.timestamp for failure in failures.values())

    def ended_by_launcher(failure: ProcessFailure) -> bool:
        # The launcher sends SIGTERM, and SIGKILL to the ranks that are still running later.
        late = failure.timestamp > start + SHUTDOWN_SECONDS
        return failure.exitcode == -signal.SIGTERM or (late and failure.exitcode == -signal.SIGKILL)

    def precedence(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        killed = failure.exitcode < 0
        return (2 if ended_by_launcher(failure) else 0 if killed else 1, failure.timestamp, rank)

    rank, failure = min(failures.items(), key=precedence)
    lost = frozenset(
        rank
        for rank, f in failures.items()
        if -f.exitcode in DEVICE_LOSS_SIGNALS and not ended_by_launcher(f)
    )
    log = f"its log: {logs.stderr(rank)}"
    if failure.exitcode < 0:
        reason = f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()}"
        return RankFailedError(f"{reason}; {log}", lost=lost)
    message = failure.error_file_data["message"]
    if not isinstance(message, dict):
        reason = f"rank {rank} exited with status {failure.exitcode}"
        return RankFailedError(f"{reason}; {log}", lost=lost)
    kind, _, text = message["message"].partition(": ")
    if kind == CommunicationError.__name__:
        return RankFailedError(f"rank {rank}: {text}; {log}", kind, text, lost)
    trace = message["extraInfo"]["py_callstack"].rstrip()
    return RankFailedError(f"rank {rank} failed; {log}\n{trace}", kind, text, lost)


@contextmanager
def _contain_launcher() -> Iterator[None]:
    """Undoes side effects of the launcher: restores the signal handlers that it installs, and keeps
    its log off the console, since `RankFailedError` reports the failure."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals}
    logger = logging.getLogger("torch.distributed.elastic")
    propagate, quiet = logger.propagate, logging.NullHandler()
    logger.addHandler(quiet)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(quiet)
        logger.propagate = propagate
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _threads_per_rank(num_ranks: int) -> Iterator[None]:
    """Divides the CPU cores among the ranks, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@dataclass(frozen=True)
class DeviceRange:
    """The minimum and maximum number of devices of an elastic run.

    Raises:
        ConfigError: unless 1 ≤ minimum ≤ maximum.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"--elastic {self.minimum}:{self.maximum}: expected MIN:MAX with 1 ≤ MIN ≤ MAX"
            )

    @staticmethod
    def parse(text: str) -> DeviceRange:
        """Raises:
        ConfigError: if the text is not `MIN:MAX`.
        """
        low, colon, high = text.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"--elastic {text}: expected MIN:MAX, for example 2:8")
        return DeviceRange(int(low), int(high))


def launch_elastic(
    command_for: Callable[[int], tuple[Sequence[str], int]],
    command: Sequence[str],
    devices: int,
    minimum: int,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    on_restart: Callable[[str], None],
) -> None:
    """Run `command` on `devices` ranks, and continue on fewer whenever some are killed.

    A device whose rank is killed counts as lost. If a rank fails with an error no device is lost,
    and the run restarts on the same number of devices, at most `max_restarts` times.

    Args:
        command_for: from the number of remaining devices to the command that continues the run and
            the number of devices that it uses.
        on_restart: called with a message that says why and on how many devices the run continues.

    Raises:
        RankFailedError: if fewer than `minimum` devices remain, or a rank failed and there are no
            restarts left.
        StoppedError: see `launch`.
    """
    devices_left, restarts = devices, 0
    while True:
        try:
            launch(command, devices, logs)
            return
        except RankFailedError as error:
            devices_left -= len(error.lost)
            restarts += not error.lost
            if devices_left < minimum:
                raise RankFailedError(
                    f"{error}\ndevices left: {devices_left}, fewer than the minimum of {minimum}"
                    " set by --elastic"
                ) from None
            if restarts > max_restarts:
                raise
            reason = str(error).partition(";")[0]
        command, devices = command_for(devices_left)
        on_restart(f"{reason}; devices left: {devices_left}; continuing on {devices}")
