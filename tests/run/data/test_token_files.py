"""Sequences of tokens from files that people have."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.errors import DataError
from shardwright.run import Batches
from shardwright.run.data.token_files import token_sequences, write_tokens

TOKENS = np.random.default_rng(0).integers(0, 50_000, 1000)
ROWS = torch.tensor([3, 0, 60])


def wanted(length: int = 16) -> torch.Tensor:
    return torch.from_numpy(TOKENS[: 1000 // length * length].reshape(-1, length))


def header(magic: int) -> bytes:
    return struct.pack("<3i", magic, 1, len(TOKENS)).ljust(1024, b"\0")


def index(dtype: int) -> bytes:
    """Of one document of 400 tokens, and one of 600."""
    size = {4: 4, 8: 2}[dtype]
    start = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, dtype, 2, 3)
    return start + struct.pack("<2i2q3q", 400, 600, 0, 400 * size, 0, 1, 2)


@pytest.mark.parametrize(
    ("dtype", "start", "idx"),
    [
        ("uint16", b"", b""),
        ("uint16", header(20240520), b""),
        ("uint32", header(20240801), b""),
        ("int32", b"", index(4)),
        ("uint16", b"", index(8)),
    ],
    ids=["nanoGPT", "llm.c", "llm.c of 32 bits", "Megatron-LM", "Megatron-LM of 16 bits"],
)
def test_files_say_what_their_tokens_are(
    dtype: str, start: bytes, idx: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "train.bin"
    file.write_bytes(start + TOKENS.astype(dtype).tobytes())
    if idx:
        file.with_suffix(".idx").write_bytes(idx)
    ids, labels = token_sequences(file, 16, vocab_size=50_000)
    assert len(ids) == 62 and ids.seq_length == 16
    assert torch.equal(ids[ROWS], wanted()[ROWS]) and torch.equal(labels[ROWS], ids[ROWS])


@pytest.mark.parametrize("shape", [(1000,), (10, 100)])
@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_arrays_of_numpy_are_read_row_after_row(
    shape: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", TOKENS.astype(dtype).reshape(shape))
    assert torch.equal(token_sequences(tmp_path / "a.npy", 16)[0][ROWS], wanted()[ROWS])


def test_sequences_go_on_from_file_to_file_of_a_folder(tmp_path: Path) -> None:
    for number, piece in enumerate(np.array_split(TOKENS.astype("uint16"), [5, 6, 100, 500])):
        piece.tofile(tmp_path / f"{number}.bin")
    ids, _ = token_sequences(tmp_path, 50)
    assert torch.equal(ids[torch.arange(20)], wanted(50))


def test_a_file_of_any_size_is_read_only_where_a_batch_is(tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)  # A hole: 550 billion tokens that are 0.
    ids, _ = token_sequences(file, 2**30, dtype="uint16")
    assert len(ids) == 512
    order = Batches(token_sequences(file, 2**20, dtype="uint16"), batch_size=2)
    assert next(order.epoch(0))[0].shape == (2, 2**20)


def test_a_token_beyond_the_vocabulary_is_named_by_its_file_and_place(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(TOKENS[:500].astype("uint16").tobytes())
    (tmp_path / "b.bin").write_bytes(np.where(np.arange(500) == 77, 60_000, 5).astype("uint16"))
    ids, _ = token_sequences(tmp_path, 100, vocab_size=50_000)
    assert ids[torch.tensor([0, 4])].shape == (2, 100)
    with pytest.raises(DataError, match=r"b\.bin: token 77 has the id 60000, but .* is 50000"):
        ids[torch.tensor([5])]
    np.save(tmp_path / "negative.npy", np.full(100, -1))
    negative, _ = token_sequences(tmp_path / "negative.npy", 10, vocab_size=10)
    with pytest.raises(DataError, match="token 10 has the id -1"):
        negative[torch.tensor([1])]


def test_what_is_no_file_of_tokens_is_one_clear_error(tmp_path: Path) -> None:
    wide, short, empty = tmp_path / "wide.bin", tmp_path / "short.bin", tmp_path / "empty.bin"
    wide.write_bytes(TOKENS.astype("uint32").tobytes())
    with pytest.raises(DataError, match=r"wide\.bin: looks like uint32 tokens"):
        token_sequences(wide, 16)
    assert torch.equal(token_sequences(wide, 16, dtype="uint32")[0][ROWS], wanted()[ROWS])
    short.write_bytes(b"123")
    with pytest.raises(DataError, match="3 bytes are not a multiple of the size of a uint16 token"):
        token_sequences(short, 16)
    short.write_bytes(b"1234")
    with pytest.raises(DataError, match="2 tokens are less than one sequence of seq_length 16"):
        token_sequences(short, 16)
    empty.touch()
    with pytest.raises(DataError, match=r"empty\.bin: not a token file"):
        token_sequences(empty, 16)
    np.save(tmp_path / "real.npy", np.zeros(100))
    with pytest.raises(DataError, match="array of integers, got float64"):
        token_sequences(tmp_path / "real.npy", 16)
    (tmp_path / "text.npy").write_text("text")
    with pytest.raises(DataError, match=r"text\.npy: not a token file"):
        token_sequences(tmp_path / "text.npy", 16)
    with pytest.raises(DataError, match="no such file or folder"):
        token_sequences(tmp_path / "absent.bin", 16)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"the folder contains no \.bin or \.npy file"):
        token_sequences(tmp_path / "folder", 16)
    for damaged in (b"something else", index(4)[:18], index(4)[:50]):
        wide.with_suffix(".idx").write_bytes(damaged)
        with pytest.raises(DataError, match=r"wide\.idx: not the index"):
            token_sequences(wide, 16)
    wide.with_suffix(".idx").write_bytes(index(8))
    with pytest.raises(DataError, match=r"idx: damaged.* byte 2000 of 4000\nset `data.dtype`"):
        token_sequences(wide, 16)
    wide.with_suffix(".idx").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"wide\.idx: not the index"):
        token_sequences(wide, 16)


def test_damage_of_a_file_that_was_written_with_checksums_is_named_where_it_is_read(
    tmp_path: Path,
) -> None:
    path, size = tmp_path / "tokens.bin", 3 * 2**20
    write_tokens(path, (np.arange(size // 2) % 50_000).astype(np.uint16))
    sequences, _ = token_sequences(path, 16)
    expected = sequences[torch.tensor([0, len(sequences) - 1])]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    sequences, _ = token_sequences(path, 16)
    assert torch.equal(sequences[torch.tensor([0])], expected[:1])
    with pytest.raises(DataError, match=r"tokens\.bin is damaged: .* from 2097152 on differs"):
        sequences[torch.tensor([len(sequences) - 1])]
    with pytest.raises(DataError, match="uint16 or uint32 tokens, got int64"):
        write_tokens(path, np.arange(4))


def test_a_pipe_in_a_folder_of_token_files_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", np.arange(64, dtype=np.uint16))
    os.mkfifo(tmp_path / "b.bin")
    with pytest.raises(DataError, match=r"b\.bin: not a regular file\n"):
        token_sequences(tmp_path, 16)


def test_tokens_are_not_written_through_links_in_place_of_the_new_files(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    for name in (".tokens.bin.partial", ".tokens.bin.partial.checksum"):
        (tmp_path / name).symlink_to(other)
    write_tokens(tmp_path / "tokens.bin", np.arange(64, dtype=np.uint16))
    assert other.read_text() == "precious"
    sequences, _ = token_sequences(tmp_path / "tokens.bin", 32)
    assert len(sequences) == 2
