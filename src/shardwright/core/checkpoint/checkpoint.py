"""Checkpoints in the format of torch.distributed.checkpoint, independent of plan and device count.

A checkpoint is a subfolder `step-N` of the run's folder.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Container, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwright.core.agreement.collective import (
    has_other_ranks,
    is_rank_0,
    value_of_rank,
    values_of_ranks,
)
from shardwright.core.checkpoint import state as checkpoint_state
from shardwright.core.checkpoint.folder_lock import lock_folders
from shardwright.core.checkpoint.manifest import (
    CheckpointInfo,
    CheckpointWarning,
    RunNumbers,
    find_damage,
)
from shardwright.core.checkpoint.parameter_names import match_saved_names
from shardwright.core.checkpoint.position import Position
from shardwright.core.checkpoint.storage import (
    CheckpointReader,
    OneRankPlanner,
    PublishingWriter,
    clear_leftovers,
    complete_steps,
)
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.runtime.accelerator import HOST_BACKEND
from shardwright.core.runtime.devices import world_timeout
from shardwright.errors import CheckpointError, DamagedCheckpointError, LockError

# Saving and loading in a single process, also in a thread, is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

Settings = Literal["saved", "own"]
"""Whose settings an optimizer has after loading: the checkpoint's, or those it was built with."""

FULL_DISK = 2**20
"""A disk with fewer bytes free is called full when writing fails."""


