"""Weights that a run begins with, from a file of one device or from another run's checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from shardwright.errors import CheckpointError
from shardwright.train.checkpoint import ABOUT, NAME, complete_steps, load_checkpoint
from shardwright.train.state_dict_file import load_state_dict


def load_weights(net: nn.Module, path: str | Path) -> None:
    """Give `net` the weights at `path`. Every rank calls it, and reads only what it holds.

    Args:
        path: a file of a `state_dict`, a folder of `.safetensors` files, a checkpoint `step-N`, or
            a folder of checkpoints, of which the newest is taken.

    Raises:
        CheckpointError: there is nothing of the kind, or it is of another model; names the first
            parameter that differs.
    """
    path = Path(path)
    if not path.is_dir() or any(path.glob("*.safetensors")):
        load_state_dict(net, path)
        return
    folder, step = _checkpoint_at(path)
    load_checkpoint(folder, net, step=step)


def _checkpoint_at(path: Path) -> tuple[Path, int | None]:
    """The folder of the checkpoints at `path` and the step of the one that is meant; None for the
    newest.

    Raises:
        CheckpointError: `path` is no checkpoint, nor a folder that holds one.
    """
    name = NAME.fullmatch(path.name)
    if name is not None and (path / ABOUT).is_file():
        return path.parent, int(name[1])
    if not complete_steps(path):
        raise CheckpointError(f"{path} holds no complete checkpoint")
    return path, None
