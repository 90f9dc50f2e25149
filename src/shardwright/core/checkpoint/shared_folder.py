"""Checks, before anything is written, that all ranks save the same into one folder."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import uuid4

from shardwright.core.agreement.collective import (
    has_other_ranks,
    is_rank_0,
    value_of_rank,
    values_of_ranks,
)
from shardwright.errors import CheckpointError

PATIENCE = 10.0
"""Seconds after which a file that rank 0 has made is visible through a network file system."""


def check_shared_folder(folder: Path) -> None:
    """Check that all ranks see in `folder` what rank 0 writes there. Collective.

    Creates the folder on rank 0. A folder that it cannot write is left to what is written there.

    Raises:
        CheckpointError: on all ranks, if one has another folder, under its name or another.
    """
    if not has_other_ranks():
        return
    marker = value_of_rank(_write_marker(folder) if is_rank_0() else None)
    if marker is None:
        return
    own_path = str(folder.absolute())
    path = value_of_rank(own_path)
    # Under the same name, it may be there and not yet visible.
    sees = _appears(folder / marker, PATIENCE if own_path == path else 0.0)
    seen = values_of_ranks((own_path, sees))
    if is_rank_0():
        (folder / marker).unlink()
    for rank, (other, sees_marker) in enumerate(seen):
        if not sees_marker:
            raise CheckpointError(
                f"rank {rank} does not write to the folder of rank 0, {path}, but to {other}\npass"
                " the same path on every rank, in a file system that all nodes share; a temporary"
                " folder is made by one rank, which sends its path to the others"
            )


def check_saves_agree(position: object, optimizer: str | None) -> None:
    """Check that all ranks save a checkpoint of one position and optimizer. Collective.

    Args:
        position: the position of the run in its data.
        optimizer: the class of the optimizer; None without one.

    Raises:
        CheckpointError: on all ranks, if one differs from rank 0.
    """
    saved = values_of_ranks((repr(position), optimizer))
    for rank, other in enumerate(saved):
        if other != saved[0]:
            (first_position, first), (position, with_optimizer) = saved[0], other
            raise CheckpointError(
                f"rank {rank} saves {position} with {with_optimizer or 'no optimizer'}, but rank 0"
                f" {first_position} with {first or 'no optimizer'}\n"
                "pass the same position and the optimizer on every rank"
            )


def _write_marker(folder: Path) -> str | None:
    """The name of a new file in the folder; None if it cannot be written."""
    name = f".shared-{uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError:
        return None
    return name


def _appears(marker: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not marker.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
