"""Distributed checkpoints in Lightning's format, which any plan and its `consolidate` command read.

A checkpoint is a folder. It has the sharded tensors of the model and its optimizers, in the format
of `torch.distributed.checkpoint`, and one metadata file with all other entries.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from shardwright.core.agreement.collective import has_other_ranks, is_rank_0, value_of_rank
from shardwright.core.checkpoint.dcp_errors import convert_errors
from shardwright.core.checkpoint.storage import ChecksumFileSystem
from shardwright.core.checkpoint.torch_file import (
    read_torch_file,
    unwritable_error,
    write_torch_file,
)
from shardwright.errors import CheckpointError
from shardwright.integrations.full_state import has_stages

METADATA_FILE = "meta.pt"
"""Lightning's name of the file with all checkpoint entries other than models and optimizers."""


def is_distributed_checkpoint(path: Path) -> bool:
    """Whether `path` is a distributed checkpoint, written by Lightning or by `save_folder`."""
    return path.is_dir() and (path / METADATA_FILE).is_file()


def save_folder(
    path: Path,
    net: nn.Module,
    key: str,
    optimizers: Mapping[str, Optimizer],
    metadata: Mapping[str, Any],
) -> None:
    """Save a model and its optimizers; each rank writes its own shards. Collective.

    Args:
        path: the folder to write; a file or folder of an earlier checkpoint is replaced.
        net: the model.
        key: name of the model in the checkpoint.
        optimizers: optimizers of the model, by their name in the checkpoint.
        metadata: all other entries of the checkpoint; rank 0 writes its own values.

    Raises:
        CheckpointError: on all ranks, if a file cannot be written; an earlier checkpoint stays.
    """
    # Groups of an optimizer differ between stages, so their options are saved by parameter.
    options = StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=has_stages(net))
    state: dict[str, Any] = {key: get_model_state_dict(net, options=options)}
    for name, optimizer in optimizers.items():
        state[name] = get_optimizer_state_dict(net, optimizer, options=options)
    # Under another name until it is complete: an interrupted save leaves no broken checkpoint.
    partial, problem = path.with_name(f"{path.name}.partial"), ""
    if is_rank_0():
        try:
            _remove_file_or_folder(partial)
            partial.mkdir(parents=True)
        except OSError as error:
            problem = str(unwritable_error(path, error))
    _raise_error_of_rank_0(problem)
    writer = FileSystemWriter(partial)
    writer.fs = ChecksumFileSystem()  # It keeps the cause of a failed write.
    try:
        with convert_errors(path):
            state_dict_saver.save(state, storage_writer=writer, no_dist=not has_other_ranks())
    except CheckpointError:
        if is_rank_0():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_rank_0():
        try:
            write_torch_file(dict(metadata), partial / METADATA_FILE)
            _rename_to_final_path(partial, path)
        except OSError as error:
            problem = str(unwritable_error(path, error))
        except Exception as error:  # Any error must reach the other ranks, which wait below.
            problem = f"{path}: {error}"
    # Reached by all ranks, so that none looks for the folder before it has its name.
    _raise_error_of_rank_0(problem)


def _rename_to_final_path(partial: Path, path: Path) -> None:
    """Rename the complete checkpoint `partial` to `path`, and remove an earlier one at `path`."""
    # The earlier checkpoint keeps some name until the new one has its own.
    replaced = path.with_name(f"{path.name}.removed")
    _remove_file_or_folder(replaced)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _remove_file_or_folder(replaced)


def _remove_file_or_folder(path: Path) -> None:
    # `rmtree` refuses symbolic links.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _raise_error_of_rank_0(problem: str) -> None:
    """Raise CheckpointError with rank 0's `problem` unless that is empty. Collective."""
    if problem := value_of_rank(problem):
        raise CheckpointError(problem)


def load_folder(
    path: Path,
    net: nn.Module,
    key: str,
    optimizers: Mapping[str, Optimizer],
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a model and its optimizers in place; each rank reads its own shards. Collective.

    Args:
        path: a folder for which `is_distributed_checkpoint` is true.
        net: the model, parallelized with any plan or an ordinary module.
        key: name of the model in the checkpoint.
        optimizers: optimizers of the model, by their name in the checkpoint.
        strict: whether a parameter that only the model or only the checkpoint has is an error.
        weights_only: whether `torch.load` reads the metadata file without unpickling code.

    Returns:
        The entries of the metadata file.

    Raises:
        CheckpointError: if a file is damaged or missing.
    """
    model_state = {key: get_model_state_dict(net)}
    with convert_errors(path):
        state_dict_loader.load(model_state, checkpoint_id=path, no_dist=not has_other_ranks())
    # `load` has read into the tensors in place; this call checks names and runs the model's hooks.
    net.load_state_dict(model_state[key], strict=strict)
    saved_names = FileSystemReader(path).read_metadata().state_dict_metadata
    # One after the other: an optimizer without state first gets a state to load into.
    for name, optimizer in optimizers.items():
        # Runs without stages save options by group, others by parameter.
        has_groups = any(saved.startswith(f"{name}.param_groups.0.") for saved in saved_names)
        options = StateDictOptions(flatten_optimizer_state_dict=not has_groups)
        state = {name: get_optimizer_state_dict(net, optimizer, options=options)}
        with convert_errors(path):
            state_dict_loader.load(state, checkpoint_id=path, no_dist=not has_other_ranks())
        set_optimizer_state_dict(net, optimizer, state[name], options=options)
    metadata: dict[str, Any] = read_torch_file(path / METADATA_FILE, weights_only=weights_only)
    return metadata
