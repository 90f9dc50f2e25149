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

MAX_WAIT_SECONDS = 2.0
"""Seconds to wait for a lock, in case the other run is just ending."""


@contextmanager
def lock_folders(*folders: Path) -> Iterator[tuple[int, ...]]:
    """Lock folders during a context, creating those that do not exist.

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
            for lock in stack.enter_context(_lock_folder(folder))
        )


@contextmanager
def _lock_folder(folder: Path) -> Iterator[list[int]]:
    """Lock one folder, and yield the descriptor of the lock, or an empty list if this run has
    locked it already.

    Removes the lock file at the end, and the folder if it was created here and is empty.
    """
    path, is_new = folder / LOCK_FILE, not folder.exists()
    try:
        lock = _acquire_lock(path)
    except OSError as error:
        raise LockError(f"{path}: {error.strerror}") from None
    if lock is None:
        yield []
        return
    try:
        yield [lock]
    finally:
        # The file is removed before the lock is released: a process that then gets the lock detects
        # by `_is_file_at` that its file is gone.
        path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        os.close(lock)


def _acquire_lock(path: Path) -> int | None:
    """Open and lock a file.

    Returns:
        The descriptor of the file; None if this run has locked it already or the file system does
        not support locks.
    """
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileExistsError, FileNotFoundError):
            # Another process removed the folder between the two calls: try again, unless the parent
            # is a file, so that no folder can be created.
            if path.parent.is_file() or time.monotonic() > deadline:
                raise
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            if holder.startswith(
                (_process_description(os.getpid()), _process_description(os.getppid()))
            ):
                return None
            if time.monotonic() > deadline:
                raise LockError(
                    f"{path.parent} is in use by {holder or 'another process'}\n"
                    "wait until that process ends, or choose another folder"
                ) from None
            time.sleep(0.05)
            continue
        except OSError as error:
            os.close(file)
            warnings.warn(
                f"{path.parent}: its file system does not support locks ({error.strerror})\n"
                "make sure that no second run writes into this folder",
                stacklevel=2,
            )
            return None
        if _is_file_at(path, file):
            os.truncate(file, 0)
            date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            os.write(file, f"{_process_description(os.getpid())}{date}".encode())
            return file
        os.close(file)


def _is_file_at(path: Path, file: int) -> bool:
    """Whether the descriptor `file` is the file at `path`; the last holder of the lock may have
    removed that file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _process_description(pid: int) -> str:
    """Return the text that identifies process `pid` in a lock file; the date follows it."""
    return f"process {pid} on {socket.gethostname()} since "
