"""Fine-tunes a language model with LoRA by the `Trainer` of transformers, on all processes.

    torchrun --nproc-per-node 4 examples/trainer.py

Only the import of `Trainer` differs from a script for one device.
"""

from __future__ import annotations

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from shardwright.integrations.transformers import ShardwrightTrainer as Trainer

SENTENCES, WORDS, LENGTH = 64, 128, 32


class Sentences(Dataset[dict[str, Tensor]]):
    """Each counts up from a word in steps of its own."""

    def __len__(self) -> int:
        return SENTENCES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + torch.arange(LENGTH) * (1 + index % 5)) % WORDS
        return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="out/trainer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    net = get_peft_model(LlamaForCausalLM(config), adapters)
    arguments = TrainingArguments(
        options.folder,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=options.steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = Trainer(net, arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()


if __name__ == "__main__":
    main()
