"""In-memory datasets (images, packed text), and global batches of a dataset."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.core.checkpoint.position import Position
from shardwright.errors import DataError, needs_extra
from shardwright.run.data.token_files import is_saved_dataset, saved_dataset
from shardwright.text_files import read_text

# Mean and standard deviation of the pixels of MNIST's training images, scaled to 0…1.
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
IMAGES_FILE, LABELS_FILE = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
DIGITS_SIZE, MNIST_SIZE = 8, 28

MAX_GZIPPED_BYTES = 2**31
"""Maximum size of a decompressed IDX file; EMNIST, the largest published one, has 0.55 GB."""


class Samples(Protocol):
    """One field of a dataset: a tensor with samples on dimension 0, or a lazy reader of a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Batches:
    """Shuffled global batches of a dataset.

    The sample order of an epoch depends only on `seed` and the epoch, so every rank gets the same
    global batches, on any number of devices. An incomplete last batch is dropped.

    Args:
        tensors: the fields of the dataset, with samples on dimension 0.
        batch_size: samples per global batch.
        seed: shuffling seed.

    Raises:
        DataError: if the tensors differ in their number of samples, or do not fill one batch.
    """

    tensors: tuple[Samples, ...]
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        counts = [len(tensor) for tensor in self.tensors]
        if len(set(counts)) != 1:
            raise DataError(
                f"the tensors of the dataset have different numbers of samples: {counts}\n"
                "dimension 0 must have the same size in all tensors"
            )
        if len(self) == 0:
            raise DataError(
                f"the dataset has only {counts[0]} samples, less than one batch of "
                f"{self.batch_size}\nuse a `batch_size` of at most {counts[0]}"
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.samples // self.batch_size

    @property
    def samples(self) -> int:
        """Number of samples in the dataset, the size of dimension 0 of its tensors."""
        return len(self.tensors[0])

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: index of the epoch.
            first: position in the epoch's shuffled order at which to start.
        """
        # SeedSequence mixes both numbers: `seed + epoch` would repeat the orders of another seed.
        seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        # A generator of the CPU, so that the order is equal on all device types.
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.samples, generator=generator)
        # Language models have the tokens themselves as labels: read the same file only once.
        distinct = {id(tensor): tensor for tensor in self.tensors}
        # The bound drops an incomplete last batch, wherever the epoch is entered.
        for start in range(first, self.samples - self.batch_size + 1, self.batch_size):
            rows = order[start : start + self.batch_size]
            batch = {key: tensor[rows] for key, tensor in distinct.items()}
            yield tuple(batch[id(tensor)] for tensor in self.tensors)

    def first_sample(self, position: Position) -> int:
        """Return the index of the first sample at `position` in the epoch's shuffled order."""
        # A position without `sample` comes from an epoch whose batches all have the same size.
        return position.batch * self.batch_size if position.sample is None else position.sample

    def position_after(self, position: Position) -> Position:
        """Return the position of the batch after the batch at `position`."""
        step, end = position.step + 1, self.first_sample(position) + self.batch_size
        # The next batch would be incomplete and is dropped, so the epoch ends here.
        if end + self.batch_size > self.samples:
            return Position(step, position.epoch + 1, 0, 0)
        return Position(step, position.epoch, position.batch + 1, end)

    def steps_from(self, position: Position, epochs: int) -> int:
        """Return the number of batches from `position` to the end of a run of `epochs` epochs."""
        if position.epoch >= epochs:
            return 0
        # Negative if the position of a checkpoint with another batch size is beyond the samples.
        rest_of_epoch = max(0, self.samples - self.first_sample(position)) // self.batch_size
        return rest_of_epoch + (epochs - position.epoch - 1) * len(self)


def digits(image_size: int = DIGITS_SIZE) -> tuple[Tensor, Tensor]:
    """Load scikit-learn's handwritten digits.

    For sizes above 8, pixels are repeated and the border is zero-padded: images of size 28 have
    centered digits of 24 x 24 pixels, similar to MNIST.

    Returns:
        Images [1797, 1, image_size, image_size] with values in 0…1, and labels [1797].

    Raises:
        DataError: if scikit-learn is not installed, or `image_size` is below 8.
    """
    if image_size < DIGITS_SIZE:
        raise DataError(
            f"image_size={image_size} is too small\nuse at least {DIGITS_SIZE} pixels per side"
        )
    with needs_extra("run", "the digits dataset needs `scikit-learn`", DataError):
        from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    # Pixels of this dataset are numbers from 0 to 16.
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, DIGITS_SIZE, DIGITS_SIZE) / 16.0
    repeat = image_size // DIGITS_SIZE
    images = images.repeat_interleave(repeat, 2).repeat_interleave(repeat, 3)
    border = image_size - DIGITS_SIZE * repeat
    leading, trailing = border // 2, border - border // 2
    images = torch.nn.functional.pad(images, (leading, trailing, leading, trailing))
    return images, torch.tensor(labels, dtype=torch.int64)


