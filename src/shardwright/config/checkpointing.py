"""What a run begins with, and what it keeps: weights and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwright.config.schema import TrainSection
from shardwright.errors import CheckpointError
from shardwright.train.checkpoint import Checkpoints
from shardwright.train.position import BEGINNING, Position
from shardwright.train.weights import load_weights


@dataclass(frozen=True)
class CheckpointPolicy:
    """What the configuration says of weights and checkpoints.

    Args:
        said: the section `train`.
        folder: what its paths are relative to.
        file: the name of the configuration, for errors.
        load_key, resume_key: what it calls the weights to begin with, and whether to go on.
        must_resume: whether it is an error if there is nothing to go on from.
    """

    said: TrainSection
    folder: Path
    file: str
    load_key: str = "train.load"
    resume_key: str = "train.resume"
    must_resume: bool = False

    @property
    def weights(self) -> Path | None:
        """Where the weights to begin with are; None for new ones."""
        return None if self.said.load is None else self.folder / self.said.load

    def checkpoints(self) -> Checkpoints | None:
        """The run's checkpoints; None where it keeps none."""
        said = self.said.checkpoint
        if said is None:
            return None
        folder = self.folder / said.folder
        return Checkpoints(folder, keep=said.keep, asynchronous=said.asynchronous)

    def check(self) -> None:
        """Raises:
        CheckpointError: the run is to start anew, but its folder holds the checkpoints of another;
            or it is to go on, but keeps none, or must, but there are none; or there are no weights
            to begin with.
        """
        checkpoints, weights = self.checkpoints(), self.weights
        if weights is not None and not weights.exists():
            raise CheckpointError(
                f"{self.file}: {self.load_key}: {weights}: there is no such file or folder"
            )
        if self.said.resume and checkpoints is None:
            raise CheckpointError(
                "there is nothing to resume: the key train.checkpoint is not given, for example "
                "train: {checkpoint: {folder: checkpoints, every: 100}}"
            )
        if checkpoints is None:
            return
        steps = checkpoints.steps()
        if self.must_resume and not steps:
            raise CheckpointError(
                f"{self.file}: {self.resume_key}: {checkpoints.folder} holds no complete checkpoint"
                " to go on from; valid is False, or the folder of an earlier run as"
                f" {self.load_key}"
            )
        if steps and not self.said.resume:
            raise CheckpointError(
                f"{checkpoints.folder} holds the checkpoints of a run, up to step "
                f"{steps[-1]}: go on from there with --resume, or name another folder"
            )

    def begin(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, checkpoints: Checkpoints | None
    ) -> Position:
        """Where the run goes on: after its newest checkpoint; else at the beginning, with the
        weights that it is told to load."""
        if checkpoints is not None and self.said.resume and checkpoints.newest() is not None:
            return checkpoints.load(net, optimizer)
        if self.weights is not None:
            load_weights(net, self.weights)
        return BEGINNING

    def saves_at(self, step: int, last: int) -> bool:
        """Every so many steps, and after the last."""
        said = self.said.checkpoint
        return said is not None and (step % said.every == 0 or step == last)
