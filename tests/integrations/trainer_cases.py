"""Runs one case of `Trainer`, plain or planned, and writes what it logged and trained.

python trainer_cases.py {plain,planned} CASE FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

import shardwright as sw
from shardwright.integrations.transformers import ShardwrightTrainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Sentences(Dataset[dict[str, Any]]):
    def __init__(self, ragged: bool = False) -> None:
        self.ragged = ragged

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (index + torch.arange(16) * (1 + index % 3)) % 64
        return {"input_ids": ids, "labels": torch.tensor(index % 2) if self.ragged else ids.clone()}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Cuts samples to the longest of a batch, which differs from batch to batch."""
    length = 8 + int(samples[0]["input_ids"][0]) % 3
    ids = torch.stack([sample["input_ids"][:length] for sample in samples])
    mask = torch.ones_like(ids)
    mask[::2, -2:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.stack([sample["labels"] for sample in samples]),
    }


def language_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def classifier() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def translator() -> torch.nn.Module:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    predicted = prediction.predictions.argmax(-1)
    return {"accuracy": float((predicted == prediction.label_ids).mean()), "rows": len(predicted)}


def generated(prediction: EvalPrediction) -> dict[str, float]:
    """What tells generated tokens from others: their number and, by place, their sum."""
    tokens = prediction.predictions
    places = 1 + torch.arange(tokens.shape[1])
    return {"rows": len(tokens), "tokens": float((torch.as_tensor(tokens) * places).sum())}


class OwnLoss(Trainer):
    """Computes with the model's outputs and labels, as many people's trainers do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        right = (outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]).float().mean()
        loss = outputs.loss + 0.1 * outputs.logits.square().mean() + 0 * right
        return (loss, outputs) if return_outputs else loss


def momentum_and_schedule(net: torch.nn.Module) -> tuple[Any, Any]:
    """An optimizer with two groups and its schedule, as users pass them to `Trainer`."""
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Trainer]]] = {
    "accumulation": ({"gradient_accumulation_steps": 2}, {}, Trainer),
    "best model at the end": (
        {**EVERY_STEP, "load_best_model_at_end": True, "save_steps": 2, "learning_rate": 5e-2},
        {},
        Trainer,
    ),
    # Adam moves by the sign of gradients, also of those that are as small as their rounding.
    "bf16": ({"bf16": True, "optim": "sgd", "learning_rate": 0.5}, {}, Trainer),
    "activation checkpointing": ({"gradient_checkpointing": True}, {}, Trainer),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, Trainer),
    "padding and metrics": (
        EVERY_STEP,
        {"data_collator": padded, "compute_metrics": accuracy},
        Trainer,
    ),
    "own loss": (EVERY_STEP, {}, OwnLoss),
    "schedule and no clipping": (
        {"lr_scheduler_type": "cosine", "max_grad_norm": 0.0},
        {},
        Trainer,
    ),
    "own optimizer": ({}, {"optimizers": momentum_and_schedule}, Trainer),
    "generation": (
        {**EVERY_STEP, "predict_with_generate": True, "generation_max_length": 12},
        {"compute_metrics": generated},
        Seq2SeqTrainer,
    ),
}


def main(kind: str, case: str, folder: Path) -> None:
    options, keywords, cls = CASES[case]
    classifies, generates = "data_collator" in keywords, cls is Seq2SeqTrainer
    set_seed(0)
    net = classifier() if classifies else translator() if generates else language_model()
    if "optimizers" in keywords:
        keywords = {**keywords, "optimizers": keywords["optimizers"](net)}
    arguments = (Seq2SeqTrainingArguments if generates else TrainingArguments)(
        str(folder),
        per_device_train_batch_size=4 // WORLD,
        per_device_eval_batch_size=4 // WORLD,
        max_steps=6,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        **{"learning_rate": 1e-2, **options},
    )
    if kind == "planned":
        cls = ShardwrightTrainer if cls is Trainer else type("Own", (ShardwrightTrainer, cls), {})
    data = Sentences(classifies)
    trainer = cls(net, arguments, train_dataset=data, eval_dataset=data, **keywords)
    trainer.train()
    with sw.whole(trainer.model) as whole:
        if arguments.should_save:
            state = {name: value.clone() for name, value in whole.state_dict().items()}
            save_file(state, folder / "state.safetensors")
            (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
