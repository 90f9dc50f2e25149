"""A small run of `Trainer`, plain or planned, that saves a checkpoint every two steps.

python small_trainer_ranks.py train FOLDER
python small_trainer_ranks.py resume FOLDER CHECKPOINT
python small_trainer_ranks.py save_on_rank_0 FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.trainer_cases import Sentences, language_model
from shardwright.integrations.transformers import ShardwrightTrainer


def small_trainer(
    folder: Path, steps: int, cls: type[Trainer] = ShardwrightTrainer, **options: Any
) -> Any:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=steps,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        **{"lr_scheduler_type": "constant", **options},
    )
    torch.manual_seed(0)
    return cls(language_model(), arguments, train_dataset=Sentences())


class SavesOnRank0(Trainer):
    """As some versions of `Trainer`, which call `_save` on rank 0 only."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            self._save(output_dir)


class PlannedSavesOnRank0(ShardwrightTrainer, SavesOnRank0):
    pass


DECAYING = {"lr_scheduler_type": "cosine", "learning_rate": 1e-2}
"""Options under which an optimizer or a schedule that starts anew trains other weights."""


def main(phase: str, folder: str, checkpoint: str | None = None) -> None:
    cls = PlannedSavesOnRank0 if phase == "save_on_rank_0" else ShardwrightTrainer
    small_trainer(Path(folder), 4, cls, **DECAYING).train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
