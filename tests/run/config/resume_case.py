"""What `test_checkpointing.py` trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.Linear(8, 1))


def samples(count: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, generator=generator)
    return x, x.sum(1, keepdim=True)
