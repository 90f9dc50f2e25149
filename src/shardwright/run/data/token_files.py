"""Token sequences from memory-mapped files, and from folders saved by `datasets`."""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.core.checkpoint.file_checksum import CheckedFile, publish_with_checksum
from shardwright.errors import DataError, needs_extra
from shardwright.text_files import partial_file

LLM_C_DTYPES = {20240520: "uint16", 20240801: "uint32"}
"""Token dtype of an llm.c file, by its magic number, the first of 256 int32 header values."""

MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Token dtype of a Megatron-LM dataset, by byte 17 of its `.idx` file."""

MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Start of an `.idx` file: magic bytes, version, dtype, numbers of sequences and of documents."""


@dataclass(frozen=True)
class TokenArray:
    """A contiguous memory-mapped array of tokens.

    Args:
        source: name of the file or folder, for error messages.
        values: token ids, integers [tokens].
        first: index within `source` of the array's first token.
        checked: verifies the file's checksums when it is read; None if it has no checksums.
    """

    source: str
    values: NDArray[Any]
    first: int = 0
    checked: CheckedFile | None = None

    def read(self, start: int, length: int, vocab_size: int | None) -> NDArray[np.int64]:
        """Read up to `length` tokens; fewer at the end of the array.

        Raises:
            DataError: if a token id is not below `vocab_size`, or the file is damaged.
        """
        if self.checked is not None:
            # `offset` of a memory map is the length of the file's header; Arrow columns have none.
            offset, size = getattr(self.values, "offset", 0), self.values.itemsize
            self.checked.verify(offset + start * size, offset + (start + length) * size)
        tokens: NDArray[np.int64] = self.values[start : start + length].astype(np.int64)
        # Tokens of a signed dtype may be negative.
        invalid = (tokens < 0) | (tokens >= (vocab_size or np.inf))
        if vocab_size is not None and invalid.any():
            index = int(invalid.argmax())
            raise DataError(
                f"{self.source}: token {self.first + start + index} has the id {tokens[index]}, but"
                f" the model's `vocab_size` is {vocab_size}\ncheck `data.dtype`, and that the file"
                " was written with the tokenizer of the model"
            )
        return tokens


@dataclass(frozen=True)
class TokenSequences:
    """Consecutive sequences of `seq_length` tokens over the concatenation of all arrays.

    Sequences are read on access. An incomplete last sequence is dropped.

    Args:
        vocab_size: exclusive upper bound of token ids; None for no check.

    Raises:
        DataError: if the arrays have fewer than `seq_length` tokens in total.
    """

    arrays: tuple[TokenArray, ...]
    seq_length: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if len(self) == 0:
            source, tokens = self.arrays[0].source, self._array_end_positions[-1]
            raise DataError(
                f"{source}: {tokens} tokens are less than one sequence of seq_length"
                f" {self.seq_length}\nuse a smaller `data.seq_length`, or more tokens"
            )

    def __len__(self) -> int:
        return self._array_end_positions[-1] // self.seq_length

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """Read the sequences with the indices `rows`, as int64 [len(rows), seq_length].

        Raises:
            DataError: if a token id is not below the vocabulary size.
        """
        return torch.from_numpy(np.stack([self._read_sequence(row) for row in rows.tolist()]))

    def _read_sequence(self, index: int) -> NDArray[np.int64]:
        # Positions are those of the concatenation: a sequence may span several arrays.
        position, end = index * self.seq_length, (index + 1) * self.seq_length
        pieces = []
        while position < end:
            array_index = bisect_right(self._array_end_positions, position)
            array, array_end = self.arrays[array_index], self._array_end_positions[array_index]
            start = position - array_end + len(array.values)
            pieces.append(array.read(start, end - position, self.vocab_size))
            # The array may end within the sequence, whose rest the next array has.
            position += len(pieces[-1])
        return np.concatenate(pieces)

    @cached_property
    def _array_end_positions(self) -> list[int]:
        """Token position in the concatenation at which each array ends."""
        return list(accumulate(len(array.values) for array in self.arrays))


