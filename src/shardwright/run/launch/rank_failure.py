"""Find the rank that caused a run to fail; the other ranks fail because they wait for that rank."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import CommunicationError
from shardwright.run.launch.log_folder import LogFolder

# Signals that indicate a lost device. Not SIGABRT, which libraries raise on ordinary errors.
DEVICE_LOSS_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

_CAUSES_OF_SIGNALS = {
    signal.SIGKILL: "the kernel kills processes when memory runs out, and so do schedulers: see"
    " `dmesg`, and use fewer processes or smaller batches",
    signal.SIGBUS: "a file that was mapped into memory was truncated, or a disk or /dev/shm is"
    " full: check `df`, and that no input file changes during the run",
    signal.SIGSEGV: "native code has crashed: set PYTHONFAULTHANDLER=1 to see where, in its log",
}
"""Usual cause and remedy of signals that kill a process without a message, by signal."""


class RankFailedError(Exception):
    """Error of a failed or killed rank; the message gives the rank, the reason and its log.

    Args:
        exception_type, exception_message: type name and message of the exception that ended the
            rank; empty if no exception ended it.
        lost_ranks: ranks killed by one of `DEVICE_LOSS_SIGNALS`, whose devices count as lost.
    """

    def __init__(
        self,
        message: str,
        exception_type: str = "",
        exception_message: str = "",
        lost_ranks: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.exception_type = exception_type
        self.exception_message = exception_message
        self.lost_ranks = lost_ranks


class StoppedError(Exception):
    """Error that ends a run after a signal to stop, for example by Ctrl-C.

    Args:
        signal_number: number of the signal.
        outcome: state in which the run ended, as text.
    """

    def __init__(self, signal_number: int, outcome: str = "all ranks have been terminated") -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {outcome}")
        self.signal_number = signal_number


@dataclass(frozen=True)
class RankError:
    """Type name, message and traceback of the exception that ended a rank."""

    exception_type: str
    message: str
    traceback: str

    @staticmethod
    def read(file: Path) -> RankError | None:
        """Read the JSON file of `torch.distributed`'s `record`; None if the file is missing,
        truncated or damaged."""
        try:
            message = json.loads(file.read_text())["message"]
            exception_type, _, reason = message["message"].partition(": ")
            return RankError(exception_type, reason, message["extraInfo"]["py_callstack"].rstrip())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    @property
    def stop(self) -> StoppedError | None:
        """The rank's exception as a StoppedError; None if the rank raised another exception."""
        if self.exception_type != StoppedError.__name__:
            return None
        # The message is `stopped by SIGTERM; …`, with the name of the signal.
        reason, _, outcome = self.message.partition("; ")
        return StoppedError(signal.Signals[reason.rpartition(" ")[2]], outcome)

    @property
    def is_consequence(self) -> bool:
        """Whether the exception is the consequence of another rank's failure."""
        return self.exception_type == CommunicationError.__name__


