"""Trains and evaluates, plain or planned, where the last batch is smaller than the others.

python uneven_cases.py {plain,planned} FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from shardwright.integrations.transformers import ShardwrightTrainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH_SIZE = 8
"""Of a step, on all processes together."""


class Sentences(Dataset[dict[str, Tensor]]):
    """Of 6 to 8 tokens, of which some count in no loss."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        ids = (7 * index + torch.arange(6 + index % 3)) % 32
        return {"ids": ids, "labels": ids.masked_fill(torch.arange(len(ids)) < index % 4, -100)}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.sentences = Sentences(count)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.sentences[index] for index in range(len(self.sentences)))


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def stacked(name: str, padding: int) -> Tensor:
        rows = [sample[name] for sample in samples]
        return torch.stack([F.pad(row, (0, 8 - len(row)), value=padding) for row in rows])

    return {"ids": stacked("ids", 0), "labels": stacked("labels", -100)}


class Tagger(nn.Module):
    """Its loss is a mean over the tokens that count, of the batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embedding(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class CountingTagger(Tagger):
    """Its loss is a mean over the tokens of all batches of a step."""

    def forward(self, ids: Tensor, labels: Tensor, **counts: Any) -> dict[str, Tensor]:
        outputs = super().forward(ids, labels)
        total = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
        outputs["loss"] = total / counts.get("num_items_in_batch", 100)
        return outputs


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    """What tells apart other rows, and another number of them."""
    logits = torch.as_tensor(prediction.predictions)
    places = torch.arange(1, 1 + len(logits))
    return {"rows": len(logits), "logits": float((logits.sum((1, 2)) * places).sum())}


ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2}
CASES: dict[str, tuple[type[nn.Module], Dataset[Any], int, dict[str, Any]]] = {
    "22 samples": (Tagger, Sentences(22), 22, {}),
    "accumulation that ends with one sample": (CountingTagger, Sentences(17), 13, ACCUMULATED),
    "fewer samples than a batch": (CountingTagger, Sentences(3), 1, {}),
    "last batch dropped": (Tagger, Sentences(22), 22, {"dataloader_drop_last": True}),
    "grouped by length": (
        Tagger,
        Sentences(22),
        9,
        {**ACCUMULATED, "train_sampling_strategy": "group_by_length"},
    ),
    "a stream": (Tagger, Stream(13), 9, {"max_steps": 4}),
}


def trained(cls: type[Trainer], case: str, folder: Path) -> list[dict[str, Any]]:
    """What is logged in two epochs, an evaluation and a prediction."""
    model, samples, evaluated, options = CASES[case]
    set_seed(0)
    net = model()
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH_SIZE // WORLD,
        per_device_eval_batch_size=BATCH_SIZE // WORLD,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **{"learning_rate": 1e-2, "num_train_epochs": 2, **options},
    )
    of_kind = type(samples)(evaluated)  # type: ignore[call-arg]
    trainer = cls(
        net,
        arguments,
        data_collator=padded,
        train_dataset=samples,
        eval_dataset=of_kind,
        compute_metrics=metrics,
    )
    if "group" in case:
        trainer.processing_class = Names()
    trainer.train()
    trainer.evaluate()
    predictions = trainer.predict(of_kind)
    predicted = {"size": predictions.predictions.size, "labels": int(predictions.label_ids.sum())}
    return [*trainer.state.log_history, {**predictions.metrics, **predicted}]


class Names:
    """In place of a tokenizer: the input of which samples have lengths."""

    model_input_names = ("ids",)


def main(kind: str, folder: Path) -> None:
    cls = Trainer if kind == "plain" else ShardwrightTrainer
    logs = {case: trained(cls, case, folder) for case in CASES}
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{kind}.json").write_text(json.dumps(logs))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
