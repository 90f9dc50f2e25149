"""Checkpoints on torch.distributed.checkpoint, which any plan on any number of devices can load.

A checkpoint is a folder `step-N` in a common folder. It is written under another name and renamed
when every rank has written, so that what has the name is complete.
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
from shardwright.train.parameter_names import saved_names
from shardwright.train.position import Position

VERSION = 1
ABOUT = "checkpoint.json"
NAME = re.compile(r"step-(\d+)")

# That one process saves or loads on its own, also in a thread, is no mistake here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class About:
    """What a checkpoint says of itself, besides its tensors.

    Args:
        position: where the run stands.
        groups: the settings of the optimizer's parameter groups; None without an optimizer.
        random: seed and step of the planned program's random operators; None where the model was
            not parallelized.
        fingerprint, devices: of the plan that was followed; None where it is not known.
    """

    position: Position
    groups: list[dict[str, Any]] | None
    random: tuple[int, int] | None
    fingerprint: str | None
    devices: int | None

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def read(folder: Path) -> About:
        """Raises: CheckpointError: the folder is no checkpoint, or one of another version."""
        try:
            content = json.loads((folder / ABOUT).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {ABOUT}") from None
        version = content.pop("version")
        if version != VERSION:
            raise CheckpointError(f"{folder} has version {version}; version {VERSION} can be read")
        content["position"] = Position(**content["position"])
        return About(**content)


class Checkpoints:
    """The checkpoints of one run in `folder`. Every rank makes and calls it alike.

    As a context it waits at its end for what is being written.

    Args:
        keep: how many of the newest are kept; None for all.
        asynchronous: `save` returns when the tensors are copied, and files are written while
            training goes on; one checkpoint at a time.
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
        # Not after an error: other ranks may never come to write their part.
        if error is None:
            self.wait()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the newest last."""
        return complete_steps(self.folder)

    def newest(self) -> int | None:
        """The newest complete checkpoint that rank 0 sees, on every rank; None if there is none.
        Every rank calls it."""
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
        """Save model, optimizer, random numbers and position as the checkpoint of its step. It
        replaces one of the same step; the oldest are removed when it is complete.

        Raises:
            CheckpointError: the optimizer has other parameters than the model, or state that is no
                tensor; or this checkpoint, or the one before, could not be written.
        """
        tensors = checkpoint_state.model_tensors(net)
        if optimizer is not None:
            tensors |= checkpoint_state.optimizer_tensors(net, optimizer)
        if not dist.is_initialized() or dist.get_rank() == 0:
            tensors |= checkpoint_state.random_tensors(checkpoint_state.device_of(net))
        about = About(
            position=position,
            groups=None if optimizer is None else checkpoint_state.optimizer_groups(optimizer),
            random=(net.seed, net.steps) if isinstance(net, ParallelModule) else None,
            fingerprint=plan.fingerprint if plan is not None else None,
            devices=plan.devices if plan is not None else None,
        )
        self.wait()
        if dist.is_initialized() and self._group is None:
            # Ranks also wait in it while others write their files.
            self._group = dist.new_group(backend="gloo", timeout=world_timeout())
        if not dist.is_initialized() or dist.get_rank() == 0:
            _clear_leftovers(self.folder)
        if self._group is not None:
            # Every rank waits in it for rank 0, before any begins to write.
            tensors = held_once(tensors, self._group)
        writer = _PublishingWriter(self.path(position.step), about, self._keep)
        target: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
        target["no_dist"] = self._group is None
        with _saying(self.path(position.step)):
            if self._asynchronous:
                pending = state_dict_saver.async_save(dict(tensors), **target)
                self._pending = cast("Future[Metadata]", pending)
            else:
                state_dict_saver.save(dict(tensors), **target)

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with _saying(self.folder):
                pending.result()

    def load(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
    ) -> Position:
        """Give `net` and `optimizer` what was saved at `step`, by default the newest, under
        whatever plan. Each rank reads only what it holds, into the tensors that it has. Without an
        optimizer, adapters that were not saved stay as they are.

        Raises:
            CheckpointError: there is no complete checkpoint, it is of another model (names the
                first parameter that differs), or it holds no such optimizer.
        """
        step = self.newest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint")
        folder = self.path(step)
        about = About.read(folder)
        reader = FileSystemReader(folder)
        saved = {
            key: entry
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        prefix = f"{checkpoint_state.MODEL}."
        shapes = {k.removeprefix(prefix): e.size for k, e in saved.items() if k.startswith(prefix)}
        names = saved_names(net, shapes, str(folder), new_adapters=optimizer is None)
        held, optimized = checkpoint_state.model_tensors(net), dict[str, Tensor]()
        model = {
            prefix + names[name]: held[prefix + name] for name in names if prefix + name in held
        }
        if optimizer is not None:
            if about.groups is None:
                raise CheckpointError(f"{folder} was saved without an optimizer")
            optimized = checkpoint_state.places_for_optimizer(net, optimizer, saved)
        device = checkpoint_state.device_of(net)
        random = {k: v for k, v in checkpoint_state.random_tensors(device).items() if k in saved}
        places = {**model, **optimized, **random}
        with _saying(folder):
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
    """Save a checkpoint in `folder`, complete when this returns. Every rank calls it.

    Args:
        position: where the run stands, which `load_checkpoint` gives back.
        plan: the plan that is followed; its fingerprint is noted.
        keep: how many of the newest checkpoints stay in the folder; None for all.

    Raises:
        CheckpointError: the optimizer has other parameters than the model, or state that is no
            tensor.
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
    """Give `net` and `optimizer` what was saved in `folder` at `step`, by default the newest, under
    whatever plan and on however many devices. Every rank calls it.

    Raises:
        CheckpointError: there is no complete checkpoint, it is of another model (names the first
            parameter that differs), or it holds no such optimizer.
    """
    return Checkpoints(folder).load(net, optimizer, step)


