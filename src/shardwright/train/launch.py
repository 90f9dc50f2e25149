"""Starts the ranks as local processes through torch.distributed's own launcher.

The processes run the given command with the environment that torchrun would give them, so that a
rank cannot tell, and need not, who started it. Rank N writes to `<log folder>/1/rank.N/stdout` and
`stderr`. If one ends with an error or by a signal, the others are ended; then all are started again
where that is asked for.
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

# How long ranks may take to end after SIGTERM before they are killed.
SHUTDOWN_SECONDS = 5

# What ends a process from outside or because of its device; SIGABRT is how libraries end it.
LOSSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class LogFolder:
    """Where the ranks of one run write: `<root>/1/rank.N/…`."""

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
        """The exception that ended the rank, as torch.distributed's `record` writes it."""
        return self.rank(rank) / "error.json"

    def steps(self, rank: int) -> Path:
        """One JSON line for each step."""
        return self.rank(rank) / "steps.jsonl"

    @property
    def plan(self) -> Path:
        return self.run / "plan.json"

    def clear(self, num_ranks: int, keep_steps: bool = False) -> None:
        """Remove what an earlier run left, make a folder for each of `num_ranks` ranks.

        Args:
            keep_steps: leave the record of its steps, which a resumed run continues.
        """
        steps = self.steps(0)
        record = steps.read_bytes() if keep_steps and steps.exists() else None
        for old in self.run.glob("rank.[0-9]*"):
            shutil.rmtree(old)
        for rank in range(num_ranks):
            self.rank(rank).mkdir(parents=True)
        if record is not None:
            steps.write_bytes(record)

    def set_aside(self) -> None:
        """Give what all ranks wrote another name, `stdout.attempt-0` for example, before they are
        started again."""
        for folder in self.run.glob("rank.[0-9]*"):
            attempt = len(list(folder.glob("stdout.attempt-*")))
            for name in ("stdout", "stderr", "error.json"):
                if (folder / name).exists():
                    (folder / name).rename(folder / f"{name}.attempt-{attempt}")


