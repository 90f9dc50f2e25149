"""Convert errors of `torch.distributed.checkpoint` (DCP) to `CheckpointError`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from shardwright.errors import CheckpointError, system_remedy

FULL_DISK_BYTES = 2**20
"""A disk with fewer free bytes counts as full, because file systems reserve some bytes."""


@contextmanager
def convert_errors(path: Path) -> Iterator[None]:
    """Context manager that converts a `CheckpointException` of DCP to a `CheckpointError`.

    The message has the error of the first rank that failed, and says whether the disk is full.

    Args:
        path: the folder of the checkpoint.

    Raises:
        CheckpointError: instead of a `CheckpointException`.
    """
    try:
        yield
    except CheckpointException as error:
        # `failures` maps ranks to (exception, traceback).
        rank, (cause, _) = next(iter(error.failures.items()))
        # The checkpoint's own folder may not exist.
        free = shutil.disk_usage(path.parent).free
        disk_full = f": no space left ({free} bytes are free)" if free < FULL_DISK_BYTES else ""
        reason, remedy = f"{type(cause).__name__}: {cause}", ""
        if isinstance(cause, OSError) and cause.errno is not None:
            file = f": {cause.filename}" if cause.filename else ""
            reason = f"{os.strerror(cause.errno)}{file}"
            remedy = f", or {limit}" if (limit := system_remedy(cause)) else ""
        raise CheckpointError(
            f"{path}: rank {rank} cannot access the checkpoint{disk_full}: {reason}\n"
            f"check the free space and permissions of the folder{remedy}"
        ) from error
