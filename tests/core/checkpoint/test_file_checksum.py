"""Checksums beside files: damage is named, whether all of a file is read or a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.core.checkpoint import file_checksum
from shardwright.core.checkpoint.file_checksum import CheckedFile, checksum_file, write_checksum
from shardwright.errors import DataError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_checksum, "BLOCK", 10)
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(range(95)))
    write_checksum(path)
    return path


def checked(path: Path) -> CheckedFile:
    file = CheckedFile.open(path, DataError)
    assert file is not None
    return file


def test_an_intact_file_is_verified(path: Path) -> None:
    checked(path).verify()
    checked(path).verify(90, 200)
    path.write_bytes(b"")
    write_checksum(path)
    checked(path).verify()


def test_a_changed_block_is_named_when_it_is_read(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[34] ^= 1
    path.write_bytes(content)
    checked(path).verify(0, 30)
    checked(path).verify(40)
    for start, end in ((0, None), (29, 31), (39, 40)):
        with pytest.raises(DataError, match=r"tokens\.bin is damaged: .* from 30 on differs"):
            checked(path).verify(start, end)


def test_another_size_is_damage(path: Path) -> None:
    path.write_bytes(bytes(96))
    with pytest.raises(DataError, match="it has 96 bytes, not 95\ncopy it again"):
        checked(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"size": 95, "block": 0, "crc32": []}', "\0"])
def test_damaged_checksums_are_named(path: Path, text: str) -> None:
    checksum_file(path).write_text(text)
    with pytest.raises(DataError, match=r"tokens\.bin\.checksum"):
        checked(path)


def test_a_file_without_checksums_is_not_verified(path: Path) -> None:
    checksum_file(path).unlink()
    assert CheckedFile.open(path, DataError) is None


@pytest.mark.parametrize(
    "value", [-1, 0, 2**31, 2**63 - 1, 2**63, 2**64, 1e30, float("nan"), True, "9" * 30, [], None]
)
@pytest.mark.parametrize("key", ["size", "block", "crc32"])
def test_numbers_that_no_writer_writes_are_refused(path: Path, key: str, value: object) -> None:
    beside = checksum_file(path)
    content = json.loads(beside.read_text())
    beside.write_text(json.dumps({**content, key: [value] * 10 if key == "crc32" else value}))
    with pytest.raises(DataError, match=r"tokens\.bin"):
        checked(path).verify()
