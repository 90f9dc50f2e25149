"""Weights and checkpoints: what a run starts from, and what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwright.core.checkpoint.checkpoint import Checkpoints
from shardwright.core.checkpoint.manifest import CheckpointInfo, RunNumbers
from shardwright.core.checkpoint.position import BEGINNING, Position
from shardwright.errors import CheckpointError
from shardwright.run.config.schema import TrainSection
from shardwright.run.loop.weights import load_weights


@dataclass(frozen=True)
class CheckpointPolicy:
    """The weights and checkpoints of a configuration.

    Args:
        train: the section of this name.
        folder: what its paths are relative to.
        file: the name of the configuration, for errors.
        load_key, resume_key: its keys for the weights to start from, and for resuming.
        must_resume: whether it is an error if there is nothing to resume from.
    """

    train: TrainSection
    folder: Path
    file: str
    load_key: str = "train.load"
    resume_key: str = "train.resume"
    must_resume: bool = False

    @property
    def weights(self) -> Path | None:
        """Where the weights to start from are; None for new ones."""
        return None if self.train.load is None else self.folder / self.train.load

    def checkpoints(self) -> Checkpoints | None:
        """The run's checkpoints; None where it saves none."""
        section = self.train.checkpoint
        if section is None:
            return None
        folder = self.folder / section.folder
        return Checkpoints(folder, keep=section.keep, asynchronous=section.asynchronous)

    def check(self) -> None:
        """Raises:
        CheckpointError: the run starts anew, but its folder holds the checkpoints of another; or it
            resumes, but saves none, or must resume, but there are none; or the weights to start
            from are missing.
        """
        checkpoints, weights = self.checkpoints(), self.weights
        if weights is not None and not weights.exists():
            raise CheckpointError(
                f"{self.file}: {self.load_key}: {weights}: no such file or folder"
            )
        if self.train.resume and checkpoints is None:
            raise CheckpointError(
                "nothing to resume: set train.checkpoint, for example "
                "train: {checkpoint: {folder: checkpoints, every: 100}}"
            )
        if checkpoints is None:
            return
        steps = checkpoints.steps()
        if self.must_resume and not steps:
            raise CheckpointError(
                f"{self.file}: {self.resume_key}: {checkpoints.folder} holds no complete checkpoint"
                f" to resume from; set it to False, or {self.load_key} to the folder of an earlier"
                " run"
            )
        if steps and not self.train.resume:
            raise CheckpointError(
                f"{checkpoints.folder} holds the checkpoints of a run, up to step "
                f"{steps[-1]}: resume it with --resume, or choose another folder"
            )

    def begin(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoints: Checkpoints | None,
        numbers: RunNumbers,
    ) -> Position:
        """Where the run starts: after its newest intact checkpoint; else at the beginning, with the
        weights that the configuration names.

        The optimizer keeps the settings of the configuration, and random generators start anew if
        `numbers.seed` is not that of the checkpoint.

        Raises:
            CheckpointError: if the checkpoint is of another model or optimizer, or in the middle of
                an epoch whose samples now have another order.
        """
        if checkpoints is not None and self.train.resume and checkpoints.newest() is not None:
            step, info = checkpoints.select()
            self._check_order(checkpoints.path(step), info, numbers)
            random = info.run is None or info.run.seed == numbers.seed
            return checkpoints.restore(step, info, net, optimizer, settings="own", random=random)
        if self.weights is not None:
            load_weights(net, self.weights)
        return BEGINNING

    def _check_order(self, folder: Path, info: CheckpointInfo, numbers: RunNumbers) -> None:
        """Raises: CheckpointError: the rest of the epoch cannot be told from what was trained."""
        position, saved = info.position, info.run
        if saved is None or not (position.batch or position.sample):
            return
        changes = {
            "data.seed": (saved.data_seed, numbers.data_seed),
            "the number of samples": (saved.samples, numbers.samples),
        }
        for name, (before, after) in changes.items():
            if before != after:
                raise CheckpointError(
                    f"{self.file}: {name} is {after}, but was {before} when {folder} was saved in"
                    f" the middle of epoch {position.epoch}: in another order, samples would be"
                    f" trained twice or never: resume with {before}, or start anew from its"
                    f" weights, with {self.load_key}: {folder} and another folder for checkpoints"
                )

    def saves_at(self, step: int, last: int) -> bool:
        """Every so many steps, and after the last."""
        section = self.train.checkpoint
        return section is not None and (step % section.every == 0 or step == last)
