"""Lock the folders that a run writes, so that a second run cannot write there.

A lock is an `flock` on an open file, which the ranks inherit. The kernel releases the lock when the
last process of the run ends, even by SIGKILL, so that a leftover lock file locks nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shardwright.errors import LockError, warn_user
from shardwright.text_files import check_path

LOCK_FILE = ".lock"

PROBE_BYTES = 4096
"""Size of the file written to test a folder: one block of a disk, as an empty file also fits on a
full disk."""

_LOCK_TEXT = "process "
"""Text with which every lock file begins."""

_NO_LINKS_OR_PIPES = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of `os.open` that refuse links, and open pipes and devices without waiting."""

MAX_WAIT_SECONDS = 2.0
"""Maximum seconds to wait for a lock whose holder is about to exit."""


@contextmanager
def lock_folders(*folders: Path) -> Iterator[tuple[int, ...]]:
    """Context manager that creates and locks folders.

    Folders that this process or its launcher has locked already are skipped.

    Yields:
        The file descriptors of the locks. Processes that inherit the descriptors keep the folders
        locked.

    Raises:
        LockError: if another run has locked a folder, or a lock file cannot be written.
    """
    with ExitStack() as stack:
        yield tuple(
            lock
            for folder in dict.fromkeys(folder.absolute() for folder in folders)
            for lock in stack.enter_context(_lock_folder(folder))
        )


@contextmanager
def _lock_folder(folder: Path) -> Iterator[list[int]]:
    """Context manager that locks one folder.

    On exit removes the lock file, and the folder if it is new and empty.

    Yields:
        A list with the file descriptor of the lock; empty if this run has locked the folder
        already, or the file system does not support locks.
    """
    path, is_new = folder / LOCK_FILE, not folder.exists()
    try:
        check_path(folder)
    except OSError as error:
        raise LockError(f"cannot lock {path}: {error.strerror}\nuse a plain path") from None
    try:
        lock = _acquire_lock(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _make_foreign_file_error(path) from None
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise LockError(f"cannot lock {path}: {error.strerror}\nuse a writable folder") from None
    if lock is None:
        yield []
        return
    try:
        _check_writable(folder)
        yield [lock]
    finally:
        # The file is removed before the lock is released: the next process that acquires the lock
        # detects by `_is_file_at_path` that its file is gone. An error here would replace
        # the error that ends the run, and a leftover file locks nothing.
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        os.close(lock)


def _check_writable(folder: Path) -> None:
    """Raise LockError if no file can be written to a folder.

    The lock alone does not show this: a lock file of a killed run in a folder that has become
    read-only can still be locked."""
    probe = folder / f"{LOCK_FILE}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        try:
            probe.write_bytes(b"\0" * PROBE_BYTES)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise LockError(
            f"cannot write to {folder}: {error.strerror}\n"
            "use a writable folder, on a disk with free space"
        ) from None


def _acquire_lock(path: Path) -> int | None:
    """Open and lock a file.

    Returns:
        The file descriptor; None if this run has locked the file already, or the file system does
        not support locks.

    Raises:
        LockError: if another run has locked the file, or the file is not a lock file.
        OSError: if the file cannot be created.
    """
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without O_TRUNC, as the file has the name of the process that holds the lock.
            file = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS_OR_PIPES, 0o666)
        except (FileExistsError, FileNotFoundError):
            # Another process removed the folder between the two calls: try again, unless the parent
            # is a file, so that no folder can be created.
            if path.parent.is_file() or time.monotonic() > deadline:
                raise
            continue
        if not _is_lock_file(file):
            os.close(file)
            raise _make_foreign_file_error(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            # A rank of a launcher that has locked the folder for all its ranks.
            if holder.startswith((_format_lock_text(os.getpid()), _format_lock_text(os.getppid()))):
                return None
            # The holder may be about to exit, such as a run that is restarted.
            if time.monotonic() > deadline:
                raise LockError(
                    f"{path.parent} is in use by {holder or 'another process'}\n"
                    "wait until that process ends, or choose another folder"
                ) from None
            time.sleep(0.05)
            continue
        # Network file systems may not support `flock`: a warning, as the run itself is not
        # affected.
        except OSError as error:
            os.close(file)
            warn_user(
                f"{path.parent}: its file system does not support locks ({error.strerror})\n"
                "make sure that no second run writes into this folder",
            )
            return None
        # If not, the previous holder has removed the file since it was opened here, and the loop
        # opens the new one.
        if _is_file_at_path(path, file):
            _write_lock_text(path, file)
            return file
        os.close(file)


def _write_lock_text(path: Path, file: int) -> None:
    """Write the name of this process to the lock file that it holds.

    Raises:
        OSError: if nothing can be written, such as to a full disk; the lock file is removed.
    """
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    try:
        os.truncate(file, 0)
        os.write(file, f"{_format_lock_text(os.getpid())}{date}".encode())
    except OSError:
        with suppress(OSError):
            path.unlink()
        os.close(file)
        raise


def _is_lock_file(descriptor: int) -> bool:
    """Whether an open file is a lock file, whose content may be replaced."""
    status = os.fstat(descriptor)
    # A file with several names may be any file of the user. It has none if the previous holder of
    # the lock has just removed it.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        return False
    return status.st_size == 0 or os.pread(descriptor, len(_LOCK_TEXT), 0) == _LOCK_TEXT.encode()


def _make_foreign_file_error(path: Path) -> LockError:
    return LockError(
        f"{path} is not a lock file, but a link or another file\nmove it, or use another folder"
    )


def _is_file_at_path(path: Path, descriptor: int) -> bool:
    """Whether `descriptor` refers to the file at `path`, which another run may have removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _format_lock_text(pid: int) -> str:
    """Return the text of a lock file of process `pid`, without the date at the end."""
    return f"{_LOCK_TEXT}{pid} on {socket.gethostname()} since "
