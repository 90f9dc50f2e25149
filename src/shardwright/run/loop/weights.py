"""Load initial weights from a `state_dict` file or another run's checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from shardwright.core.checkpoint.checkpoint import load_checkpoint
from shardwright.core.checkpoint.state_dict_file import load_state_dict
from shardwright.core.checkpoint.storage import FOLDER_NAME, complete_steps
from shardwright.errors import CheckpointError


def load_weights(net: nn.Module, path: str | Path) -> None:
    """Load weights into `net`; each rank reads only its own shards. Collective.

    Args:
        path: a `state_dict` file, a folder of `.safetensors` files, a checkpoint folder `step-N`,
            or a folder of checkpoints, of which the newest is loaded.

    Raises:
        CheckpointError: if `path` is not one of the supported files and folders, or belongs to
            another model; the message names the first parameter that differs.
    """
    path = Path(path)
    # A checkpoint has other files at its top level, so a folder with these is a `state_dict`.
    if not path.is_dir() or any(path.glob("*.safetensors")):
        load_state_dict(net, path)
        return
    folder, step = _find_checkpoint(path)
    load_checkpoint(folder, net, step=step)


def _find_checkpoint(path: Path) -> tuple[Path, int | None]:
    """Return the folder of the checkpoints at `path`, and the step to load; None for the newest.

    Raises:
        CheckpointError: if `path` is neither a checkpoint nor a folder of checkpoints.
    """
    name = FOLDER_NAME.fullmatch(path.name)
    if name is not None:
        return path.parent, int(name[1])
    if not complete_steps(path):
        raise CheckpointError(
            f"{path} contains no complete checkpoint\n"
            "use a `state_dict` file, a folder of `.safetensors` files, or a folder of checkpoints"
        )
    return path, None
