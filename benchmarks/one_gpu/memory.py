"""Predicted against allocated memory: one rank of 8 of each plan, the others not there."""

from __future__ import annotations

from statistics import median

import torch

import shardwright as sw
from benchmarks.memory_cases import CASES
from benchmarks.one_gpu.llama import Llama
from benchmarks.one_gpu.sizes import Sizes
from benchmarks.table import Table
from shardwright.core.api import plan, rehearse
from shardwright.core.api.rehearsal import RankRehearsal
from shardwright.core.cost.memory import bytes_text

DEVICES = 8
PLANS = (
    *("data parallel", "searched", "SGD with momentum", "level1", "level2, 4 micro-batches"),
    *("level3, small buckets", "recompute", "level3, recompute", "bfloat16", "4 micro-batches"),
    *("2 stages, 1f1b", "2 stages, gpipe, level1"),
)
MEDIAN_GOAL, WORST_GOAL = 0.05, 0.10


def predicted_against_allocated(device: torch.device, sizes: Sizes) -> Table:
    """The peak of a training step of each of `PLANS`. On the CPU, whose memory PyTorch does not
    count, that of all tensors takes the place of what is allocated."""
    table = Table(
        f"Peak bytes of one of {DEVICES} devices in a training step",
        ("plan", "stage", "predicted", "tensors", "allocated", "error"),
    )
    _warm_up(device)
    errors = []
    for name in PLANS:
        for rank in ranks_of(name, device, sizes):
            measured = _measured(rank)
            errors.append(rank.planned_peak / measured - 1)
            table.add(
                *(name, rank.stage, bytes_text(rank.planned_peak), bytes_text(rank.peak_bytes)),
                *(bytes_text(measured), f"{errors[-1]:+.1%}"),
            )
            if abs(errors[-1]) > WORST_GOAL:
                table.missed.append(f"{name}: {errors[-1]:+.1%} is more than {WORST_GOAL:.0%}")
            if not rank.as_planned:
                table.missed.append(f"{name}: sends {rank.sent_bytes}, not {rank.planned_bytes}")
    middle = median(map(abs, errors))
    table.add("median error", "", "", "", "", f"{middle:.1%}")
    if middle >= MEDIAN_GOAL:
        table.missed.append(f"the median error is {middle:.1%}, not under {MEDIAN_GOAL:.0%}")
    return table


def ranks_of(name: str, device: torch.device, sizes: Sizes) -> tuple[RankRehearsal, ...]:
    """The first rank of each stage of a plan, in training."""
    case, net = CASES[name], Llama(sizes.model)
    if case.recompute:
        sw.recompute(net.blocks)
    ids = torch.randint(sizes.model.vocabulary, (sizes.model_batch, sizes.model_sequence))
    chosen = plan(net, (ids, ids), devices=DEVICES, **case.options)
    size = chosen.mesh.num_devices
    firsts = [stage * size for stage in range(chosen.pipeline.stages)]
    return rehearse(
        net, (ids, ids), None, chosen, ranks=firsts, device=device, optimizer=case.optimizer
    ).ranks


def _measured(rank: RankRehearsal) -> int:
    return rank.peak_bytes if rank.allocated_peak is None else rank.allocated_peak


def _warm_up(device: torch.device) -> None:
    """Libraries take memory at their first call, forward and in the thread of the backward pass,
    which is nobody's prediction."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
        torch.mm(x, x).sum().backward()  # type: ignore[no-untyped-call]