def mnist(folder: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Load MNIST's training set from its IDX files, plain or gzipped.

    Args:
        folder: the folder of the files, by default the environment variable DATA_PATH.

    Returns:
        Images [samples, 1, rows, columns], normalized to mean 0 and standard deviation 1, and
        labels [samples].

    Raises:
        DataError: if the folder or a file is missing, or a file is malformed.
    """
    location = folder if folder is not None else os.environ.get("DATA_PATH")
    if not location:
        raise DataError(
            f"no folder of MNIST files is set\nset `data.path` or the environment variable"
            f" DATA_PATH to the folder with {IMAGES_FILE} and {LABELS_FILE} (plain or .gz)"
        )
    path = Path(location).expanduser()
    if not path.is_dir():
        raise DataError(
            f"{path}: no such folder\nuse a folder with MNIST's {IMAGES_FILE} and {LABELS_FILE} "
            f"(plain or .gz)"
        )
    images_path, labels_path = (
        _find_plain_or_gzipped_file(path, IMAGES_FILE),
        _find_plain_or_gzipped_file(path, LABELS_FILE),
    )
    pixels, labels = read_idx(images_path, ndim=3), read_idx(labels_path, ndim=1)
    if len(pixels) != len(labels):
        raise DataError(
            f"{images_path} has {len(pixels)} images, but {labels_path} has {len(labels)} labels\n"
            "use the images and labels of the same dataset"
        )
    # Scaled to 0…1, for which the published mean and standard deviation are given.
    images = torch.from_numpy(pixels).unsqueeze(1).to(torch.float32) / 255.0
    return (images - MNIST_MEAN) / MNIST_STD, torch.from_numpy(labels).to(torch.int64)


def mnist_or_digits() -> tuple[Tensor, Tensor]:
    """Load MNIST if the environment variable DATA_PATH is set, otherwise the digits.

    Returns:
        Images [samples, 1, 28, 28], normalized to mean 0 and standard deviation 1, and labels
        [samples].

    Raises:
        DataError: if the MNIST files are missing or malformed, or scikit-learn is not installed.
    """
    if os.environ.get("DATA_PATH"):
        return mnist()
    images, labels = digits(MNIST_SIZE)
    # The mean and standard deviation of MNIST are those of other images.
    return (images - images.mean()) / images.std(), labels


def read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes with `ndim` dimensions.

    The format (http://yann.lecun.com/exdb/mnist): two zero bytes, the type (8 = unsigned byte),
    the number of dimensions, each dimension as a big-endian 32-bit integer, the data.

    Raises:
        DataError: if the type is not unsigned bytes, the file length does not match the header, or
            a gzipped file is larger than `MAX_GZIPPED_BYTES`.
    """
    is_gzipped = path.suffix == ".gz"
    try:
        with gzip.open(path) if is_gzipped else path.open("rb") as file:
            shape = _read_idx_shape(path, file.read(4 + 4 * ndim), ndim)
            # Never more than the header announces: a few KB of gzip can expand to any size.
            size = math.prod(shape)
            if is_gzipped and size > MAX_GZIPPED_BYTES:
                raise DataError(
                    f"{path}: the shape {list(shape)} in its header needs {size} bytes, more than"
                    f" the limit of {MAX_GZIPPED_BYTES} bytes for gzip files\n"
                    "decompress the file with gunzip, or download it again if it is damaged"
                )
            # The size of a plain file bounds what is read, whatever its header says.
            available = size if is_gzipped else path.stat().st_size
            # One byte more than announced, to notice a longer file.
            content = file.read(min(size, available) + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: incomplete or corrupt gzip file ({error})\ndownload it again"
        ) from None
    if len(content) != size:
        relation = "more" if len(content) > size else f"{len(content)}"
        raise DataError(
            f"{path}: the shape {list(shape)} in its header needs {size} bytes, but the file has"
            f" {relation}\nthe file may be incomplete: download it again"
        )
    # A copy, since `frombuffer` is read-only, and PyTorch warns about read-only arrays.
    return np.frombuffer(content, np.uint8).reshape(shape).copy()


def _read_idx_shape(path: Path, header: bytes, ndim: int) -> tuple[int, ...]:
    magic = bytes((0, 0, 8, ndim))
    if header[:4] != magic:
        raise DataError(
            f"{path}: starts with 0x{header[:4].hex()}, but an IDX file of unsigned bytes with "
            f"{ndim} dimensions starts with 0x{magic.hex()}\n"
            "the file may have another format or be damaged: download it again"
        )
    if len(header) < 4 + 4 * ndim:
        raise DataError(
            f"{path}: truncated, {len(header)} bytes are less than the header of {4 + 4 * ndim}"
            " bytes\nthe file may be incomplete: download it again"
        )
    return struct.unpack(f">{ndim}I", header[4:])


def _find_plain_or_gzipped_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{folder}: contains neither {name} nor {name}.gz\n"
        f"use a folder with MNIST's {IMAGES_FILE} and {LABELS_FILE} (plain or .gz)"
    )


