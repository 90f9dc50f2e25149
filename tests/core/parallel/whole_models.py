"""A model as people write it: methods, a configuration and a hook of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    vocab: int = 32
    hidden: int = 16
    context: int = 8


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + down


class Language(nn.Module):
    """A tiny language model in the manner of nanoGPT: tied embeddings, loss beside logits."""

    kind = "language model"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config.hidden) for _ in range(2))
        self.lstm = nn.LSTM(config.hidden, config.hidden, batch_first=True)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x, _ = self.lstm(x)
        logits = self.head(x) * self.scale
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, learning_rate: float) -> torch.optim.Optimizer:
        named = dict(self.named_parameters())
        decay = [p for p in named.values() if p.dim() >= 2]
        others = [p for p in named.values() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, eps=1e-2)

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(ids[:, -self.config.context :])
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return ids

    def embedding_of(self, ids: Tensor) -> Tensor:
        """Calls a part of the model by itself."""
        embedding: Tensor = self.embed(ids)
        return embedding


class Loss(Language):
    """Returns its loss alone, as pipeline stages ask for."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        outputs = super().forward(ids, targets)
        return outputs[0] if targets is None else outputs[1]


def language(kind: type[Language] = Language) -> Language:
    torch.manual_seed(0)
    return kind(Config())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 32, (2, 8, 8), generator=generator).unbind()  # type: ignore[return-value]