def token_sequences(
    path: Path, seq_length: int, vocab_size: int | None = None, dtype: str | None = None
) -> tuple[TokenSequences, TokenSequences]:
    """Open token files as sequences of equal length.

    Args:
        path: a `.npy` file; a `.bin` file without a header, of llm.c, or of Megatron-LM with its
            `.idx`; a folder of these files, read in order of their names; or a folder saved by
            `datasets`, with a column `input_ids` and optionally `labels`.
        seq_length: tokens per sequence.
        vocab_size: exclusive upper bound of token ids; None for no check.
        dtype: dtype of `.bin` files without a header, by default uint16.

    Returns:
        Token sequences, and label sequences, not shifted. The labels are the tokens themselves
        unless the data has a column `labels`.

    Raises:
        DataError: if the file does not exist, is not a token file, or has fewer than `seq_length`
            tokens.
    """
    labels: tuple[TokenArray, ...] = ()
    if is_saved_dataset(path):
        tokens, labels = (
            _read_token_id_column(path, "input_ids"),
            _read_token_id_column(path, "labels", optional=True),
        )
    else:
        files = [path]
        if path.is_dir():
            # Sorted, because the order of `iterdir` may differ between nodes.
            files = sorted(file for file in path.iterdir() if file.suffix in (".bin", ".npy"))
        if not files or not files[0].is_file():
            contains = "the folder contains no .bin or .npy file"
            problem = contains if path.is_dir() else "no such file or folder"
            raise DataError(
                f"cannot read tokens from {path}: {problem}\nset `data.path` to a token file or a "
                "folder of token files"
            )
        tokens = tuple(_open_token_file(file, dtype) for file in files)
    sequences = TokenSequences(tokens, seq_length, vocab_size)
    # The same object for both, so that a batch reads the file only once. A label may be -100, which
    # no vocabulary has, so labels are not checked.
    return sequences, TokenSequences(labels, seq_length) if labels else sequences


def write_tokens(path: str | Path, tokens: NDArray[Any]) -> None:
    """Write token ids to a `.bin` file without a header, with its checksums beside it.

    Args:
        path: the file to write.
        tokens: uint16 [tokens], or uint32, for which a configuration needs `data.dtype: uint32`.

    Raises:
        DataError: if the dtype is neither uint16 nor uint32, or the file cannot be written; an
            earlier file stays as it was.
    """
    path = Path(path)
    if str(tokens.dtype) not in ("uint16", "uint32") or path.suffix != ".bin":
        raise DataError(
            f"{path}: expected a .bin file and uint16 or uint32 tokens, got {tokens.dtype}\n"
            "convert them, for example with tokens.astype(numpy.uint32)"
        )
    # Little-endian on every machine, as readers of `.bin` files assume.
    content = np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<"))
    try:
        partial = partial_file(path)
        try:
            # Not `tofile`, whose error hides the cause, such as a full disk.
            with partial.open("xb") as file:
                file.write(content.data)
            publish_with_checksum(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}\n"
            "free some space, or use another folder"
        ) from None


def _open_token_file(file: Path, dtype: str | None) -> TokenArray:
    if not file.is_file():  # Opening a pipe would wait for a writer.
        raise DataError(f"{file}: not a regular file\nremove it from the folder of token files")
    checked = CheckedFile.open(file, DataError)
    if checked is not None:
        # The first block now, so that a damaged file is reported before training.
        checked.verify(0, 1)
    return TokenArray(str(file), _map_token_file(file, dtype), checked=checked)


def _map_token_file(file: Path, dtype: str | None) -> NDArray[Any]:
    """Memory-map a token file.

    Raises:
        DataError: if the file is not a contiguous array of integers.
    """
    try:
        if file.suffix == ".npy":
            # A pickled array could run code.
            array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
            if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
                raise DataError(
                    f"{file}: expected a contiguous array of integers, got {array.dtype}"
                    f" {list(array.shape)}\nsave it with"
                    " np.save(file, np.ascontiguousarray(tokens, np.uint32))"
                )
            return array.reshape(-1)
        token_dtype, offset = _read_dtype_and_header_size(file, dtype)
        size = file.stat().st_size - offset
        if size % np.dtype(token_dtype).itemsize:
            raise DataError(
                f"{file}: {size} bytes are not a multiple of the size of a {token_dtype} token\n"
                "check `data.dtype`, and that the file is complete"
            )
        array = np.memmap(file, np.dtype(token_dtype).newbyteorder("<"), "r", offset)
    except DataError:
        raise
    except Exception as error:  # Damaged headers can raise anything.
        raise DataError(
            f"{file}: not a token file: {error}\nuse a `.npy` or `.bin` file of token ids"
        ) from None
    # Little-endian uint32 tokens read as uint16 have their upper halves at odd positions, below 4
    # for vocabularies of up to 262,144 tokens. Tested on 4,096 values, without reading more of the
    # file.
    upper_halves = array[1:4096:2]
    is_default = dtype is None and offset == 0 and token_dtype == "uint16"
    # At least 9 values, as a few may be below 4 by chance.
    if is_default and len(upper_halves) > 8 and upper_halves.max() < 4:
        raise DataError(
            f"{file}: looks like uint32 tokens, because every second uint16 value is below 4\n"
            "set `data.dtype` to uint32, or to uint16 if the tokens do have 16 bits"
        )
    return array