class Checkpoints:
    """The checkpoints of one run in `folder`; every rank must make the same calls.

    As a context manager it waits on exit for a checkpoint that is still being written. From the
    first `save` until then its folder is locked: other processes cannot save there.

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
        self._pending: tuple[Path, Future[Metadata]] | None = None
        self._locks: ExitStack | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Not after an error: other ranks may never write their shards.
        if kind is None:
            self.wait()
            if self._locks is not None:
                self._locks.close()
                self._locks = None
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints in ascending order."""
        return complete_steps(self.folder)

    def newest(self) -> int | None:
        """The step of the newest checkpoint that rank 0 sees; None if there is none.

        Collective: every rank must call it, and gets the same result.
        """
        return max(value_of_rank(self.steps()), default=None)

    def select(self, step: int | None = None) -> tuple[int, CheckpointInfo]:
        """The checkpoint of `step`, by default the newest intact one, and what it holds beside
        tensors. The ranks share the verification of its checksums.

        Collective: every rank must call it, and gets the same result. Damaged checkpoints that are
        newer are named by a `CheckpointWarning`.

        Raises:
            CheckpointError: if there is none.
            DamagedCheckpointError: if all are damaged, or that of `step` is; the message names the
                file.
        """
        candidates = value_of_rank(self.steps())[::-1] if step is None else [step]
        if not candidates:
            raise CheckpointError(f"{self.folder} contains no complete checkpoint")
        problems: list[str] = []
        for candidate in candidates:
            folder = self.path(candidate)
            info = _verified(folder)
            if isinstance(info, CheckpointInfo):
                break
            problems.append(info)
        else:
            raise DamagedCheckpointError("; ".join(problems))
        if problems:
            _warn(f"{'; '.join(problems)}: {folder} is taken instead")
        elif not info.files:
            _warn(f"{folder} has no checksums (checkpoint version 1): damage may go unnoticed")
        return candidate, info

    def save(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        position: Position,
        plan: Plan | None = None,
        run: RunNumbers | None = None,
        *,
        only: Container[str] | None = None,
    ) -> None:
        """Save model, optimizer, random states and position as the checkpoint of `position.step`.

        It replaces a checkpoint of the same step. Checkpoints in excess of `keep` are removed once
        it is complete.

        Args:
            only: names of the parameters and buffers that are saved; None for all.

        Raises:
            CheckpointError: if the optimizer has parameters that the model does not have, or state
                that is not a tensor, if this or the previous checkpoint could not be written, or
                if another process has locked the folder.
        """
        held = checkpoint_state.model_tensors(net).items()
        tensors = {k: t for k, t in held if only is None or k.partition(".")[2] in only}
        if optimizer is not None:
            tensors |= checkpoint_state.optimizer_tensors(net, optimizer)
        if is_rank_0():
            tensors |= checkpoint_state.random_tensors(checkpoint_state.device_of(net))
        about = CheckpointInfo(
            position=position,
            groups=None if optimizer is None else checkpoint_state.optimizer_groups(optimizer),
            random=(net.execution.random_seed, net.execution.random_step)
            if isinstance(net, ParallelModule)
            else None,
            fingerprint=plan.fingerprint if plan is not None else None,
            devices=plan.devices if plan is not None else None,
            optimizer=None if optimizer is None else type(optimizer).__name__,
            run=run,
        )
        self.wait()
        if has_other_ranks() and self._group is None:
            # Long timeout: ranks wait in this group while others write their files.
            self._group = dist.new_group(backend=HOST_BACKEND, timeout=world_timeout())
        # Collective: no rank starts writing before rank 0 has cleared the leftovers.
        problem = value_of_rank(self._claim())
        if problem is not None:
            raise CheckpointError(problem)
        if self._group is not None:
            tensors = checkpoint_state.drop_tied_duplicates(tensors, self._group)
        writer = PublishingWriter(self.path(position.step), about, self._keep)
        target: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
        target["no_dist"] = self._group is None
        if dist.is_initialized() and self._group is None:
            target["planner"] = OneRankPlanner()
        path = self.path(position.step)
        with _convert_errors(path):
            if self._asynchronous:
                pending = state_dict_saver.async_save(dict(tensors), **target)
                self._pending = path, cast("Future[Metadata]", pending)
            else:
                state_dict_saver.save(dict(tensors), **target)

    def _claim(self) -> str | None:
        """On rank 0, locks the folder and removes the leftovers of crashed runs, which those of a
        live one could not be told from; says what prevents it."""
        if not is_rank_0():
            return None
        try:
            if self._locks is None:
                locks = ExitStack()
                locks.enter_context(lock_folders(self.folder))
                self._locks = locks
            clear_leftovers(self.folder)
        except (LockError, OSError) as error:
            return f"rank 0: {error}"
        return None

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: if it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            path, future = pending
            with _convert_errors(path):
                future.result()

    def load(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        *,
        strict: bool = True,
    ) -> Position:
        """Load the checkpoint of `step` (by default the newest intact one) into `net` and
        `optimizer`.

        The checkpoint may have been saved under another plan. Each rank reads only its own shards,
        in place. Without an optimizer, LoRA adapters that were not saved keep their values; if not
        `strict`, so does whatever was saved elsewhere.

        Raises:
            CheckpointError: if there is no complete checkpoint, it belongs to another model (the
                message names the first parameter that differs), or its optimizer does not match.
            DamagedCheckpointError: if a file of it is damaged, truncated or missing.
        """
        return self.restore(*self.select(step), net, optimizer, strict=strict)

    def restore(
        self,
        step: int,
        info: CheckpointInfo,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        settings: Settings = "saved",
        random: bool = True,
        strict: bool = True,
    ) -> Position:
        """Load the checkpoint that `select` returned, without verifying it again.

        Args:
            settings: whether the parameter groups of `optimizer` get the settings that were saved,
                as with its `load_state_dict`, or keep their own.
            random: whether random generators continue where they were.
            strict: whether the checkpoint must have all parameters and buffers.

        Raises:
            CheckpointError: as `load`.
        """
        folder = self.path(step)
        reader = CheckpointReader(folder)
        saved = cast("dict[str, TensorStorageMetadata]", reader.read_metadata().state_dict_metadata)
        prefix = f"{checkpoint_state.MODEL}."
        shapes = {k.removeprefix(prefix): e.size for k, e in saved.items() if k.startswith(prefix)}
        if strict and dist.is_initialized() and not has_other_ranks():
            whole = checkpoint_state.original_module(net).state_dict()
            shapes = {name: each.shape for name, each in whole.items()} | shapes
        names = match_saved_names(
            net, shapes, str(folder), new_adapters=optimizer is None, strict=strict
        )
        held, optimized = checkpoint_state.model_tensors(net), dict[str, Tensor]()
        model = {
            prefix + names[name]: held[prefix + name] for name in names if prefix + name in held
        }
        if optimizer is not None:
            _check_optimizer(optimizer, info, folder)
            optimized = checkpoint_state.allocate_optimizer_state(net, optimizer, saved)
        device = checkpoint_state.device_of(net)
        states = checkpoint_state.random_tensors(device) if random else {}
        states = {key: state for key, state in states.items() if key in saved}
        with _convert_errors(folder):
            places = {**model, **optimized, **states}
            state_dict_loader.load(places, storage_reader=reader, no_dist=True)
        if optimizer is not None:
            groups = info.groups if settings == "saved" else None
            checkpoint_state.restore_optimizer(net, optimizer, optimized, groups)
        checkpoint_state.restore_random(states, device)
        if isinstance(net, ParallelModule) and info.random is not None:
            seed, net.execution.random_step = info.random
            net.execution.random_seed = seed if random else net.execution.random_seed
        return info.position


