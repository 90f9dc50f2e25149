"""Lock the folders that a run writes, so that a second run cannot write into them.

A lock is an `flock` on an open file, which the ranks inherit. The kernel releases it when the last
process of the run ends, even by SIGKILL, so a leftover lock file locks nothing.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shardwright.errors import LockError

LOCK_FILE = ".lock"

PATIENCE = 2.0
"""Seconds to wait for a run that is just ending."""


@contextmanager
def lock_folders(*folders: Path) -> Iterator[tuple[int, ...]]:
    """Lock the folders, creating those that do not exist.

    Skips folders that this process, or the launcher that started it, has locked already.

    Yields:
        The file descriptors of the locks. Processes that inherit them keep the folders locked.

    Raises:
        LockError: if another run has locked one of the folders; names the folder and the process.
    """
    with ExitStack() as stack:
        yield tuple(
            lock
            for folder in dict.fromkeys(folder.absolute() for folder in folders)
            for lock in stack.enter_context(_lock(folder))
        )


@contextmanager
def _lock(folder: Path) -> Iterator[list[int]]:
    """Lock one folder; remove the lock file at the end, and the folder if it is new and empty."""
    path, is_new = folder / LOCK_FILE, not folder.exists()
    try:
        lock = _acquire(path)
    except OSError as error:
        raise LockError(f"{path}: {error.strerror}") from None
    if lock is None:
        yield []
        return
    try:
        yield [lock]
    finally:
        # Removed before it is released: a process that locks it now notices, by `_is_at`.
        path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        os.close(lock)


def _acquire(path: Path) -> int | None:
    """Open and lock a file.

    Returns:
        Its descriptor, or None if this run has locked it already or the file system has no locks.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileExistsError, FileNotFoundError):
            # The process that created the folder removed it between the two calls: try again.
            # If the parent is a file, it stays one.
            if path.parent.is_file() or time.monotonic() > deadline:
                raise
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            if holder.startswith((_process(os.getpid()), _process(os.getppid()))):
                return None
            if time.monotonic() > deadline:
                raise LockError(
                    f"{path.parent} is in use by {holder or 'another process'}\n"
                    "wait until it ends, or choose another folder"
                ) from None
            time.sleep(0.05)
            continue
        except OSError as error:
            os.close(file)
            warnings.warn(
                f"{path.parent}: its file system has no locks ({error.strerror})\n"
                "make sure that no second run writes into this folder",
                stacklevel=2,
            )
            return None
        if _is_at(path, file):
            os.truncate(file, 0)
            date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            os.write(file, f"{_process(os.getpid())}{date}".encode())
            return file
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Whether `file` is still the file at `path`; the previous holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _process(pid: int) -> str:
    """The text in a lock file, before the date; `_acquire` recognizes its own run by it."""
    return f"process {pid} on {socket.gethostname()} since "
