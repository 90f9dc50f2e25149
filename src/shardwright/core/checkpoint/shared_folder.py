"""Check before a save that folders, positions and optimizers of all ranks are equal."""

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

MAX_VISIBILITY_SECONDS = 10.0
"""Maximum seconds until a file of rank 0 is visible on other ranks, in a network file system."""


def check_shared_folder(folder: Path) -> None:
    """Check that files written by rank 0 are visible in every rank's `folder`. Collective.

    Creates the folder on rank 0. A folder without write permission is not checked, as the save
    fails with an error of its own.

    Args:
        folder: this rank's folder.

    Raises:
        CheckpointError: on all ranks, if the folder of a rank is not the folder of rank 0.
    """
    if not has_other_ranks():
        return
    marker = value_of_rank(_create_marker_file(folder) if is_rank_0() else None)
    if marker is None:
        return
    own_path = str(folder.absolute())
    path = value_of_rank(own_path)
    # With equal paths, the file may exist but not be visible yet.
    sees = _wait_until_visible(folder / marker, MAX_VISIBILITY_SECONDS if own_path == path else 0.0)
    seen = values_of_ranks((own_path, sees))
    # After the exchange, before which other ranks may not have looked for the file yet.
    if is_rank_0():
        (folder / marker).unlink()
    for rank, (other, sees_marker) in enumerate(seen):
        if not sees_marker:
            raise CheckpointError(
                f"rank {rank} does not write to the folder of rank 0: {other} is not {path}\npass"
                " the same path on every rank, in a file system that all nodes share; for a"
                " temporary folder, create it on rank 0 and broadcast its path"
            )


def check_saves_agree(position: object, optimizer: str | None) -> None:
    """Check that position and optimizer class of a save are equal on all ranks. Collective.

    Args:
        position: the position of the run in its data.
        optimizer: class name of the optimizer; None without an optimizer.

    Raises:
        CheckpointError: on all ranks, if a rank differs from rank 0.
    """
    saved = values_of_ranks((repr(position), optimizer))
    for rank, other in enumerate(saved):
        if other != saved[0]:
            (first_position, first), (position, with_optimizer) = saved[0], other
            raise CheckpointError(
                f"rank {rank} saves {position} with {with_optimizer or 'no optimizer'}, but rank 0"
                f" saves {first_position} with {first or 'no optimizer'}\n"
                "pass the same position and the same optimizer on every rank"
            )


def _create_marker_file(folder: Path) -> str | None:
    """Create a file with a unique name in `folder`, and return the name; None if the folder cannot
    be written."""
    # Unique, so that a marker left by a crashed run is not taken for that of rank 0.
    name = f".shared-{uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    # Reported by the save itself, which cannot write either.
    except OSError:
        return None
    return name


def _wait_until_visible(marker: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not marker.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
