"""Load the initial weights or a checkpoint of a run, and decide when the run saves checkpoints."""

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
    """Initial weights, checkpoint folder and save interval of a run.

    Args:
        train: the `train` section of the configuration.
        folder: the folder to which paths of the configuration are relative.
        file: name of the configuration file, for error messages.
        load_key, resume_key: names of the keys for initial weights and for resuming in `file`, for
            error messages.
        must_resume: whether to raise an error if there is no checkpoint to resume from.
    """

    train: TrainSection
    folder: Path
    file: str
    load_key: str = "train.load"
    resume_key: str = "train.resume"
    must_resume: bool = False

    @property
    def weights(self) -> Path | None:
        """Path of the initial weights; None for random initialization."""
        return None if self.train.load is None else self.folder / self.train.load

    def checkpoints(self) -> Checkpoints | None:
        """Open the checkpoint folder of the run; None without `train.checkpoint`."""
        section = self.train.checkpoint
        if section is None:
            return None
        folder = self.folder / section.folder
        return Checkpoints(folder, keep=section.keep, asynchronous=section.asynchronous)

    def check(self) -> None:
        """Check that the run can start from its weights or checkpoints.

        Raises:
            CheckpointError: if the folder of a new run already has checkpoints, a run to resume has
                none, or the initial weights are missing.
        """
        checkpoints, weights = self.checkpoints(), self.weights
        steps = checkpoints.steps() if checkpoints is not None else []
        # A run that resumes reads its checkpoint instead.
        resumes = self.train.resume and bool(steps)
        if weights is not None and not resumes and not weights.exists():
            raise CheckpointError(
                f"{self.file}: {self.load_key}: {weights}: no such file or folder\n"
                f"set `{self.load_key}` to a `state_dict` file or a folder of checkpoints"
            )
        if self.train.resume and checkpoints is None:
            raise CheckpointError(
                f"{self.file}: nothing to resume: the key `train.checkpoint` is not set\n"
                "set it, for example `train: {checkpoint: {folder: checkpoints, every: 100}}`"
            )
        if checkpoints is None:
            return
        if self.must_resume and not steps:
            raise CheckpointError(
                f"{self.file}: {self.resume_key}: {checkpoints.folder} contains no complete"
                f" checkpoint to resume from\nset `{self.resume_key}` to False, or"
                f" `{self.load_key}` to the folder of an earlier run"
            )
        # A second run in this folder would delete the checkpoints of the first beyond `keep`.
        if steps and not self.train.resume:
            raise CheckpointError(
                f"{checkpoints.folder} already contains checkpoints of a run, up to step "
                f"{steps[-1]}\nresume that run with --resume, or set `train.checkpoint.folder` to"
                " another folder"
            )

    def begin(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        checkpoints: Checkpoints | None,
        numbers: RunNumbers,
    ) -> Position:
        """Restore the newest intact checkpoint, or load the initial weights.

        Optimizer hyperparameters come from the configuration, not from the checkpoint. Random
        generators are reseeded if `numbers.seed` differs from the checkpoint's.

        Returns:
            The position at which training starts.

        Raises:
            CheckpointError: if the checkpoint belongs to another model or optimizer, or was saved
                in the middle of an epoch whose sample order has changed.
        """
        # `train.load` counts only at the first start: a checkpoint has later weights.
        if checkpoints is not None and self.train.resume and checkpoints.newest() is not None:
            step, info = checkpoints.select()
            self._check_sample_order(checkpoints.path(step), info, numbers)
            # A run with another seed asks for other numbers, which the saved generators would not
            # draw.
            random = info.run is None or info.run.seed == numbers.seed
            return checkpoints.restore(step, info, net, optimizer, settings="own", random=random)
        if self.weights is not None:
            load_weights(net, self.weights)
        return BEGINNING

    def _check_sample_order(self, folder: Path, info: CheckpointInfo, numbers: RunNumbers) -> None:
        """Raise CheckpointError if the sample order of a partly trained epoch has changed."""
        position, saved = info.position, info.run
        # At an epoch boundary no sample of the next epoch has been trained on: any order is valid.
        if saved is None or not (position.batch or position.sample):
            return
        changes = {
            "`data.seed`": (saved.data_seed, numbers.data_seed),
            "the number of samples": (saved.samples, numbers.samples),
        }
        for name, (saved_value, new_value) in changes.items():
            if saved_value != new_value:
                raise CheckpointError(
                    f"{self.file}: {name} is {new_value}, but was {saved_value} when {folder} was"
                    f" saved in the middle of epoch {position.epoch}: the sample order would"
                    " change, and samples would be trained on twice or never\n"
                    f"resume with {name} = {saved_value}, or start a new run from these weights,"
                    f" with `{self.load_key}: {folder}` and another `train.checkpoint.folder`"
                )

    def saves_at(self, step: int, last_step: int) -> bool:
        """Whether the run saves a checkpoint after `step`: at its interval and after the last."""
        section = self.train.checkpoint
        # The last step is saved at any interval: its weights are the result of the run.
        return section is not None and (step % section.every == 0 or step == last_step)
