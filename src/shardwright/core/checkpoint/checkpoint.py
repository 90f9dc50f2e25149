"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for any plan and device count.

A checkpoint is a subfolder `step-N` of the run's folder. Keys are the parameter names of the
original model, and each rank reads the shards that its own plan needs. So a model can be loaded
under another plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwright.core.agreement.collective import (
    has_other_ranks,
    is_rank_0,
    value_of_rank,
)
from shardwright.core.checkpoint import state as checkpoint_state
from shardwright.core.checkpoint.dcp_errors import convert_errors
from shardwright.core.checkpoint.folder_lock import lock_folders
from shardwright.core.checkpoint.group_settings import check_group_settings, group_settings
from shardwright.core.checkpoint.manifest import (
    CheckpointInfo,
    CheckpointWarning,
    RunNumbers,
)
from shardwright.core.checkpoint.parameter_names import match_saved_names
from shardwright.core.checkpoint.position import Position
from shardwright.core.checkpoint.shared_folder import check_saves_agree, check_shared_folder
from shardwright.core.checkpoint.storage import (
    CheckpointReader,
    OneRankPlanner,
    PublishingWriter,
    checkpoint_folder,
    clear_leftovers,
    complete_steps,
)
from shardwright.core.checkpoint.verified_info import check_optimizer, read_verified_info
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.uninitialized import allocate_memory
from shardwright.core.plan import Plan
from shardwright.core.runtime.accelerator import HOST_BACKEND
from shardwright.core.runtime.counted_calls import by_all_ranks
from shardwright.core.runtime.devices import world_timeout
from shardwright.errors import CheckpointError, DamagedCheckpointError, LockError, warn_user

# DCP warns if it runs without a process group, as a single process intentionally does.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

Settings = Literal["saved", "own"]
"""Source of an optimizer's settings after loading: the checkpoint, or the optimizer itself."""


