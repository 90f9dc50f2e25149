"""Convert failures of `torch.distributed.checkpoint` (DCP) to one error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from shardwright.errors import CheckpointError

FULL_DISK_BYTES = 2**20
"""A disk with fewer free bytes is full; not 0, since file systems keep some bytes in reserve."""


@contextmanager
def convert_errors(path: Path) -> Iterator[None]:
    """Convert DCP's failures of several ranks to one CheckpointError, for the first failed rank.

    The error says if the disk is full, for which `torch.save` raises an unrelated RuntimeError.

    Args:
        path: the folder of the checkpoint.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        free = shutil.disk_usage(path.parent).free
        disk_full = f": no space left ({free} bytes are free)" if free < FULL_DISK_BYTES else ""
        raise CheckpointError(
            f"{path}: rank {rank}{disk_full}: {type(cause).__name__}: {cause}"
        ) from error
