"""Locks on the folders that a run writes: a second run into the same folder is refused.

A lock belongs to an open file (`flock`), which ranks inherit. So it ends with the last process of
the run, however that process ends, and a file that is left behind locks nothing.
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

# How long to wait for a run that is ending, in seconds.
PATIENCE = 2.0


@contextmanager
def lock_folders(*folders: Path) -> Iterator[tuple[int, ...]]:
    """Locks the folders, which are created if they do not exist.

    A folder that this process has locked, or the launcher that started it, is left as it is.

    Yields:
        The file descriptors of the locks. Processes that inherit them keep the folders locked.

    Raises:
        LockError: if another process has locked one of them; the message says which.
    """
    with ExitStack() as stack:
        yield tuple(
            lock
            for folder in dict.fromkeys(folder.absolute() for folder in folders)
            for lock in stack.enter_context(_lock(folder))
        )


@contextmanager
def _lock(folder: Path) -> Iterator[list[int]]:
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
        path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        os.close(lock)


def _acquire(path: Path) -> int | None:
    """The open and locked file; None if this run has locked it, or no file can be locked there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileExistsError, FileNotFoundError):
            # Whoever has created the folder has removed it in between; else it is a file.
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
                    f"{path.parent} is in use by {holder or 'another process'}: wait until it ends,"
                    " or choose another folder"
                ) from None
            time.sleep(0.05)
            continue
        except OSError as error:
            os.close(file)
            warnings.warn(
                f"{path.parent}: its file system has no locks ({error.strerror}), so a second run"
                " into it is not refused",
                stacklevel=2,
            )
            return None
        if _is_at(path, file):
            os.truncate(file, 0)
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            os.write(file, f"{_process(os.getpid())}{now}".encode())
            return file
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is that of the path; who had it locked may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _process(number: int) -> str:
    return f"process {number} on {socket.gethostname()} since "
