"""Predicted against measured training steps of whole models on one device."""

from __future__ import annotations

from statistics import median

import torch

import shardwright as sw
from benchmarks.one_gpu.llama import Llama, LlamaSizes
from benchmarks.one_gpu.sizes import Sizes
from benchmarks.table import Table
from shardwright.core.cost.memory import bytes_text
from shardwright.core.runtime.accelerator import AllocatedPeak, seconds_of

MEASUREMENTS, STEPS = 3, 5
MEDIAN_GOAL, WORST_GOAL = 0.10, 0.25


def predicted_against_measured(device: torch.device, sizes: Sizes, cluster: str) -> Table:
    """Forward, backward and fused AdamW in bfloat16, and the peak of allocated memory."""
    table = Table(
        f"Steps of LLaMA models in bfloat16, predicted for {cluster}",
        ("model", "tokens", "measured", "predicted", "error", "allocated", "predicted", "error"),
    )
    errors = []
    for model, batch, sequence in sizes.steps:
        plan = _plan(model, batch, sequence, cluster)
        assert plan.step is not None
        measured, allocated = _measured(model, batch, sequence, plan, device)
        errors.append(plan.step.seconds / measured - 1)
        memory_error = "" if allocated is None else f"{plan.memory.peak / allocated - 1:+.1%}"
        vocabulary = f", vocabulary of {model.vocabulary:,}" if model.vocabulary % 8 else ""
        table.add(
            f"{model.layers} × {model.width:,}{vocabulary}",
            f"{batch} × {sequence:,}",
            *(f"{1e3 * measured:.1f} ms", f"{1e3 * plan.step.seconds:.1f} ms"),
            f"{errors[-1]:+.1%}",
            *("" if allocated is None else bytes_text(allocated), bytes_text(plan.memory.peak)),
            memory_error,
        )
        if device.type != "cpu" and abs(errors[-1]) > WORST_GOAL:
            table.missed.append(f"a step is predicted {errors[-1]:+.1%} off")
    middle = median(map(abs, errors))
    table.add("median error", "", "", "", f"{middle:.1%}", "", "", "")
    if device.type != "cpu" and middle > MEDIAN_GOAL:
        table.missed.append(f"the median error of steps is {middle:.1%}, over {MEDIAN_GOAL:.0%}")
    return table


def _plan(model: LlamaSizes, batch: int, sequence: int, cluster: str) -> sw.Plan:
    with torch.device("meta"):
        net, ids = Llama(model), torch.zeros(batch, sequence, dtype=torch.long)
    return sw.plan(net.to(torch.bfloat16), (ids, ids), devices=1, cluster=cluster)


def _measured(
    model: LlamaSizes, batch: int, sequence: int, plan: sw.Plan, device: torch.device
) -> tuple[float, int | None]:
    """Seconds of a step, and the peak of allocated bytes; None on the CPU."""
    torch.manual_seed(0)
    allocated = AllocatedPeak.of(device)
    with device:
        net = Llama(model).to(torch.bfloat16)
        ids = torch.randint(model.vocabulary, (batch, sequence))
    program = sw.parallelize(net, plan, device)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-4, fused=True)

    def steps() -> None:
        for _ in range(STEPS):
            program(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    steps()
    if allocated is not None:
        allocated.restart()
    seconds = median(seconds_of(steps, device) for _ in range(MEASUREMENTS)) / STEPS
    return seconds, None if allocated is None else allocated.bytes()
