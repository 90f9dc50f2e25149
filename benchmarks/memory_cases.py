"""The plans whose memory is predicted and measured: one small LLaMA, many combinations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardwright as sw
from benchmarks.models import Model, small

SIZES: dict[str, Any] = {
    "batch": 32,
    "sequence": 64,
    "layers": 4,
    "heads": 8,
    "kv_heads": 8,
    "width": 128,
    "vocabulary": 1024,
}


@dataclass(frozen=True)
class Case:
    """A way to train the model.

    Args:
        options: of `sw.plan`.
        recompute: whether each layer is computed again.
        optimizer: what updates the parameters.
    """

    options: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def model(self) -> Model:
        """The model with its marks, and its example batch."""
        net, args, kwargs = small("llama", **SIZES)
        if self.recompute:
            layers: nn.ModuleList = net.get_submodule("model.layers")  # type: ignore[assignment]
            sw.recompute(layers)
        return net, args, kwargs

    def plan(self, devices: int) -> sw.Plan:
        """Its plan; the same in every process."""
        net, args, kwargs = self.model()
        return sw.plan(net, args, kwargs, devices=devices, **self.options)


WHOLE = {"mode": "data_parallel"}
CASES = {
    "data parallel": Case(WHOLE),
    "searched": Case({"mem_coeff": 100.0}),
    "SGD with momentum": Case(WHOLE, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
    "level1": Case({**WHOLE, "hsdp": {"level": "level1", "threshold": 0}}),
    "level2, 4 micro-batches": Case(
        {**WHOLE, "micro_batches": 4, "hsdp": {"level": "level2", "threshold": 0}}
    ),
    "level3, small buckets": Case(
        {**WHOLE, "bucket_mb": 0.25, "hsdp": {"level": "level3", "threshold": 0}}
    ),
    "recompute": Case(WHOLE, recompute=True),
    "level3, recompute": Case(
        {**WHOLE, "bucket_mb": 0.25, "hsdp": {"level": "level3", "threshold": 0}}, recompute=True
    ),
    "bfloat16": Case({**WHOLE, "compute_dtype": "bfloat16"}),
    "bfloat16, level2, 4 micro-batches": Case(
        {
            **WHOLE,
            "compute_dtype": "bfloat16",
            "micro_batches": 4,
            "hsdp": {"level": "level2", "threshold": 0},
        }
    ),
    "4 micro-batches": Case({**WHOLE, "micro_batches": 4}),
    "2 stages, 1f1b": Case({**WHOLE, "stages": 2, "micro_batches": 4}),
    "4 stages, 1f1b": Case({**WHOLE, "stages": 4, "micro_batches": 8}),
    "2 stages, gpipe, level1": Case(
        {
            **WHOLE,
            "stages": 2,
            "micro_batches": 4,
            "schedule": "gpipe",
            "hsdp": {"level": "level1", "threshold": 0},
        }
    ),
    "2 stages, interleaved, recompute": Case(
        {**WHOLE, "stages": 2, "micro_batches": 4, "schedule": "interleaved_1f1b"}, recompute=True
    ),
    "2 stages, zero_bubble_v": Case(
        {**WHOLE, "stages": 2, "micro_batches": 4, "schedule": "zero_bubble_v"}
    ),
    "2 stages, dualpipe_v": Case(
        {**WHOLE, "stages": 2, "micro_batches": 8, "schedule": "dualpipe_v"}
    ),
}