def complete_steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints in `folder`, the newest last."""
    found = (NAME.fullmatch(path.parent.name) for path in folder.glob(f"step-*/{ABOUT}"))
    return sorted(int(match[1]) for match in found if match)


class _PublishingWriter(FileSystemWriter):
    """Writes under another name, and gives the folder its own when all ranks have written."""

    def __init__(self, folder: Path, about: About, keep: int | None) -> None:
        super().__init__(folder.with_name(f"{folder.name}.partial"))
        self._folder, self._about, self._keep = folder, about, keep

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Called on one rank, when all have written."""
        super().finish(metadata, results)
        partial = Path(self.path)
        with (partial / ABOUT).open("w") as file:
            file.write(self._about.to_json())
            file.flush()
            os.fsync(file.fileno())
        _remove(self._folder)
        partial.rename(self._folder)
        if self._keep is not None:
            for step in complete_steps(self._folder.parent)[: -self._keep]:
                _remove(self._folder.with_name(f"step-{step}"))


@contextmanager
def _saying(where: Path) -> Iterator[None]:
    """What went wrong on the ranks, a full disk for example, as one error."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{where}: rank {rank}: {type(cause).__name__}: {cause}") from error


def _clear_leftovers(folder: Path) -> None:
    """Remove what crashes have left."""
    for pattern in ("step-*.partial", "step-*.removed"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


def _remove(folder: Path) -> None:
    """Under another name first: a folder that is half removed must not look complete."""
    if folder.exists():
        removed = folder.with_name(f"{folder.name}.removed")
        folder.rename(removed)
        shutil.rmtree(removed)


def held_once(
    tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Without what another stage saves: a parameter that is tied across stages lies on the devices
    of both, perhaps cut differently. The stage of the lowest rank saves it."""

    def lowest(tensor: Tensor) -> int:
        return int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else 0

    mine = {key: lowest(tensor) for key, tensor in tensors.items()}
    every: list[dict[str, int]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(every, mine, group=group)
    return {
        key: tensor
        for key, tensor in tensors.items()
        if mine[key] == min(one[key] for one in every if key in one)
    }
