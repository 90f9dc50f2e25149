"""How a run ended that did not succeed, and which rank made it fail: the others then fail too,
because they wait for it."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import CommunicationError
from shardwright.run.launch.log_folder import LogFolder

# Signals that indicate a lost device; SIGABRT is not one of them, libraries raise it on errors.
DEVICE_LOSS_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


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


@dataclass(frozen=True)
class RankError:
    """The exception that terminated a rank."""

    kind: str
    text: str
    traceback: str

    @staticmethod
    def read(file: Path) -> RankError | None:
        """What torch.distributed's `record` wrote; None if it wrote nothing, or not all of it."""
        try:
            message = json.loads(file.read_text())["message"]
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        kind, _, text = message["message"].partition(": ")
        return RankError(kind, text, message["extraInfo"]["py_callstack"].rstrip())

    @property
    def is_consequence(self) -> bool:
        """Whether another rank is to blame."""
        return self.kind == CommunicationError.__name__


@dataclass(frozen=True)
class RankEnd:
    """How the process of a rank ended.

    Args:
        status: its exit status; minus the number of the signal that killed it, if one did; None if
            nothing could end it.
        time: when it was seen to have ended, on any clock.
        signals: those that the launcher sent to it.
        stopped_by: the signal by which it was stopped when the launcher ended it, if it was.
        error: the exception that it raised, if it did.
    """

    rank: int
    pid: int
    status: int | None
    time: float
    signals: frozenset[int] = frozenset()
    stopped_by: int | None = None
    error: RankError | None = None

    @property
    def killed_by(self) -> int | None:
        """The signal that killed it, unless the launcher sent that."""
        if self.status is None or self.status >= 0 or -self.status in self.signals:
            return None
        return -self.status

    @property
    def is_lost(self) -> bool:
        return self.killed_by in DEVICE_LOSS_SIGNALS

    @property
    def failed_by_itself(self) -> bool:
        """Whether no other rank can be to blame."""
        if self.error is not None:
            return not self.error.is_consequence
        return self.killed_by is not None or (self.status not in (0, None) and not self.signals)

    @property
    def explains(self) -> bool:
        """Whether no other rank can explain the failure better."""
        return self.is_lost or (self.error is not None and self.failed_by_itself)

    def __str__(self) -> str:
        name = f"rank {self.rank} (process {self.pid})"
        if self.killed_by is not None:
            return f"{name} was killed by {signal.Signals(self.killed_by).name}"
        if self.stopped_by is not None:
            return f"{name} was stopped by {signal.Signals(self.stopped_by).name}"
        if self.error is not None and self.error.is_consequence:
            return f"rank {self.rank}: {self.error.text}"
        if self.error is not None:
            return f"rank {self.rank} failed"
        if self.signals:
            return f"{name} did not answer the others"
        return f"rank {self.rank} exited with status {self.status}"


def first_failure(ends: Sequence[RankEnd], logs: LogFolder) -> RankFailedError:
    """The failure that the others follow from. In this order: ranks that were killed; that were
    stopped; that failed by themselves; that still ran when others gave up waiting; that gave up.
    """
    groups = (
        [end for end in ends if end.is_lost],
        [end for end in ends if end.stopped_by is not None],
        [end for end in ends if end.failed_by_itself],
        [end for end in ends if end.signals and end.error is None],
        [end for end in ends if end.error is not None],
    )
    causes = sorted(next(filter(None, groups)), key=lambda end: (end.time, end.rank))
    first, error = causes[0], causes[0].error
    told = [first] if error is not None else [end for end in causes if end.error is None]
    message = f"{', '.join(map(str, told))}; its log: {logs.stderr(first.rank)}"
    if error is not None and not error.is_consequence:
        message += f"\n{error.traceback}"
    elif error is None and first.killed_by is None:
        waited = [end for end in ends if end.error is not None and end.error.is_consequence]
        message += "".join(f"\n{end}" for end in waited[:1])
    lost = frozenset(end.rank for end in ends if end.is_lost)
    return RankFailedError(message, error.kind if error else "", error.text if error else "", lost)
