"""Optimizer state in checkpoints of `Trainer`, from which both planned and plain runs can resume.

A planned run saves the optimizer state twice: sharded in a subfolder, from which any plan can
resume, and in full in the file of a plain `Trainer`, which would otherwise reset its optimizer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer

from shardwright.core.agreement.collective import is_rank_0, value_of_rank
from shardwright.core.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardwright.core.checkpoint.parameter_names import unsaved_trained_names
from shardwright.core.checkpoint.position import Position
from shardwright.core.checkpoint.torch_file import read_torch_file, write_torch_file
from shardwright.errors import CheckpointError
from shardwright.integrations.full_state import full_optimizer_state

STATE_FOLDER = "shardwright"
"""Subfolder of a `Trainer` checkpoint with the sharded optimizer state, and with trained parameters
that `Trainer`'s model files omit."""

OPTIMIZER_FILE, SCHEDULER_FILE, RANDOM_FILE = "optimizer.pt", "scheduler.pt", "rng_state.pth"
"""Files from which a plain `Trainer` on one process resumes optimizer, learning rate scheduler and
random generators."""


def save_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Save the optimizer state, both sharded and in full for a plain `Trainer`.

    Collective: every rank must call this function.

    Args:
        folder: checkpoint of `Trainer`, with the files of the model.
        model: the planned model.
        optimizer: optimizer of the model, without wrappers.
        step: number of optimizer steps before the checkpoint.
    """
    names = unsaved_trained_names(model, _broadcast_saved_tensor_names(folder))
    position = Position(step=step)
    # With the trained parameters that are not in the model files of `Trainer`.
    save_checkpoint(folder / STATE_FOLDER, model, optimizer, position=position, only=names)
    full_state = full_optimizer_state(optimizer)
    if is_rank_0():
        write_torch_file(full_state, folder / OPTIMIZER_FILE)


def load_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load optimizer state, in place, that `save_optimizer` or a plain `Trainer` has saved.

    Collective: every rank must call this function.

    Raises:
        CheckpointError: if the checkpoint has no optimizer state, or it cannot be read.
    """
    # Rank 0 decides for all ranks, as loading is collective.
    if value_of_rank((folder / STATE_FOLDER).is_dir()):
        # Not strict: `Trainer` has already loaded most parameters from its own files.
        load_checkpoint(folder / STATE_FOLDER, model, optimizer, strict=False)
    elif value_of_rank((folder / OPTIMIZER_FILE).is_file()):
        # Mapped into memory, since a rank keeps only its shards of the tensors.
        optimizer.load_state_dict(read_torch_file(folder / OPTIMIZER_FILE, mapped=True))
    else:
        raise CheckpointError(
            f"{folder} has neither {STATE_FOLDER}/ of a planned run nor {OPTIMIZER_FILE} of a "
            "plain `Trainer`, so training cannot resume from it\nsave without `save_only_model`, "
            f"or start anew from its weights: `from_pretrained({str(folder)!r})`"
        )


def share_random_state(folder: Path) -> None:
    """Copy the random state of rank 0 to the file from which a run on one process resumes."""
    if is_rank_0():
        shutil.copyfile(folder / "rng_state_0.pth", folder / RANDOM_FILE)


def _broadcast_saved_tensor_names(folder: Path) -> set[str]:
    """Read the tensor names of rank 0's safetensors files, and broadcast them to all ranks."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors") if is_rank_0() else ():
        with safe_open(file, "pt") as content:
            names.update(content.keys())
    # A sorted list, because JSON has no sets.
    return set(value_of_rank(sorted(names)))
