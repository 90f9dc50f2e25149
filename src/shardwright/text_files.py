"""Read and write text files of bounded size; errors name the file and what is wrong with it."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardwright.errors import printable
from shardwright.plain_data import ErrorType

MAX_BYTES = 2**30
"""Maximum size of a file of settings; other files, such as /dev/zero, would fill the memory."""


PIPE_SECONDS = 10
"""Longest wait for a named pipe, which may be there by mistake and be written to by nobody."""


PIECE_BYTES = 2**20
"""Number of bytes that are read at a time from a file of limited size."""


def read_text(path: str | Path, error_type: ErrorType, max_bytes: int | None = MAX_BYTES) -> str:
    """Read a UTF-8 file, without the byte order mark that some editors write.

    Args:
        max_bytes: maximum size of the file; None for data, which may have any size.

    Raises:
        error_type: if the file is missing, is too large, cannot be read, or is not UTF-8 text.
    """
    with (
        _convert_file_errors(path, error_type),
        open(path, "rb", opener=_open_with_limit) as file,
    ):
        # One byte more, to notice a larger file; devices and pipes do not tell their size.
        content = file.read() if max_bytes is None else _read_at_most(file, max_bytes + 1)
    # Not in the context above, which would convert this error too.
    if max_bytes is not None and len(content) > max_bytes:
        raise error_type(f"{path}: larger than {max_bytes} bytes\npass the path of another file")
    with _convert_file_errors(path, error_type):
        # Line ends as of files that are opened as text.
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _read_at_most(file: BinaryIO, size: int) -> bytes:
    # In pieces: `file.read(size)` would allocate `size` bytes, also for a small file.
    content = bytearray()
    while piece := file.read(min(PIECE_BYTES, size - len(content))):
        content += piece
    return bytes(content)


def _open_with_limit(path: str, flags: int) -> int:
    """Open a file; a named pipe only if something is written to it within `PIPE_SECONDS`."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        # Pipes of a shell, such as `<(shardwright plan ...)`, have no name, and may take minutes.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and Path(path).resolve().exists():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(1000 * PIPE_SECONDS):
                problem = f"a pipe to which nothing was written for {PIPE_SECONDS} s"
                raise OSError(errno.ETIMEDOUT, f"{problem}\npass the path of a file")
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_exists(path: str | Path, error_type: ErrorType) -> None:
    """Raise `error_type` if a file does not exist.

    Does not open the file, because the content of a pipe can be read only once.
    """
    with _convert_file_errors(path, error_type):
        Path(path).stat()


@contextmanager
def _convert_file_errors(path: str | Path, error_type: ErrorType) -> Iterator[None]:
    """Context that re-raises errors of reading `path` as `error_type`, with the path as prefix."""
    # The path is one line of the message, whatever its characters.
    path = printable(str(path), lines=False)
    try:
        yield
    except FileNotFoundError:
        raise error_type(f"{path}: no such file\npass the path of an existing file") from None
    except UnicodeDecodeError as error:
        raise error_type(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start})\nsave the file as UTF-8"
        ) from None
    # A path with a null byte raises ValueError.
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise error_type(f"{path}: {reason}") from None


def check_path(path: Path) -> None:
    """Raise OSError, as for other paths that cannot be written, in place of Python's ValueError for
    a path that is not a text of the file system: one with a null byte or an unpaired surrogate."""
    try:
        is_text = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise OSError(errno.EINVAL, "not a path: it has control characters", str(path))


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file. A failure, such as a full disk, leaves an existing file as it was.

    Raises:
        OSError: if the file cannot be written.
    """
    target = Path(path)
    check_path(target)
    with suppress(FileNotFoundError):
        target.stat()  # Raises OSError for a loop of links.
    # A pipe or device cannot be replaced by a rename.
    if target.exists() and not target.is_file():  # Such as /dev/stdout.
        _write_to_device(target, text)
        return
    # Through links, so that a rename replaces the file and not the link to it.
    target = target.resolve()
    # A rename would replace a file that its user has protected against writing.
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    partial = partial_file(target, f".{os.getpid()}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # On disk before the rename, or a crash could leave an empty file in place of the old
            # one.
            os.fsync(file.fileno())
        if target.exists():
            # The new file has the permissions of the old one instead of the umask's.
            partial.chmod(stat.S_IMODE(target.stat().st_mode))
        partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            # The name of the user's file, which is the one that could not be written.
            error.filename, error.filename2 = str(path), None
        raise


def _write_to_device(path: Path, text: str) -> None:
    """Write to a pipe or device; to a named pipe only if it is read from within `PIPE_SECONDS`."""

    def open_with_limit(name: str, flags: int) -> int:
        deadline = time.monotonic() + PIPE_SECONDS
        while True:
            try:
                descriptor = os.open(name, flags | os.O_NONBLOCK)
            except OSError as error:
                # A pipe from which nothing reads, or a socket.
                if error.errno != errno.ENXIO or time.monotonic() > deadline:
                    raise
                time.sleep(PIPE_SECONDS / 100)
            else:
                os.set_blocking(descriptor, True)
                return descriptor

    try:
        with open(path, "w", encoding="utf-8", opener=open_with_limit) as file:
            file.write(text)
    except OSError as error:
        error.filename = str(path)
        raise


def partial_file(target: Path, suffix: str = "") -> Path:
    """Return the path of a new file that replaces `target` once it is complete.

    Removes a leftover of an interrupted process at this path. The caller must open the path with
    mode `x`, which refuses links: another user's link could redirect the write to any file.

    Raises:
        OSError: if a leftover cannot be removed.
    """
    check_path(target)
    # Hidden, unlike files of the user. In the same folder, since a rename is atomic only within a
    # file system. File systems limit names to 255 bytes, and a character may have several.
    prefix = os.fsencode(target.name)[:200].decode(errors="ignore")
    partial = target.with_name(f".{prefix}{suffix}.partial")
    try:
        partial.unlink(missing_ok=True)
    except OSError as error:
        # The name of the user's file, which is the one that could not be written.
        error.filename = str(target)
        raise
    return partial