def save_checkpoint(
    folder: str | Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    position: Position,
    plan: Plan | None = None,
    keep: int | None = None,
    only: Container[str] | None = None,
) -> None:
    """Save a checkpoint in `folder`, which is complete when this returns. Every rank must call it.

    Args:
        position: the position of the run, which `load_checkpoint` returns.
        plan: the plan of `net`; its fingerprint is recorded.
        keep: number of newest checkpoints to keep in the folder; None for all.
        only: names of the parameters and buffers that are saved; None for all. If others are saved
            elsewhere, `load_checkpoint` is told by `strict=False`.

    Raises:
        CheckpointError: if the optimizer has parameters that the model does not have, or state that
            is not a tensor.
    """
    with Checkpoints(folder, keep=keep) as checkpoints:
        checkpoints.save(net, optimizer, position, plan, only=only)


def load_checkpoint(
    folder: str | Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
) -> Position:
    """Load the checkpoint of `step` (by default the newest) in `folder` into `net` and `optimizer`.

    It may have been saved under another plan, on another number of devices. Every rank must call
    it.

    Args:
        strict: whether it must have all parameters and buffers; others keep their values.

    Returns:
        The position of the run when it was saved.

    Raises:
        CheckpointError: if there is no complete checkpoint, it belongs to another model (the
            message names the first parameter that differs), or its optimizer does not match.
    """
    return Checkpoints(folder).load(net, optimizer, step, strict=strict)


def _verified(folder: Path) -> CheckpointInfo | str:
    """What the checkpoint holds beside tensors, or what is damaged; the same on every rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if has_other_ranks() else (0, 1)
    result: CheckpointInfo | Exception | str
    try:
        result = info = CheckpointInfo.read(folder)
        result = find_damage(folder, sorted(info.files.items())[rank::size]) or info
    except DamagedCheckpointError as error:
        result = str(error)
    except CheckpointError as error:
        result = error
    results = values_of_ranks(result)
    failed = next((each for each in results if not isinstance(each, CheckpointInfo)), result)
    if isinstance(failed, Exception):
        raise failed
    return failed


def _check_optimizer(optimizer: torch.optim.Optimizer, info: CheckpointInfo, folder: Path) -> None:
    own = type(optimizer).__name__
    if info.groups is None:
        raise CheckpointError(f"{folder} was saved without an optimizer")
    saved = info.optimizer
    if saved is None and set(info.groups[0]) - {"initial_lr"} - set(optimizer.param_groups[0]):
        saved = "another optimizer"
    if saved not in (None, own):
        raise CheckpointError(
            f"{folder} was saved with {saved}, whose state {own} cannot continue: use"
            f" {info.optimizer or 'the same'}, or start anew from the weights, with train.load:"
            f" {folder}"
        )


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=4)


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Raises failures of ranks as a single CheckpointError, which says whether the disk is full:
    what `torch.save` raises then does not."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        free = shutil.disk_usage(path.parent).free
        full = f": no space left ({free} bytes are free)" if free < FULL_DISK else ""
        raise CheckpointError(
            f"{path}: rank {rank}{full}: {type(cause).__name__}: {cause}"
        ) from error