def _read_dtype_and_header_size(file: Path, dtype: str | None) -> tuple[str, int]:
    """Return the token dtype of a `.bin` file, and the length of its header in bytes."""
    index = file.with_suffix(".idx")
    # An explicit dtype wins, for a token file with an index of something else beside it.
    if dtype is None and index.is_file():
        return _read_megatron_dtype(index, file), 0
    with file.open("rb") as content:
        start = content.read(4)
    magic = struct.unpack("<I", start)[0] if len(start) == 4 else 0
    # A header of 256 int32 values has 1,024 bytes.
    return (LLM_C_DTYPES[magic], 1024) if magic in LLM_C_DTYPES else (dtype or "uint16", 0)


def _read_megatron_dtype(index: Path, file: Path) -> str:
    """Return the token dtype of a Megatron-LM dataset, after a check of its index.

    The index has no checksum. Instead, its last sequence must end at the end of the token file. A
    wrong dtype or an incomplete file fails this check.

    Raises:
        DataError: if the index is damaged, or belongs to another file.
    """
    dtype: str | None = None
    sequences = 0
    with index.open("rb") as content:
        start = content.read(MEGATRON_HEADER.size)
        if len(start) == MEGATRON_HEADER.size:
            magic, version, code, sequences, _ = MEGATRON_HEADER.unpack(start)
            if (magic, version) == (b"MMIDIDX\0\0", 1):
                dtype = MEGATRON_DTYPES.get(code)
        # An index has 12 bytes per sequence: 4 for its length and 8 for its start.
        if dtype is None or 12 * sequences > index.stat().st_size - MEGATRON_HEADER.size:
            raise DataError(
                f"{index}: not the index file of a Megatron-LM dataset\n"
                f"set `data.dtype` to read {file.name} without an index file"
            )
        end = _read_end_of_last_sequence(content, sequences, np.dtype(dtype).itemsize)
    size = file.stat().st_size
    if end != size:
        raise DataError(
            f"{index}: damaged, or the index of another file: its last sequence ends at byte {end}"
            f" of {size}\nset `data.dtype` to read {file.name} without an index file"
        )
    return dtype


def _read_end_of_last_sequence(index_file: BinaryIO, num_sequences: int, itemsize: int) -> int:
    """Return the end of the last sequence of a Megatron-LM index, in bytes of the token file."""
    if num_sequences == 0:
        return 0
    # First the lengths of all sequences in 32 bits, then where they start in 64 bits.
    index_file.seek(MEGATRON_HEADER.size + 4 * (num_sequences - 1))
    (length,) = struct.unpack("<i", index_file.read(4))
    index_file.seek(MEGATRON_HEADER.size + 12 * num_sequences - 8)
    (first,) = struct.unpack("<q", index_file.read(8))
    return int(first + length * itemsize)


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder saved by `datasets`."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_dataset(path: Path, column: str) -> Any:
    """Load the `datasets.Dataset` saved at `path`, memory-mapped.

    Args:
        column: a column that the dataset must have.

    Raises:
        DataError: if `datasets` is not installed, the folder is damaged or has several splits, or
            the column is missing.
    """
    with needs_extra("datasets", f"{path}: a saved dataset needs `datasets`", DataError):
        from datasets import DatasetDict, load_from_disk
    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # Damaged files can raise anything.
        raise DataError(
            f"{path}: `datasets` cannot load this folder: {error}\n"
            "use a folder written by `save_to_disk`"
        ) from None
    if isinstance(dataset, DatasetDict):
        raise DataError(
            f"{path}: the dataset has several splits: {', '.join(dataset)}\n"
            f"use one of them, for example {path}/{next(iter(dataset))}"
        )
    if column not in dataset.column_names:
        raise DataError(
            f"{path}: the dataset has no column `{column}`, only"
            f" {', '.join(dataset.column_names)}\n"
            "set `data.name: tokens` to read the column `input_ids`, or `data.name: text` to read"
            " the column `text`"
        )
    return dataset


def _read_token_id_column(path: Path, name: str, optional: bool = False) -> tuple[TokenArray, ...]:
    dataset = saved_dataset(path, "input_ids")
    if optional and name not in dataset.column_names:
        return ()
    arrays, first = [], 0
    for chunk in dataset.data.column(name).chunks:
        try:
            # Without copies, so that the column stays mapped, however large it is.
            values = chunk.flatten().to_numpy(zero_copy_only=True)
        except (AttributeError, ValueError) as error:
            raise DataError(
                f"{path}: the column `{name}` does not contain lists of token ids: {error}\n"
                "save the dataset with a column of integer lists without missing values"
            ) from None
        arrays.append(TokenArray(f"{path}, column {name}", values, first))
        first += len(values)
    return tuple(arrays)
