"""What `test_transformers.py` runs on each of two ranks: training that a signal to one rank ends.

python stopped_trainer_ranks.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments, set_seed

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.trainer_cases import Sentences, language_model
from shardwright.integrations.transformers import ShardwrightTrainer


class Preempted(TrainerCallback):
    """Sends SIGTERM to rank 1 in the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 1 and state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def main(folder: str) -> None:
    set_seed(0)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=6,
        save_steps=100,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
    )
    trainer = ShardwrightTrainer(
        language_model(), arguments, train_dataset=Sentences(), callbacks=[Preempted()]
    )
    try:
        trainer.train()
    except SystemExit as error:
        print(f"rank {dist.get_rank()} ends with {error.code} after {trainer.state.global_step}")


if __name__ == "__main__":
    main(sys.argv[1])
