"""Read and write files of `torch.save`, with errors that name the file and the cause."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from shardwright.core.checkpoint.storage import keep_write_error
from shardwright.errors import CheckpointError
from shardwright.text_files import partial_file


def read_torch_file(file: Path, *, mapped: bool = False, weights_only: bool | None = True) -> Any:
    """Read a file of `torch.save` to the CPU.

    Args:
        file: the file.
        mapped: whether to map tensors into memory, where the format of the file allows it.
        weights_only: whether to refuse objects that could run code; None for PyTorch's default.

    Raises:
        CheckpointError: if the file cannot be read, or has objects that `weights_only` refuses.
    """
    try:
        # `torch.load` maps files of the zip format only, and raises for the older format.
        mapped = mapped and zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", mmap=mapped, weights_only=weights_only)
    except Exception as error:  # damaged files may cause any error
        raise unreadable_error(file, error) from None


def unreadable_error(file: Path, error: Exception) -> CheckpointError:
    """Return the error that says why a file cannot be read."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    file_format = file.suffix.removeprefix(".")
    return CheckpointError(
        f"{file}: cannot be read as {file_format}: {reason}\nsave or download the file again"
    )


def write_torch_file(content: Any, file: Path) -> None:
    """Write a file by `torch.save`. A failure leaves an existing file as it was.

    Raises:
        CheckpointError: if the file cannot be written; the message says why.
    """
    try:
        partial = partial_file(file)
        try:
            with partial.open("xb") as opened, keep_write_error(opened) as stream:
                torch.save(content, stream)  # type: ignore[arg-type]
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable_error(file, error) from None


def unwritable_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error that says why a file or folder cannot be written."""
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}\n"
        "free some space, or use another folder"
    )
