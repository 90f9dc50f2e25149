"""Read and write `checkpoint.json`: a checkpoint's contents other than tensors, and checksums.

The last entry is the checksum of all bytes before it, so that any changed bit is detected. CRC-32
checksums detect damage, but not manipulation.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwright.core.checkpoint.position import Position
from shardwright.errors import CheckpointError, DamagedCheckpointError, ShardwrightWarning
from shardwright.plain_data import parse_json

VERSION = 2
INFO_FILE = "checkpoint.json"

_LAST_ENTRY = ',\n "checksum": '
_BLOCK_BYTES = 1 << 22
"""Bytes per read when the checksum of a file is computed."""

# Threads suffice, as reads and `zlib.crc32` of large blocks release the GIL.
_VERIFYING_THREADS = 4


class CheckpointWarning(ShardwrightWarning):
    """Warning that a checkpoint is damaged, has no checksums, or replaces optimizer settings."""


@dataclass(frozen=True)
class FileChecksum:
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class RunNumbers:
    """Seeds and number of samples, which determine a run's order of samples and random numbers.

    Args:
        samples: number of samples in the dataset.
        data_seed: seed of the order of the samples.
        seed: seed of parameters and random operators.
    """

    samples: int
    data_seed: int
    seed: int


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a checkpoint other than tensors.

    Args:
        position: the position of the run in its data.
        groups: the settings of each of the optimizer's parameter groups; None without an optimizer.
        random: seed and step of the parallelized model's random operators; None if the model was
            not parallelized.
        fingerprint: fingerprint of the plan's model; None if unknown.
        devices: number of devices of the plan; None if unknown.
        optimizer: class name of the optimizer; None if unknown.
        run: seeds and number of samples of the run; None if unknown.
        files: the checksum of every file but `checkpoint.json`, by name; empty in checkpoints of
            version 1.
    """

    position: Position
    groups: list[dict[str, Any]] | None
    random: tuple[int, int] | None
    fingerprint: str | None
    devices: int | None
    optimizer: str | None = None
    run: RunNumbers | None = None
    files: Mapping[str, FileChecksum] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content of `checkpoint.json`, checksum included."""
        return _append_checksum(
            # Without the closing brace, so that the checksum can be appended as the last entry.
            json.dumps({"version": VERSION, **asdict(self)}, indent=1).removesuffix("\n}")
        )

    @staticmethod
    def read(folder: Path) -> CheckpointInfo:
        """Read the `checkpoint.json` of a checkpoint, and verify its checksum.

        Args:
            folder: the folder of the checkpoint.

        Raises:
            DamagedCheckpointError: if the file is missing or damaged.
            CheckpointError: if the folder does not exist, or the version is not supported.
        """
        path = folder / INFO_FILE
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: the checkpoint folder does not exist\n"
                "pass the folder of a run, and the step of one of its checkpoints"
            )
        try:
            content = _read_entries(path)
            version = content.pop("version")
        # Damaged bytes may still be JSON, of any structure.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
            raise _make_damage_error(path, error) from None
        # Before the entries are checked, as another version may have other entries.
        if version not in (1, VERSION):
            raise CheckpointError(
                f"{folder}: unsupported checkpoint version {version}\n"
                f"use the release that saved the checkpoint; this release supports versions 1 and"
                f" {VERSION}"
            )
        try:
            # Only strict JSON refuses strings as integers, which may have any number of digits.
            info = TypeAdapter(CheckpointInfo).validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise _make_damage_error(path, error) from None
        # A path instead of a name would make the run read files outside of the checkpoint.
        for name in info.files:
            if not is_plain_name(name):
                raise _make_damage_error(path, ValueError(f"{name!r} is not the name of a file"))
        return info


def is_plain_name(name: str) -> bool:
    """Whether `name` is a plain file name: no path, and neither `.` nor `..`."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def open_regular_file(path: Path) -> io.BufferedReader:
    """Open a file of a checkpoint to read its bytes.

    Raises:
        OSError: if the file cannot be opened or is not a regular file. Through a link or a pipe, an
            untrusted checkpoint could make a run read other files, or wait forever.
    """
    # O_NOFOLLOW makes a link an error; without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags)
    except OSError as error:
        # The system's own text, "too many levels of symbolic links", would mislead.
        if error.errno == errno.ELOOP:
            raise OSError(f"{path.name} is a link: replace it with a copy of its target") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path.name} is not a regular file: copy the original file into the folder")
    return io.BufferedReader(io.FileIO(file, "rb"))


def find_damage(folder: Path, files: Iterable[tuple[str, FileChecksum]]) -> str | None:
    """Verify checksums of files in parallel threads.

    Args:
        folder: the folder of the checkpoint.
        files: (name, expected checksum) of each file.

    Returns:
        A description of the first file that is missing, truncated or damaged; None if all are
        intact.
    """
    with ThreadPoolExecutor(_VERIFYING_THREADS) as pool:
        problems = pool.map(lambda file: _describe_file_damage(folder / file[0], file[1]), files)
        return next((problem for problem in problems if problem is not None), None)


def _describe_file_damage(path: Path, checksum: FileChecksum) -> str | None:
    crc32, block = 0, memoryview(bytearray(_BLOCK_BYTES))
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != checksum.size:
                return f"{path} is damaged: it has {size} bytes, not {checksum.size}"
            # Into one buffer, without a new object of 4 MB for each block.
            while count := file.raw.readinto(block):
                crc32 = zlib.crc32(block[:count], crc32)
    except OSError as error:
        return str(_make_damage_error(path, error))
    return None if crc32 == checksum.crc32 else f"{path} is damaged: its checksum does not match"


def _append_checksum(body: str) -> str:
    return f'{body}{_LAST_ENTRY}"{zlib.crc32(body.encode()):08x}"\n}}\n'


def _read_entries(path: Path) -> dict[str, Any]:
    """Read `checkpoint.json`, verify the checksum, and return the other entries.

    Raises:
        ValueError: if the checksum does not match, or is missing in a file of the current version.
    """
    with open_regular_file(path) as file:
        file_text = file.read().decode()
    body, last_entry, _ = file_text.rpartition(_LAST_ENTRY)
    # The text is compared as a whole, so that damage behind the checksum is found too.
    if last_entry and file_text != _append_checksum(body):
        raise ValueError(
            f"the checksum of {path.name} does not match its content: copy the checkpoint again"
        )
    content: dict[str, Any] = parse_json(file_text, path.name, CheckpointError)
    # Checkpoints of version 1 have no checksum.
    if content.pop("checksum", None) is None and content["version"] == VERSION:
        raise ValueError(f"{path.name} has no entry 'checksum': copy the checkpoint again")
    return content


def _make_damage_error(path: Path, error: Exception) -> DamagedCheckpointError:
    missing = isinstance(error, FileNotFoundError)
    # The second line of a message is its remedy, here the inner error's.
    reason = str(error).partition("\n")[0]
    if isinstance(error, OSError) and error.errno:
        reason = os.strerror(error.errno)
    return DamagedCheckpointError(
        f"{path} is missing" if missing else f"{path} is damaged: {reason}"
    )