BYTE_VOCAB_SIZE = 256
"""Vocabulary size of the byte-level tokenizer."""

END_OF_TEXT = 0
"""End-of-text token of the byte-level tokenizer: the byte 0, which does not occur in text."""

Encode = Callable[[str], list[int]]


def packed_text(
    seq_length: int,
    path: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokenize text, and pack it into sequences without padding.

    Args:
        seq_length: tokens per sequence.
        path: a text file; a folder of `.txt` files, read in order of their names; or a folder that
            `datasets` saved, with a column `text`. By default a short story that ships with
            Shardwright.
        tokenizer: a `tokenizer.json`, or a folder that `transformers.AutoTokenizer` can load. Its
            end-of-text token, if it has one, is appended to each text. By default each byte of the
            UTF-8 text is a token.

    Returns:
        Token ids [samples, seq_length], and a copy as labels, not shifted.

    Raises:
        DataError: if a file does not exist or is not UTF-8 text, or the text has fewer than
            `seq_length` tokens.
    """
    encode, end_of_text = (
        _make_byte_tokenizer() if tokenizer is None else _load_tokenizer(Path(tokenizer))
    )
    tokens: list[int] = []
    for document in _read_text_documents(path):
        tokens += encode(document) + end_of_text
    # Tokens after the last full sequence are dropped, because sequences are not padded.
    samples = len(tokens) // seq_length
    if samples == 0:
        raise DataError(
            f"{path or 'the text'}: {len(tokens)} tokens are less than one sequence of seq_length"
            f" {seq_length}\nuse a smaller `data.seq_length`, or a longer text"
        )
    packed = torch.tensor(tokens[: samples * seq_length]).view(samples, seq_length)
    return packed, packed.clone()


def _read_text_documents(path: str | Path | None) -> list[str]:
    if path is None:
        story = files("shardwright.run.data") / "texts" / "workshop.txt"
        return [story.read_text(encoding="utf-8")]
    location = Path(path).expanduser()
    if is_saved_dataset(location):
        return list(saved_dataset(location, "text")["text"])
    # Sorted, because the order of `glob` may differ between nodes, which must pack equal sequences.
    text_files = sorted(location.glob("*.txt")) if location.is_dir() else [location]
    if not text_files or not text_files[0].exists():
        problem = (
            "the folder contains no .txt file" if location.is_dir() else "no such file or folder"
        )
        raise DataError(
            f"cannot read texts from {location}: {problem}\nset `data.path` to a text file or a "
            "folder of .txt files"
        )
    return [read_text(file, DataError, max_bytes=None) for file in text_files]


def _make_byte_tokenizer() -> tuple[Encode, list[int]]:
    return lambda text: list(text.encode("utf-8")), [END_OF_TEXT]


def _load_tokenizer(path: Path) -> tuple[Encode, list[int]]:
    """Load a tokenizer.

    Returns:
        The encoding function, and a list with the end-of-text token, empty if it has none.
    """
    with needs_extra("transformers", f"{path}: a tokenizer needs `transformers`", DataError):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    if not path.exists():
        raise DataError(
            f"{path}: no such file or folder\n"
            "set `data.tokenizer` to a `tokenizer.json` or a folder of `transformers`"
        )
    try:
        tokenizer = (
            # Never runs code that the folder contains.
            AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
            if path.is_dir()
            else PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
        )
    except Exception as error:  # Damaged files can raise anything.
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{path}: `transformers` cannot load this tokenizer: {reason}\n"
            "use a `tokenizer.json`, or a folder written by `save_pretrained`"
        ) from None
    end_of_text = tokenizer.eos_token_id
    return (
        # No beginning-of-text or similar tokens: only the end of a document is marked.
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        [] if end_of_text is None else [end_of_text],
    )
