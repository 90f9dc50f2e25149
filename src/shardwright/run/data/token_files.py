"""Sequences of tokens in memory-mapped files of any size, and what `datasets` has saved."""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.errors import DataError, needs_extra

LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""The first number in files of llm.c, which have a header of 256 numbers of 32 bits, and what their
tokens are."""

MEGATRON = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""The byte after the first 17 of the `.idx` beside a `.bin` of Megatron-LM, as a dtype."""


@dataclass(frozen=True)
class TokenArray:
    """Tokens that lie in a row in memory-mapped storage.

    Args:
        source: the file or folder, for errors.
        values: whole numbers, [tokens].
        first: the number of its first token in the source.
    """

    source: str
    values: NDArray[Any]
    first: int = 0

    def read(self, start: int, length: int, vocab_size: int | None) -> NDArray[np.int64]:
        """Up to `length` tokens. Raises: DataError: one is not of the vocabulary."""
        tokens: NDArray[np.int64] = self.values[start : start + length].astype(np.int64)
        wrong = (tokens < 0) | (tokens >= (vocab_size or np.inf))
        if vocab_size is not None and wrong.any():
            place = int(wrong.argmax())
            raise DataError(
                f"{self.source}: token {self.first + start + place} is {tokens[place]}, but the"
                f" model's vocab_size is {vocab_size}: the file is of another tokenizer, or of"
                " another data.dtype"
            )
        return tokens


@dataclass(frozen=True)
class TokenSequences:
    """Sequences of `seq_length` tokens, one after another through all arrays; what does not fill
    the last is left out. Only the sequences that are asked for are read.

    Args:
        vocab_size: what tokens must be below; None for no check.

    Raises:
        DataError: if there is less than one sequence.
    """

    arrays: tuple[TokenArray, ...]
    seq_length: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if len(self) == 0:
            source, tokens = self.arrays[0].source, self._ends[-1]
            raise DataError(
                f"{source}: {tokens} tokens are less than one sequence of seq_length"
                f" {self.seq_length}"
            )

    def __len__(self) -> int:
        return self._ends[-1] // self.seq_length

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """The sequences of these numbers, [rows, seq_length].

        Raises:
            DataError: a token is not of the vocabulary.
        """
        return torch.from_numpy(np.stack([self._sequence(row) for row in rows.tolist()]))

    def _sequence(self, number: int) -> NDArray[np.int64]:
        place, end = number * self.seq_length, (number + 1) * self.seq_length
        pieces = []
        while place < end:
            index = bisect_right(self._ends, place)
            array, after = self.arrays[index], self._ends[index]
            start = place - after + len(array.values)
            pieces.append(array.read(start, end - place, self.vocab_size))
            place += len(pieces[-1])
        return np.concatenate(pieces)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(array.values) for array in self.arrays))


def token_sequences(
    path: Path, seq_length: int, vocab_size: int | None = None, dtype: str | None = None
) -> tuple[TokenSequences, TokenSequences]:
    """Sequences of tokens, and their labels, which language models shift.

    Args:
        path: a `.npy` file; a `.bin` file of bare tokens, of llm.c, or of Megatron-LM with its
            `.idx`; a folder of such files, in the order of their names; or a folder that `datasets`
            has saved with a column `input_ids` and, unless labels are the same, `labels`.
        dtype: of bare tokens, by default uint16.

    Raises:
        DataError: if there is no such file, it holds no tokens, or less than one sequence.
    """
    labels: tuple[TokenArray, ...] = ()
    if is_saved_dataset(path):
        tokens, labels = _column(path, "input_ids"), _column(path, "labels", optional=True)
    else:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in (".bin", ".npy"))
        if not files or not files[0].is_file():
            problem = "no .bin or .npy file in it" if path.is_dir() else "no such file or folder"
            raise DataError(f"{path}: {problem}")
        tokens = tuple(TokenArray(str(file), _mapped(file, dtype)) for file in files)
    sequences = TokenSequences(tokens, seq_length, vocab_size)
    return sequences, TokenSequences(labels, seq_length) if labels else sequences


def _mapped(file: Path, dtype: str | None) -> NDArray[Any]:
    """Raises: DataError: the file holds no whole numbers in a row."""
    try:
        if file.suffix == ".npy":
            array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
            if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
                raise DataError(f"{file}: holds {array.dtype}, not whole numbers in a row")
            return array.reshape(-1)
        kind, offset = _layout_of(file, dtype)
        size = file.stat().st_size - offset
        if size % np.dtype(kind).itemsize:
            raise DataError(f"{file}: {size} bytes are no whole number of {kind} tokens")
        array = np.memmap(file, np.dtype(kind).newbyteorder("<"), "r", offset)
    except (ValueError, OSError) as error:  # Empty, truncated, or without permission.
        raise DataError(f"{file}: not a file of tokens: {error}") from None
    high = array[1:4096:2]
    if dtype is None and offset == 0 and kind == "uint16" and len(high) > 8 and high.max() < 4:
        raise DataError(
            f"{file}: looks like tokens of 32 bits, as every second number of 16 bits is below 4:"
            " set data.dtype to uint32, or to uint16 if it is not so"
        )
    return array


def _layout_of(file: Path, dtype: str | None) -> tuple[str, int]:
    """What the tokens of a `.bin` file are, and after how many bytes they begin."""
    index = file.with_suffix(".idx")
    if dtype is None and index.is_file():
        with index.open("rb") as content:
            start = content.read(18)
        if start.startswith(b"MMIDIDX") and len(start) == 18 and start[17] in MEGATRON:
            return MEGATRON[start[17]], 0
        raise DataError(f"{index}: not the index of a file of tokens by Megatron-LM")
    with file.open("rb") as content:
        start = content.read(4)
    number = struct.unpack("<I", start)[0] if len(start) == 4 else 0
    return (LLM_C[number], 1024) if number in LLM_C else (dtype or "uint16", 0)


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` has saved the folder."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_dataset(path: Path, column: str) -> Any:
    """The `datasets.Dataset` that was saved at `path`, memory-mapped.

    Raises:
        DataError: if `datasets` is not installed, the folder is damaged, holds several splits, or
            has no such column.
    """
    with needs_extra("datasets", f"{path}: a folder of datasets needs datasets", DataError):
        from datasets import DatasetDict, load_from_disk
    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # Damaged files can raise anything.
        raise DataError(f"{path}: datasets cannot load it: {error}") from None
    if isinstance(dataset, DatasetDict):
        raise DataError(
            f"{path}: has the splits {', '.join(dataset)}: give {path}/{next(iter(dataset))}"
        )
    if column not in dataset.column_names:
        raise DataError(
            f"{path}: has no column {column}, only {', '.join(dataset.column_names)}: set data.name"
            " to tokens for a column input_ids, and to text for a column text"
        )
    return dataset


def _column(path: Path, name: str, optional: bool = False) -> tuple[TokenArray, ...]:
    dataset = saved_dataset(path, "input_ids")
    if optional and name not in dataset.column_names:
        return ()
    arrays, first = [], 0
    for chunk in dataset.data.column(name).chunks:
        try:
            values = chunk.flatten().to_numpy(zero_copy_only=True)
        except (AttributeError, ValueError) as error:
            raise DataError(f"{path}: column {name} holds no lists of tokens: {error}") from None
        arrays.append(TokenArray(f"{path}, column {name}", values, first))
        first += len(values)
    return tuple(arrays)