class RankFailedError(Exception):
    """A rank ended with an error or by a signal; the message says which, why and where its log is.

    `kind` and `text` are the type's name and the text of the exception that ended it, where it left
    one. `lost` are the ranks that were killed.
    """

    def __init__(
        self, message: str, kind: str = "", text: str = "", lost: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.text = text
        self.lost = lost


class StoppedError(Exception):
    """The run was ended by a signal to the launching process, Ctrl-C for example."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}: all ranks are ended")
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
        max_restarts: how often all ranks are started again after one failed.
        on_restart: called with the number of the restart, from 1 on, before it.

    Raises:
        RankFailedError: a rank failed, once more than `max_restarts`; the others are ended.
        StoppedError: this process got SIGINT, SIGTERM, SIGHUP or SIGQUIT; all ranks are ended.
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
    with _own_signals_and_logging(), _threads_per_rank(num_ranks):
        try:
            launch_agent(config, sys.executable, list(command))
        except ChildFailedError as error:
            raise rank_failed(error.failures, logs) from None
        except SignalException as error:
            raise StoppedError(error.sigval) from None


class _RankLogs(LogsSpecs):
    """The log files of `LogFolder`, instead of the launcher's own scheme."""

    def __init__(self, logs: LogFolder, on_restart: Callable[[int], None]) -> None:
        super().__init__(log_dir=str(logs.run))
        self._logs, self._on_restart = logs, on_restart

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called before each start of all ranks, with what their environment will be."""
        restart = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self._logs.set_aside()
        if restart > 0:
            self._on_restart(restart)
        for rank, environment in envs.items():
            environment["TORCHELASTIC_ERROR_FILE"] = str(self._logs.error(rank))
            # Else a rank that is killed takes its last lines with it.
            environment["PYTHONUNBUFFERED"] = "1"
        return LogsDest(
            stdouts={rank: str(self._logs.stdout(rank)) for rank in envs},
            stderrs={rank: str(self._logs.stderr(rank)) for rank in envs},
            error_files={rank: str(self._logs.error(rank)) for rank in envs},
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._logs.run)


def rank_failed(failures: dict[int, ProcessFailure], logs: LogFolder) -> RankFailedError:
    """The failure that came first: a rank that dies makes the others fail in what waits for it."""
    start = min(failure.timestamp for failure in failures.values())

    def ended_by_us(failure: ProcessFailure) -> bool:
        # The launcher sends SIGTERM, and half a minute later SIGKILL to those that are still there.
        late = failure.timestamp > start + SHUTDOWN_SECONDS
        return failure.exitcode == -signal.SIGTERM or (late and failure.exitcode == -signal.SIGKILL)

    def precedence(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        killed = failure.exitcode < 0
        return (2 if ended_by_us(failure) else 0 if killed else 1, failure.timestamp, rank)

    rank, failure = min(failures.items(), key=precedence)
    lost = frozenset(
        rank for rank, f in failures.items() if -f.exitcode in LOSSES and not ended_by_us(f)
    )
    log = f"its log: {logs.stderr(rank)}"
    if failure.exitcode < 0:
        reason = f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}"
        return RankFailedError(f"{reason}; {log}", lost=lost)
    message = failure.error_file_data["message"]
    if not isinstance(message, dict):
        reason = f"rank {rank} ended with exit status {failure.exitcode}"
        return RankFailedError(f"{reason}; {log}", lost=lost)
    kind, _, text = message["message"].partition(": ")
    if kind == CommunicationError.__name__:
        return RankFailedError(f"rank {rank}: {text}; {log}", kind, text, lost)
    trace = message["extraInfo"]["py_callstack"].rstrip()
    return RankFailedError(f"rank {rank} failed; {log}\n{trace}", kind, text, lost)


@contextmanager
def _own_signals_and_logging() -> Iterator[None]:
    """The launcher installs signal handlers and logs each of its acts: undo the one afterwards, and
    keep the other off the console, where `RankFailedError` says it once."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in signals}
    logger = logging.getLogger("torch.distributed.elastic")
    propagate, quiet = logger.propagate, logging.NullHandler()
    logger.addHandler(quiet)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(quiet)
        logger.propagate = propagate
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _threads_per_rank(num_ranks: int) -> Iterator[None]:
    """Share the cores among the ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@dataclass(frozen=True)
class Range:
    """With how few and how many devices a run may go on.

    Raises:
        ConfigError: less than one device, or more at least than at most.
    """

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"--elastic {self.minimum}:{self.maximum}: expected MIN:MAX with 1 ≤ MIN ≤ MAX"
            )

    @staticmethod
    def parse(text: str) -> Range:
        """Raises: ConfigError: the text is not `MIN:MAX`."""
        low, colon, high = text.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"--elastic {text}: expected MIN:MAX, for example 2:8")
        return Range(int(low), int(high))


def launch_elastic(
    planned_for: Callable[[int], tuple[Sequence[str], int]],
    command: Sequence[str],
    devices: int,
    minimum: int,
    logs: LogFolder,
    *,
    max_restarts: int = 0,
    on_restart: Callable[[str], None],
) -> None:
    """Run `command` on `devices` ranks, and go on with fewer whenever some are killed.

    A device whose rank was killed counts as lost. A rank that fails with an error loses none: then
    all are started again on as many devices, at most `max_restarts` times.

    Args:
        planned_for: given how many devices are left, the command that goes on there and how many
            of them it uses.
        on_restart: told in words why and on how many devices the run goes on.

    Raises:
        RankFailedError: fewer than `minimum` devices are left, or a rank failed once more than
            `max_restarts`.
        StoppedError: as `launch`.
    """
    left, restarts = devices, 0
    while True:
        try:
            launch(command, devices, logs)
            return
        except RankFailedError as error:
            left -= len(error.lost)
            restarts += not error.lost
            if left < minimum:
                raise RankFailedError(
                    f"{error}\ndevices left: {left}, fewer than the {minimum} that --elastic allows"
                ) from None
            if restarts > max_restarts:
                raise
            reason = str(error).partition(";")[0]
        command, devices = planned_for(left)
        on_restart(f"{reason}; devices left: {left}; going on with {devices}")
