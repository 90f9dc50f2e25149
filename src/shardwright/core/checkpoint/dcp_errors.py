"""Failures of `torch.distributed.checkpoint` as one error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from shardwright.errors import CheckpointError

FULL_DISK = 2**20
"""If writing fails with fewer bytes free than this, the error blames a full disk.

`torch.save` reports a full disk as an unrelated RuntimeError, and the file system keeps some bytes
in reserve."""


@contextmanager
def convert_errors(path: Path) -> Iterator[None]:
    """Convert DCP's failures of several ranks to one CheckpointError of the first failed rank.

    Mentions a full disk, which `torch.save` reports as an unrelated RuntimeError.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        free = shutil.disk_usage(path.parent).free
        disk_full = f": no space left ({free} bytes are free)" if free < FULL_DISK else ""
        raise CheckpointError(
            f"{path}: rank {rank}{disk_full}: {type(cause).__name__}: {cause}"
        ) from error
