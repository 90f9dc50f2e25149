"""Text as training data of language models: tokens of local files, packed into equal lengths."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from shardwright.errors import DataError

BYTES = 256
"""Size of the vocabulary of the byte-level tokenizer."""

END_OF_TEXT = 0
"""What the byte-level tokenizer puts between texts: the byte that no text has."""

Encode = Callable[[str], list[int]]


def packed_text(
    seq_length: int,
    path: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids packed to `seq_length` without padding, [samples, seq_length], and the same as
    labels (language models shift them).

    Args:
        path: a text file, or a folder whose `.txt` files are taken in the order of their names; by
            default a short story that comes with Shardwright.
        tokenizer: by default every byte of the UTF-8 text is a token; else a `tokenizer.json`, or a
            folder that `transformers.AutoTokenizer` can load. Its end-of-text token, if it has one,
            stands between texts.

    Raises:
        DataError: there is no such file, it is no UTF-8 text, or shorter than one sequence.
    """
    encode, end = _byte_level() if tokenizer is None else _loaded(Path(tokenizer))
    tokens: list[int] = []
    for written in _texts(path):
        tokens += encode(written) + end
    samples = len(tokens) // seq_length
    if samples == 0:
        raise DataError(
            f"{path or 'the text'}: {len(tokens)} tokens do not fill one sequence of seq_length"
            f" {seq_length}"
        )
    packed = torch.tensor(tokens[: samples * seq_length]).view(samples, seq_length)
    return packed, packed.clone()


def _texts(path: str | Path | None) -> list[str]:
    if path is None:
        story = files("shardwright.train") / "texts" / "workshop.txt"
        return [story.read_text(encoding="utf-8")]
    place = Path(path).expanduser()
    found = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    if not found or not found[0].exists():
        wanted = "no .txt file in it" if place.is_dir() else "no such file or folder of .txt files"
        raise DataError(f"{place}: {wanted}")
    return [_read(file) for file in found]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _byte_level() -> tuple[Encode, list[int]]:
    return lambda written: list(written.encode("utf-8")), [END_OF_TEXT]


def _loaded(place: Path) -> tuple[Encode, list[int]]:
    """How a tokenizer encodes, and what it puts between texts."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        raise DataError(
            "a tokenizer needs transformers, which is not installed: pip install"
            " 'shardwright[models]'"
        ) from None
    if not place.exists():
        raise DataError(f"{place}: no such tokenizer.json, nor folder of a tokenizer")
    loaded = (
        AutoTokenizer.from_pretrained(str(place))
        if place.is_dir()
        else PreTrainedTokenizerFast(tokenizer_file=str(place))  # type: ignore[no-untyped-call]
    )
    end = loaded.eos_token_id
    return (
        lambda written: list(loaded.encode(written, add_special_tokens=False)),
        [] if end is None else [end],
    )