class Checkpoints:
    """The checkpoints of one run in a folder. Every rank must make the same calls.

    A context manager that waits on exit until an asynchronous `save` is complete. From the first
    `save` until exit the folder is locked against other processes.

    Args:
        folder: the folder that contains the subfolders `step-N`.
        keep: number of newest checkpoints to keep; None for all.
        asynchronous: whether `save` returns once the tensors are copied, and writes files while
            training continues, one checkpoint at a time.

    Raises:
        CheckpointError: if `keep` is less than 1.
    """

    def __init__(
        self, folder: str | Path, *, keep: int | None = None, asynchronous: bool = False
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"keep={keep} would remove each checkpoint once it is saved\n"
                "pass the number of newest checkpoints to keep, at least 1, or None for all"
            )
        self.folder = Path(folder)
        self._keep, self._asynchronous = keep, asynchronous
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[Path, Future[Metadata]] | None = None
        self._locks: ExitStack | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        # After an error, waiting could hang: other ranks may never write their shards.
        if exception_type is None:
            self.wait()
            if self._locks is not None:
                self._locks.close()
                self._locks = None
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return checkpoint_folder(self.folder, step)

    def steps(self) -> list[int]:
        """List the steps of all complete checkpoints in ascending order."""
        return complete_steps(self.folder)

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint on rank 0's file system; None without a
        checkpoint.

        Collective, with the same result on every rank.
        """
        return max(value_of_rank(self.steps()), default=None)

    def select(self, step: int | None = None) -> tuple[int, CheckpointInfo]:
        """Select a checkpoint and verify its checksums; each rank verifies some of the files.

        Collective, with the same result on every rank. A `CheckpointWarning` lists newer
        checkpoints that are damaged.

        Args:
            step: the step of the checkpoint; by default the step of the newest intact checkpoint.

        Returns:
            The step, and the contents of the checkpoint other than tensors.

        Raises:
            CheckpointError: if the folder contains no checkpoint, or no checkpoint of `step`.
            DamagedCheckpointError: if the checkpoint of `step`, or without `step` every checkpoint,
                is damaged.
        """
        # Newest first: an older checkpoint is used only if all newer ones are damaged.
        candidates = value_of_rank(self.steps())[::-1] if step is None else [step]
        if not candidates:
            raise CheckpointError(
                f"{self.folder} contains no complete checkpoint\n"
                "pass the folder in which the run saved its checkpoints"
            )
        problems: list[str] = []
        for candidate in candidates:
            folder = self.path(candidate)
            info = read_verified_info(folder)
            if isinstance(info, CheckpointInfo):
                break
            problems.append(info)
        else:
            raise DamagedCheckpointError(
                f"{'; '.join(problems)}\n"
                "copy the checkpoint again from where it was saved, or load another one"
            )
        if problems:
            warn_user(f"{'; '.join(problems)}: {folder} is used instead", CheckpointWarning)
        elif not info.files:
            warn_user(
                f"{folder} has no checksums (checkpoint version 1): damage is not detected\nsave a "
                "new checkpoint, which has checksums",
                CheckpointWarning,
            )
        return candidate, info

    @by_all_ranks("save_checkpoint")
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

        Replaces an existing checkpoint of the same step. Once the new checkpoint is complete, all
        but the newest `keep` checkpoints are removed.

        Args:
            net: the model, parallelized or not.
            optimizer: the optimizer whose state is saved; None to save the model alone.
            position: the position of the run in its data.
            plan: the plan of `net`, whose fingerprint and number of devices are recorded.
            run: the run's seeds and number of samples, which are compared on resumption.
            only: names of the parameters and buffers to save; None for all.

        Raises:
            CheckpointError: if the optimizer has parameters that are not in the model, or state
                that is not a tensor, if this or the previous checkpoint could not be written, if
                another process has locked the folder, or if folders, positions or optimizers differ
                between ranks.
        """
        model_state = checkpoint_state.model_tensors(net).items()
        # Keys are `model.<name>`, but `only` has the names of the model.
        tensors = {k: t for k, t in model_state if only is None or k.partition(".")[2] in only}
        if optimizer is not None:
            tensors |= checkpoint_state.optimizer_tensors(net, optimizer)
        # One rank suffices: on several devices random operators are seeded by seed, step, name and
        # shard, not by the states of these generators.
        if is_rank_0():
            tensors |= checkpoint_state.random_tensors(checkpoint_state.device_of(net))
        info = CheckpointInfo(
            position=position,
            groups=None if optimizer is None else group_settings(optimizer),
            random=(net.execution.random_seed, net.execution.random_step)
            if isinstance(net, ParallelModule)
            else None,
            fingerprint=plan.fingerprint if plan is not None else None,
            devices=plan.devices if plan is not None else None,
            optimizer=None if optimizer is None else type(optimizer).__name__,
            run=run,
        )
        # One checkpoint at a time: saves share a process group, and a failure of the last one is
        # raised here.
        self.wait()
        check_saves_agree(position, info.optimizer)
        if has_other_ranks() and self._group is None:
            check_shared_folder(self.folder)
            # A separate group: asynchronous saves run collectives beside those of training steps.
            # Ranks wait in it while others write their files, so its timeout is long.
            self._group = dist.new_group(backend=HOST_BACKEND, timeout=world_timeout())
        # Collective: no rank starts writing before rank 0 has cleared the leftovers.
        problem = value_of_rank(self._prepare_folder_for_save(position.step))
        if problem is not None:
            raise CheckpointError(f"cannot save {self.path(position.step)}: {problem}")
        if self._group is not None:
            tensors = checkpoint_state.drop_tied_duplicates(tensors, self._group)
        path = self.folder / f"step-{position.step}"
        writer = PublishingWriter(path, info, self._keep)
        save_options: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
        # Also with fake ranks, which take no part in DCP's collectives.
        save_options["no_dist"] = self._group is None
        # With fake ranks there is one real rank; DCP's own planner would miss the shards of the
        # others.
        if dist.is_initialized() and self._group is None:
            save_options["planner"] = OneRankPlanner()
        with convert_errors(path):
            if self._asynchronous:
                pending = state_dict_saver.async_save(dict(tensors), **save_options)
                self._pending = path, cast("Future[Metadata]", pending)
            else:
                state_dict_saver.save(dict(tensors), **save_options)

    def _prepare_folder_for_save(self, step: int) -> str | None:
        """Lock the folder and remove leftovers of crashed runs, on rank 0 only.

        The lock comes first, as files of another running process would look like leftovers.

        Returns:
            An error message; None after success, and on other ranks.
        """
        if not is_rank_0():
            return None
        try:
            if self._locks is None:
                locks = ExitStack()
                locks.enter_context(lock_folders(self.folder))
                self._locks = locks
            clear_leftovers(self.folder, step)
        # Returned and not raised, as the other ranks wait for this value.
        except (LockError, CheckpointError, OSError) as error:
            return f"rank 0: {error}"
        return None

    def wait(self) -> None:
        """Wait until an asynchronous `save` is complete.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        # Cleared first, so that a failure is raised once.
        pending, self._pending = self._pending, None
        if pending is not None:
            path, future = pending
            with convert_errors(path):
                future.result()

    @by_all_ranks("load_checkpoint")
    def load(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        *,
        strict: bool = True,
    ) -> Position:
        """Load a checkpoint into `net` and `optimizer`, in place. Collective.

        The checkpoint may have been saved under another plan. Each rank reads its own shards only.

        Args:
            net: the model, parallelized or not.
            optimizer: the optimizer; None to load the model alone. LoRA adapters that are not in
                the checkpoint then keep their values.
            step: the step of the checkpoint; by default the step of the newest intact checkpoint.
            strict: whether all parameters and buffers must be in the checkpoint; otherwise missing
                ones keep their values.

        Returns:
            The position of the run at which the checkpoint was saved.

        Raises:
            CheckpointError: if there is no complete checkpoint, or the checkpoint belongs to
                another model or optimizer.
            DamagedCheckpointError: if a file is damaged, truncated or missing.
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
        """Load a checkpoint that `select` has verified into `net` and `optimizer`, in place.

        Args:
            step: the step of the checkpoint.
            info: the verified contents of its `checkpoint.json`.
            net: the model, parallelized or not.
            optimizer: the optimizer; None to load the model alone.
            settings: `saved` to restore settings such as the learning rate, as
                `Optimizer.load_state_dict` does; `own` to keep the settings of `optimizer`.
            random: whether to restore the states of the random generators.
            strict: whether all parameters and buffers must be in the checkpoint.

        Returns:
            The position of the run at which the checkpoint was saved.

        Raises:
            CheckpointError: if the checkpoint belongs to another model or optimizer.
        """
        folder = self.path(step)
        reader = CheckpointReader(folder, info.files)
        saved = cast("dict[str, TensorStorageMetadata]", reader.read_metadata().state_dict_metadata)
        prefix = f"{checkpoint_state.MODEL}."
        shapes = {k.removeprefix(prefix): e.size for k, e in saved.items() if k.startswith(prefix)}
        if strict and dist.is_initialized() and not has_other_ranks():
            # With fake ranks (a rehearsal) only one stage was saved: add the names of the others.
            full_state = checkpoint_state.original_module(net).state_dict()
            shapes = {name: each.shape for name, each in full_state.items()} | shapes
        names = match_saved_names(
            net, shapes, str(folder), new_adapters=optimizer is None, strict=strict
        )
        # After the comparison of names and shapes, so that a checkpoint of another model changes
        # nothing.
        allocate_memory(net)
        # A pipeline stage has only some of the model's tensors, and reads only those.
        local, optimizer_state = checkpoint_state.model_tensors(net), dict[str, Tensor]()
        model_state = {
            prefix + names[name]: local[prefix + name] for name in names if prefix + name in local
        }
        groups = info.groups if settings == "saved" else None
        if optimizer is not None:
            check_optimizer(optimizer, info, folder)
            if groups is not None:
                check_group_settings(optimizer, groups, folder)
            optimizer_state = checkpoint_state.allocate_optimizer_state(
                net, optimizer, saved, folder
            )
        device = checkpoint_state.device_of(net)
        generators = checkpoint_state.random_tensors(device) if random else {}
        # A run on another type of device has saved no state of this device's generator.
        generators = {key: state for key, state in generators.items() if key in saved}
        with convert_errors(folder):
            destinations = {**model_state, **optimizer_state, **generators}
            # `no_dist`: every rank plans its own reads, so loading needs no communication.
            state_dict_loader.load(destinations, storage_reader=reader, no_dist=True)
        if optimizer is not None:
            checkpoint_state.restore_optimizer(net, optimizer, optimizer_state, groups)
        checkpoint_state.restore_random(generators, device)
        if isinstance(net, ParallelModule) and info.random is not None:
            # The step is restored in any case, as the run goes on there, perhaps with another seed.
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
    """Save a checkpoint, which is complete on return. Collective.

    Args:
        folder: the folder of the run's checkpoints, in which a subfolder `step-N` is created.
        net: the model, parallelized or not.
        optimizer: the optimizer whose state is saved; None to save the model alone.
        position: the position of the run in its data, which `load_checkpoint` returns.
        plan: the plan of `net`, whose fingerprint is recorded.
        keep: number of newest checkpoints to keep in the folder; None for all.
        only: names of the parameters and buffers to save; None for all. Load a partial checkpoint
            with `load_checkpoint(..., strict=False)`.

    Raises:
        CheckpointError: if the optimizer has parameters that are not in the model, or state that is
            not a tensor, if the checkpoint could not be written, if another process has locked the
            folder, if folders, positions or optimizers differ between ranks, or if `keep` is less
            than 1.
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
    """Load a checkpoint into `net` and `optimizer`, in place. Collective.

    The checkpoint may have been saved under another plan, on another number of devices.

    Args:
        folder: the folder of the run's checkpoints.
        net: the model, parallelized or not.
        optimizer: the optimizer; None to load the model alone.
        step: the step of the checkpoint; by default the step of the newest intact checkpoint.
        strict: whether all parameters and buffers must be in the checkpoint; otherwise missing ones
            keep their values.

    Returns:
        The position of the run at which the checkpoint was saved.

    Raises:
        CheckpointError: if there is no complete checkpoint, or the checkpoint belongs to another
            model or optimizer.
        DamagedCheckpointError: if a file is damaged, truncated or missing.
    """
    return Checkpoints(folder).load(net, optimizer, step, strict=strict)
