"""Checksum files for `save_pretrained` weights and for token files, whose formats have none.

`NAME.checksum` has the size of the file `NAME` and the CRC-32 of each block. Readers verify only
the blocks that they read. A file without checksums is not verified.
"""

from __future__ import annotations

import json
import mmap
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from shardwright.plain_data import ErrorType, parse_json
from shardwright.text_files import read_text, write_text

BLOCK = 1 << 20
"""Size in bytes of the blocks into which a file is divided; each block has a checksum."""


def checksum_file(path: Path) -> Path:
    """Return the path of the file with the checksums of `path`."""
    return path.with_name(f"{path.name}.checksum")


def write_checksum(path: Path) -> None:
    """Write the checksum file of a complete file."""
    write_text(checksum_file(path), _compute_checksum_text(path))


def publish_with_checksum(partial: Path, path: Path) -> None:
    """Rename a complete file to `path`, and write its checksum file.

    Raises:
        OSError: if the checksums cannot be written; an existing `path` and its checksum file are
            not changed.
    """
    # Everything is on the disk before the first of the two names changes.
    checksums = checksum_file(partial)
    # A leftover, or a link, through which `write_text` would write.
    checksums.unlink(missing_ok=True)
    try:
        write_text(checksums, _compute_checksum_text(partial))
        partial.replace(path)
        checksums.replace(checksum_file(path))
    finally:
        # Still there only after a failure: otherwise it has its final name.
        checksums.unlink(missing_ok=True)


def _compute_checksum_text(path: Path) -> str:
    blocks = []
    with path.open("rb") as file:
        # Block by block, so that a file need not fit into memory.
        while block := file.read(BLOCK):
            blocks.append(zlib.crc32(block))
    content = FileChecksums(path.stat().st_size, BLOCK, blocks)
    return json.dumps(asdict(content)) + "\n"


@dataclass(frozen=True)
class FileChecksums:
    """Size of a file in bytes, size of its blocks, and the CRC-32 of each block."""

    size: Annotated[int, Field(ge=0)]
    block: Annotated[int, Field(ge=1)]
    crc32: list[int]

    @property
    def starts(self) -> range:
        """Offset in bytes of each block in the file."""
        return range(0, self.size, self.block)


@dataclass(frozen=True)
class CheckedFile:
    """A file whose blocks are verified against their checksums on first use.

    Args:
        path: the file.
        checksums: the contents of the file `NAME.checksum`.
        error_type: class of errors.
    """

    path: Path
    checksums: FileChecksums
    error_type: ErrorType

    @staticmethod
    def open(path: Path, error_type: ErrorType) -> CheckedFile | None:
        """Open a file with its checksums; return None if no `NAME.checksum` is beside it.

        Raises:
            error_type: if the checksums cannot be read, or the file has another size.
        """
        checksum_path = checksum_file(path)
        if not checksum_path.is_file():
            return None
        content = parse_json(read_text(checksum_path, error_type), str(checksum_path), error_type)
        try:
            # Only strict JSON refuses strings as integers, which may have any number of digits.
            checksums = TypeAdapter(FileChecksums).validate_json(json.dumps(content), strict=True)
        except ValidationError:
            checksums = None
        if checksums is None or len(checksums.crc32) != len(checksums.starts):
            raise error_type(
                f"the checksum file {checksum_path} is damaged\ndelete it to read {path.name} "
                "unverified"
            )
        file = CheckedFile(path, checksums, error_type)
        # Before any block is read, since the size alone shows a truncated file.
        if path.stat().st_size != checksums.size:
            problem = f"it has {path.stat().st_size} bytes, not {checksums.size}"
            raise file._make_checksum_error(problem)
        return file

    def verify(self, start: int = 0, end: int | None = None) -> None:
        """Verify the blocks with the bytes from `start` to `end`; by default all.

        Raises:
            error_type: if a block has changed.
        """
        checksums = self.checksums
        last = checksums.size if end is None else min(end, checksums.size)
        # The upper end is rounded up, as the last block may be partial.
        for number in range(start // checksums.block, -(-last // checksums.block)):
            if number in self._verified_block_numbers:
                continue
            first = checksums.starts[number]
            crc32 = zlib.crc32(self._map_file[first : first + checksums.block])
            if crc32 != checksums.crc32[number]:
                problem = f"the checksum of the bytes from {first} on differs"
                raise self._make_checksum_error(problem)
            self._verified_block_numbers.add(number)

    @cached_property
    def _verified_block_numbers(self) -> set[int]:
        return set()

    @cached_property
    # Mapped, so that only the blocks that are verified are read from the disk.
    def _map_file(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _make_checksum_error(self, reason: str) -> Exception:
        checksum_path = checksum_file(self.path).name
        return self.error_type(
            f"{self.path} is damaged: {reason}\n"
            f"copy it again; if it was written anew on purpose, delete {checksum_path}"
        )
