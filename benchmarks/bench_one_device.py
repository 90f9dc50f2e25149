"""The program on one device against the original module

Forward and backward, eager, float32, one thread, CPU time. Three modules run in turn in one
process, round after round: the original, the planned program (`sw.parallelize` with a plan for one
device) and a copy of the original. *Program / original* is the median of the ratios within a round,
with quartiles; *noise* is the same for the copy of the original: the variation of this machine
without any difference. Goal: within 5%; missed if a ratio exceeds 1.05 by more than the median of
the noise deviates from 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import shardwright as sw
from benchmarks.models import Model, small
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample, cpu_seconds, paired

WARM_UP = 5
GOAL = 1.05

TRANSFORMER = {"batch": 4, "sequence": 128, "width": 128, "layers": 2, "vocabulary": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "MLP": ("mlp", {"batch": 128, "sizes": (512, 1024, 1024, 512)}),
    "ResNet-18, narrow": ("resnet", {"batch": 16, "width": 16}),
    "LLaMA, 2 layers": ("llama", TRANSFORMER),
    "GPT-2, 2 layers": ("gpt2", TRANSFORMER),
    "BERT, 2 layers": ("bert", TRANSFORMER),
}


def run(size: Size = Size.DEFAULT) -> list[Table]:
    rounds = size.of(50, full=150)
    table = Table(
        f"Program / original, {rounds} rounds, median (quartiles)",
        ("model", "parameters", "original, ms", "program / original", "noise"),
    )
    for name, (builder, sizes) in MODELS.items():
        model = small(builder, **sizes)
        original, ratio, noise = compared(model, rounds)
        table.add(
            name,
            f"{sum(p.numel() for p in model[0].parameters()):,}",
            f"{1e3 * original.median:.1f}",
            ratio.ratio(),
            noise.ratio(),
        )
        if ratio.median > GOAL + abs(noise.median - 1):
            table.missed.append(f"{name}: {ratio.median:.3f} is more than {GOAL} and the noise")
    return [table]


def compared(model: Model, rounds: int) -> tuple[Sample, Sample, Sample]:
    """Seconds of the original, and the ratios of the program and of a copy of the original."""
    net, args, kwargs = model
    modules = {
        "original": net,
        "program": sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), "cpu", copy=True),
        "copy": copy.deepcopy(net),
    }
    steps = {name: _step(module, args, kwargs) for name, module in modules.items()}
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    seconds, ratios = paired(steps, "original", rounds)
    return seconds["original"], ratios["program"], ratios["copy"]


def _step(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], float]:
    def forward_and_backward() -> None:
        output = net(*args, **kwargs)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()  # type: ignore[no-untyped-call]

    def step() -> float:
        net.zero_grad(set_to_none=True)
        return cpu_seconds(forward_and_backward)

    return step
