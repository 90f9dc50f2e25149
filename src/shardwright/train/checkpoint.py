"""Checkpoints in the format of torch.distributed.checkpoint, independent of plan and device count.

A checkpoint is a subfolder `step-N` of the run's folder. It is written under a temporary name and
renamed once every rank has written, so a folder of that name is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from shardwright.errors import CheckpointError
from shardwright.parallel.module import ParallelModule
from shardwright.plan import Plan
from shardwright.runtime.devices import world_timeout
from shardwright.train import checkpoint_state
from shardwright.train.parameter_names import match_saved_names
from shardwright.train.position import Position

VERSION = 1
INFO_FILE = "checkpoint.json"
NAME = re.compile(r"step-(\d+)")

# Saving and loading in a single process, also in a thread, is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a checkpoint other than tensors.

    Args:
        position: the position of the run.
        groups: the settings of the optimizer's parameter groups; None without an optimizer.
        random: seed and step of the program's random operators; None if the model was not
            parallelized.
        fingerprint, devices: those of the plan; None if it is unknown.
    """

    position: Position
    groups: list[dict[str, Any]] | None
    random: tuple[int, int] | None
    fingerprint: str | None
    devices: int | None

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def read(folder: Path) -> CheckpointInfo:
        """Raises:
        CheckpointError: if the folder is not a checkpoint, or has an unsupported version.
        """
        try:
            content = json.loads((folder / INFO_FILE).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {INFO_FILE}") from None
        version = content.pop("version")
        if version != VERSION:
            raise CheckpointError(
                f"{folder}: unsupported checkpoint version {version}; this version of Shardwright"
                f" reads version {VERSION}"
            )
        content["position"] = Position(**content["position"])
        return CheckpointInfo(**content)


class Checkpoints:
    """The checkpoints of one run in `folder`; every rank must make the same calls.

    As a context manager it waits on exit for a checkpoint that is still being written.

    Args:
        keep: number of newest checkpoints to keep; None for all.
        asynchronous: `save` returns once the tensors are copied, and files are written while
            training continues, one checkpoint at a time.
    """

    def __init__(
        self, folder: str | Path, *, keep: int | None = None, asynchronous: bool = False
    ) -> None:
        self.folder = Path(folder)
        self._keep, self._asynchronous = keep, asynchronous
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[Metadata] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Not after an error: other ranks may never write their shards.
        if error is None:
            self.wait()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints in ascending order."""
        return complete_steps(self.folder)

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint that rank 0 sees; None if there is none.

        Collective: every rank must call it, and gets the same result.
        """
        steps = self.steps()
        newest = [steps[-1] if steps else None]
        if dist.is_initialized():
            dist.broadcast_object_list(newest, src=0)
        return newest[0]

    def save(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        position: Position,
        plan: Plan | None = None,
    ) -> None:
        """Save model, optimizer, random states and position as the checkpoint of `position.step`.

        It replaces a checkpoint of the same step. Checkpoints in excess of `keep` are removed once
        it is complete.

        Raises:
            CheckpointError: if the optimizer has parameters that the model does not have, or state
                that is not a tensor, or if this or the previous checkpoint could not be written.
        """
        tensors = checkpoint_state.model_tensors(net)
        if optimizer is not None:
            tensors |= checkpoint_state.optimizer_tensors(net, optimizer)
        if not dist.is_initialized() or dist.get_rank() == 0:
            tensors |= checkpoint_state.random_tensors(checkpoint_state.device_of(net))
        about = CheckpointInfo(
            position=position,
            groups=None if optimizer is None else checkpoint_state.optimizer_groups(optimizer),
            random=(net.seed, net.steps) if isinstance(net, ParallelModule) else None,
            fingerprint=plan.fingerprint if plan is not None else None,
            devices=plan.devices if plan is not None else None,
        )
        self.wait()
        if dist.is_initialized() and self._group is None:
            # Long timeout: ranks wait in this group while others write their files.
            self._group = dist.new_group(backend="gloo", timeout=world_timeout())
        if not dist.is_initialized() or dist.get_rank() == 0:
            _clear_leftovers(self.folder)
        if self._group is not None:
            # Collective: no rank starts writing before rank 0 has cleared the leftovers.
            tensors = drop_tied_duplicates(tensors, self._group)
        writer = _PublishingWriter(self.path(position.step), about, self._keep)
        target: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
        target["no_dist"] = self._group is None
        with _convert_errors(self.path(position.step)):
            if self._asynchronous:
                pending = state_dict_saver.async_save(dict(tensors), **target)
                self._pending = cast("Future[Metadata]", pending)
            else:
                state_dict_saver.save(dict(tensors), **target)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: if it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with _convert_errors(self.folder):
                pending.result()

    def load(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
    ) -> Position:
        """Load the checkpoint of `step` (by default the newest) into `net` and `optimizer`.

        The checkpoint may have been saved under another plan. Each rank reads only its own shards,
        in place. Without an optimizer, LoRA adapters that were not saved keep their values.

        Raises:
            CheckpointError: if there is no complete checkpoint, it belongs to another model (the
                message names the first parameter that differs), or its optimizer does not match.
        """
        step = self.newest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder} contains no complete checkpoint")
        folder = self.path(step)
        about = CheckpointInfo.read(folder)
        reader = FileSystemReader(folder)
        saved = {
            key: entry
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        prefix = f"{checkpoint_state.MODEL}."
        shapes = {k.removeprefix(prefix): e.size for k, e in saved.items() if k.startswith(prefix)}
        names = match_saved_names(net, shapes, str(folder), new_adapters=optimizer is None)
        held, optimized = checkpoint_state.model_tensors(net), dict[str, Tensor]()
        model = {
            prefix + names[name]: held[prefix + name] for name in names if prefix + name in held
        }
        if optimizer is not None:
            if about.groups is None:
                raise CheckpointError(f"{folder} was saved without an optimizer")
            optimized = checkpoint_state.allocate_optimizer_state(net, optimizer, saved)
        device = checkpoint_state.device_of(net)
        random = {k: v for k, v in checkpoint_state.random_tensors(device).items() if k in saved}
        places = {**model, **optimized, **random}
        with _convert_errors(folder):
            state_dict_loader.load(places, storage_reader=reader, no_dist=True)
        if optimizer is not None and about.groups is not None:
            checkpoint_state.restore_optimizer(net, optimizer, optimized, about.groups)
        checkpoint_state.restore_random(random, device)
        if isinstance(net, ParallelModule) and about.random is not None:
            net.seed, net.steps = about.random
        return about.position


def save_checkpoint(
    folder: str | Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    position: Position,
    plan: Plan | None = None,
    keep: int | None = None,
) -> None:
    """Save a checkpoint in `folder`, which is complete when this returns. Every rank must call it.

    Args:
        position: the position of the run, which `load_checkpoint` returns.
        plan: the plan of `net`; its fingerprint is recorded.
        keep: number of newest checkpoints to keep in the folder; None for all.

    Raises:
        CheckpointError: if the optimizer has parameters that the model does not have, or state that
            is not a tensor.
    """
    with Checkpoints(folder, keep=keep) as checkpoints:
        checkpoints.save(net, optimizer, position, plan)


def load_checkpoint(
    folder: str | Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
) -> Position:
    """Load the checkpoint of `step` (by default the newest) in `folder` into `net` and `optimizer`.

    It may have been saved under another plan, on another number of devices. Every rank must call
    it.

    Returns:
        The position of the run when it was saved.

    Raises:
        CheckpointError: if there is no complete checkpoint, it belongs to another model (the
            message names the first parameter that differs), or its optimizer does not match.
    """
    return Checkpoints(folder).load(net, optimizer, step)


def complete_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints in `folder`, in ascending order."""
    matches = (NAME.fullmatch(path.parent.name) for path in folder.glob(f"step-*/{INFO_FILE}"))
    return sorted(int(match[1]) for match in matches if match)


class _PublishingWriter(FileSystemWriter):
    """Writes under a temporary name, and renames the folder when all ranks have written."""

    def __init__(self, folder: Path, about: CheckpointInfo, keep: int | None) -> None:
        super().__init__(folder.with_name(f"{folder.name}.partial"))
        self._folder, self._about, self._keep = folder, about, keep

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Called on one rank once all have written."""
        super().finish(metadata, results)
        partial = Path(self.path)
        with (partial / INFO_FILE).open("w") as file:
            file.write(self._about.to_json())
            file.flush()
            os.fsync(file.fileno())
        _remove(self._folder)
        partial.rename(self._folder)
        if self._keep is not None:
            for step in complete_steps(self._folder.parent)[: -self._keep]:
                _remove(self._folder.with_name(f"step-{step}"))


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Raises failures of ranks, such as a full disk, as a single CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{path}: rank {rank}: {type(cause).__name__}: {cause}") from error


def _clear_leftovers(folder: Path) -> None:
    """Removes the leftovers of crashed runs."""
    for pattern in ("step-*.partial", "step-*.removed"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


def _remove(folder: Path) -> None:
    """Renames first, because a partially removed folder must not look complete."""
    if folder.exists():
        removed = folder.with_name(f"{folder.name}.removed")
        folder.rename(removed)
        shutil.rmtree(removed)


def drop_tied_duplicates(
    tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Drops the tensors that another pipeline stage saves.

    A parameter that is tied across stages is stored on the devices of each, perhaps sharded
    differently. The stage with the lowest rank saves it.
    """

    def lowest(tensor: Tensor) -> int:
        return int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else 0

    lowest_ranks = {key: lowest(tensor) for key, tensor in tensors.items()}
    all_ranks: list[dict[str, int]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(all_ranks, lowest_ranks, group=group)
    return {
        key: tensor
        for key, tensor in tensors.items()
        if lowest_ranks[key] == min(ranks[key] for ranks in all_ranks if key in ranks)
    }
