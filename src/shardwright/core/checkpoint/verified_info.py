"""Reading what a checkpoint says about itself, after its files are verified on all ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.core.agreement.collective import (
    has_other_ranks,
    values_of_ranks,
)
from shardwright.core.checkpoint.manifest import (
    CheckpointInfo,
    find_damage,
)
from shardwright.errors import CheckpointError, DamagedCheckpointError


def read_verified_info(folder: Path) -> CheckpointInfo | str:
    """Read `checkpoint.json`, and verify the checksums of a checkpoint's files. Collective.

    Returns:
        The contents, or a description of damage that any rank detected; the same on every rank.

    Raises:
        CheckpointError: if `folder` contains no checkpoint or an unsupported checkpoint version.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if has_other_ranks() else (0, 1)
    info, own_damage, own_problem = None, None, None
    try:
        info = CheckpointInfo.read(folder)
        # Each rank verifies every n-th file, since the time is that of reading from disk.
        own_damage = find_damage(folder, sorted(info.files.items())[rank::size])
    except DamagedCheckpointError as error:
        own_damage = str(error)
    except CheckpointError as error:
        own_problem = str(error)
    # A failure on one rank counts for all: they must fall back to the same older checkpoint.
    for damage, problem in values_of_ranks((own_damage, own_problem)):
        if problem is not None:
            raise CheckpointError(problem)
        if damage is not None:
            return damage
    assert info is not None
    return info


def check_optimizer(optimizer: torch.optim.Optimizer, info: CheckpointInfo, folder: Path) -> None:
    """Raise CheckpointError if the checkpoint has no optimizer state or another optimizer class."""
    class_name = type(optimizer).__name__
    if info.groups is None:
        raise CheckpointError(
            f"{folder} was saved without an optimizer\nload only the model: pass `optimizer=None`"
        )
    saved_class = info.optimizer
    # Checkpoints of version 1 do not have the class of the optimizer. Settings that this optimizer
    # does not have show that it was another class, except for `initial_lr`, which schedulers add.
    if saved_class is None and set(info.groups[0]) - {"initial_lr"} - set(
        optimizer.param_groups[0]
    ):
        saved_class = "another optimizer"
    if saved_class not in (None, class_name):
        raise CheckpointError(
            f"{folder} was saved with {saved_class}, whose state cannot be loaded into "
            f"{class_name}\nuse {info.optimizer or 'the same optimizer'}, or load only the weights,"
            " without an optimizer: `sw.load_checkpoint(folder, net)`, or in a configuration"
            f" `train.load: {folder}`"
        )
