"""`checkpoint.json`: what a checkpoint holds other than tensors, and the checksums of its files.

Its last entry is the checksum of all bytes before it, so a changed bit anywhere is noticed. The
checksums are CRC-32: they protect against damage, not against people, who could change both.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwright.core.checkpoint.position import Position
from shardwright.errors import CheckpointError, DamagedCheckpointError

VERSION = 2
INFO_FILE = "checkpoint.json"

_LAST_ENTRY = ',\n "checksum": '
_BLOCK = 1 << 22
_THREADS = 4


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, cannot be proved intact, or replaces settings of the optimizer."""


@dataclass(frozen=True)
class FileChecksum:
    """The size of a file in bytes, and the CRC-32 of its content."""

    size: int
    crc32: int


@dataclass(frozen=True)
class RunNumbers:
    """The numbers of a run on which the order of its samples and its random numbers depend.

    Args:
        samples: number of samples in the dataset.
        data_seed: seed of their order.
        seed: of parameters and random operators.
    """

    samples: int
    data_seed: int
    seed: int


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a checkpoint other than tensors.

    Args:
        position: the position of the run.
        groups: the settings of the optimizer's parameter groups; None without an optimizer.
        random: seed and step of the program's random operators; None if the model was not
            parallelized.
        fingerprint, devices: those of the plan; None if it is unknown.
        optimizer: the name of the optimizer's class; None if it is unknown.
        run: the numbers of the run that saved it; None if they are unknown.
        files: the checksum of every other file; empty in checkpoints of version 1.
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
        return _with_checksum(
            json.dumps({"version": VERSION, **asdict(self)}, indent=1).removesuffix("\n}")
        )

    @staticmethod
    def read(folder: Path) -> CheckpointInfo:
        """Raises:
        DamagedCheckpointError: if `checkpoint.json` is missing, or a bit of it was changed.
        CheckpointError: if the folder is not a checkpoint, or has an unsupported version.
        """
        path = folder / INFO_FILE
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a checkpoint: there is no such folder")
        try:
            content = _verified(path)
            version = content.pop("version")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, error) from None
        if version not in (1, VERSION):
            raise CheckpointError(
                f"{folder}: unsupported checkpoint version {version}; this version of Shardwright"
                f" reads versions 1 and {VERSION}"
            )
        try:
            return TypeAdapter(CheckpointInfo).validate_python(content)
        except ValidationError as error:
            raise _damaged(path, error) from None


def find_damage(folder: Path, files: Iterable[tuple[str, FileChecksum]]) -> str | None:
    """What is wrong with the first of `files` that is missing, truncated or damaged; None if all
    are as they were written. Files are read in parallel."""
    with ThreadPoolExecutor(_THREADS) as pool:
        problems = pool.map(lambda each: _damage_of(folder / each[0], each[1]), files)
        return next((problem for problem in problems if problem is not None), None)


def _damage_of(path: Path, checksum: FileChecksum) -> str | None:
    crc32, block = 0, memoryview(bytearray(_BLOCK))
    try:
        size = path.stat().st_size
        if size != checksum.size:
            return f"{path} is damaged: it has {size} bytes, not {checksum.size}"
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                crc32 = zlib.crc32(block[:count], crc32)
    except OSError as error:
        return str(_damaged(path, error))
    return None if crc32 == checksum.crc32 else f"{path} is damaged: its checksum does not match"


def _with_checksum(body: str) -> str:
    return f'{body}{_LAST_ENTRY}"{zlib.crc32(body.encode()):08x}"\n}}\n'


def _verified(path: Path) -> dict[str, Any]:
    """The entries of `checkpoint.json` other than its checksum.

    Raises:
        ValueError: if its checksum does not match, or it has none but needs one.
    """
    text = path.read_bytes().decode()
    body, last_entry, _ = text.rpartition(_LAST_ENTRY)
    if last_entry and text != _with_checksum(body):
        raise ValueError("its checksum does not match")
    content: dict[str, Any] = json.loads(text)
    if content.pop("checksum", None) is None and content["version"] == VERSION:
        raise ValueError("its checksum is missing")
    return content


def _damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    missing = isinstance(error, FileNotFoundError)
    reason = str(error).partition("\n")[0]
    if isinstance(error, OSError) and error.errno:
        reason = os.strerror(error.errno)
    return DamagedCheckpointError(
        f"{path} is missing" if missing else f"{path} is damaged: {reason}"
    )