@dataclass(frozen=True)
class RankEnd:
    """Exit status, time, signals and exception of the ended process of a rank.

    Args:
        rank, pid: rank and process id.
        status: exit status; the negative signal number if a signal killed the process; None if the
            process could not be killed.
        time: monotonic time in seconds at which the launcher observed the end.
        signals: signals that the launcher sent to the process.
        stopped_by: the signal, such as SIGSTOP, that had stopped the process before the launcher
            killed it; None if the process was running.
        error: the exception that ended the process; None if no exception ended it.
        deleted_log: end of the rank's `stderr` if it was deleted during the run.
    """

    rank: int
    pid: int
    status: int | None
    time: float
    signals: frozenset[int] = frozenset()
    stopped_by: int | None = None
    error: RankError | None = None
    deleted_log: str = ""

    @property
    def killed_by(self) -> int | None:
        """The signal that killed the process, unless the launcher sent it; otherwise None."""
        if self.status is None or self.status >= 0 or -self.status in self.signals:
            return None
        return -self.status

    @property
    def is_lost(self) -> bool:
        """Whether a signal that indicates a lost device killed the process."""
        return self.killed_by in DEVICE_LOSS_SIGNALS

    @property
    def failed_by_itself(self) -> bool:
        """Whether the rank failed by itself, not as a consequence of another rank's failure."""
        if self.error is not None:
            return not self.error.is_consequence and self.error.stop is None
        # Without an exception, and not because the launcher has ended it.
        return self.killed_by is not None or (self.status not in (0, None) and not self.signals)

    @property
    def is_root_cause(self) -> bool:
        """Whether the rank lost its device or raised an error that no other rank caused."""
        # An exit status without an exception does not tell whether another rank caused the failure.
        return self.is_lost or (self.error is not None and self.failed_by_itself)

    def __str__(self) -> str:
        name = f"rank {self.rank} (process {self.pid})"
        if self.killed_by is not None:
            return f"{name} was killed by {signal.Signals(self.killed_by).name}"
        if self.stopped_by is not None:
            return f"{name} was stopped by {signal.Signals(self.stopped_by).name}"
        if self.error is not None and self.error.is_consequence:
            # Without the remedy, to read the logs of other ranks, which this error names.
            summary, _, _ = self.error.message.partition("\n")
            return f"rank {self.rank}: {summary}"
        if self.error is not None:
            # Its traceback follows in the message of `first_failure`.
            return f"rank {self.rank} failed"
        if self.signals:
            return f"{name} did not answer the other ranks"
        return f"rank {self.rank} exited with status {self.status}"


def requested_stop(ends: Sequence[RankEnd]) -> StoppedError | None:
    """Return the first StoppedError that ended a rank; None without one."""
    stops = (end.error.stop for end in ends if end.error is not None)
    return next((stop for stop in stops if stop is not None), None)


def first_failure(ends: Sequence[RankEnd], logs: LogFolder) -> RankFailedError:
    """Return the error of the rank that most likely caused the failures of the others.

    In order of preference: a rank that lost its device, was stopped by a signal, failed by itself,
    did not answer the other ranks, or timed out. Ties go to the earliest end.

    Args:
        ends: the end of each rank; at least one is a failure.
    """
    groups = (
        [end for end in ends if end.is_lost],
        [end for end in ends if end.stopped_by is not None],
        [end for end in ends if end.failed_by_itself],
        # The launcher had to end these: they neither failed nor answered the others.
        [end for end in ends if end.signals and end.error is None],
        [end for end in ends if end.error is not None],
    )
    causes = sorted(next(filter(None, groups)), key=lambda end: (end.time, end.rank))
    first, error = causes[0], causes[0].error
    # One exception names its rank; several ranks that were killed are all named.
    named_ends = [first] if error is not None else [end for end in causes if end.error is None]
    log = logs.stderr(first.rank)
    where = f"its log: {log}" if log.exists() else f"its log was deleted during the run: {log}"
    message = f"{', '.join(map(str, named_ends))}; {where}"
    if error is not None and not error.is_consequence:
        message += f"\n{error.traceback}"
    elif first.deleted_log:
        message += f"\n{first.deleted_log}"
    elif first.killed_by in _CAUSES_OF_SIGNALS:
        message += f"\n{_CAUSES_OF_SIGNALS[signal.Signals(first.killed_by)]}"
    elif error is None and first.killed_by is None:
        # Adds one timed-out rank, whose message names the collective in which it waited.
        timed_out = [end for end in ends if end.error is not None and end.error.is_consequence]
        message += "".join(f"\n{end}" for end in timed_out[:1])
    # Several devices may be lost at once, so all ranks count, not only the first.
    lost_ranks = frozenset(end.rank for end in ends if end.is_lost)
    return RankFailedError(
        message, error.exception_type if error else "", error.message if error else "", lost_ranks
    )
