"""Attention in sliding windows

Two layers of Mistral 7B, whose window is 4,096 tokens, on 16 H100, one sequence: predicted. With an
`attention_mask`, whose values nobody knows while a model is planned, the mask of all pairs remains
a tensor; without one the window is a number. Goal: memory that at most doubles with the tokens.

The kernel on one device: forward and backward, 4 heads of 64, float32, one thread, CPU time, the
shortest of three, against the same mask as a tensor. Goal: never slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import shardwright as sw
from benchmarks.full_size import language
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds
from shardwright.graph.custom_ops import windowed_attention

LENGTHS = (32768, 65536, 131072, 262144)
KERNELS = ((2048, 1024), (4096, 1024), (8192, 1024), (8192, 4096))


def run() -> list[Table]:
    return [_plans(), _kernels()]


def _plans() -> Table:
    table = Table(
        "Plans", ("tokens", "mask", "memory, GiB", "step, ms", "sent forward, MiB", "cuts")
    )
    for masked in (True, False):
        peaks = []
        for length in LENGTHS:
            plan = _plan(length, masked)
            assert plan.memory is not None and plan.step_time is not None
            peaks.append(plan.memory.peak)
            (name, *_) = (name for name in plan.cuts if name.endswith("_attention"))
            cuts = {factor: plan.mesh.size(axes) for factor, axes in plan.cuts[name].items()}
            table.add(
                f"{length:,}",
                "a tensor" if masked else "a number",
                f"{peaks[-1] / 2**30:.1f}",
                f"{1e3 * plan.step_time:.0f}",
                f"{plan.forward_bytes / 2**20:,.0f}",
                ", ".join(f"{factor}/{count}" for factor, count in cuts.items()),
            )
        if not masked and any(after > 2 * before for before, after in pairwise(peaks)):
            table.missed.append("memory grows faster than the sequence")
    return table


def _plan(length: int, masked: bool) -> sw.Plan:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=4096)
    net, kwargs = language(lambda: transformers.MistralForCausalLM(config).bfloat16(), 1, length)
    if masked:
        kwargs["attention_mask"] = torch.empty(1, length, dtype=torch.long, device="meta")
    return sw.plan(net, (), kwargs, devices=16, cluster="h100")


def _kernels() -> Table:
    table = Table("Kernel", ("tokens", "window", "a tensor, s", "a number, s", "ratio"))
    for length, window in KERNELS:
        mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        before = _seconds(length, partial(F.scaled_dot_product_attention, attn_mask=mask))
        now = _seconds(length, partial(windowed_attention, window=window))
        row = (f"{before:.2f}", f"{now:.2f}", f"{now / before:.2f}")
        table.add(f"{length:,}", f"{window:,}", *row)
        if now > before:
            table.missed.append(f"{length} tokens in windows of {window} take longer")
    return table


def _seconds(length: int, attention: Callable[..., Tensor]) -> float:
    tensors = [torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(3)]
    return min(cpu_seconds(lambda: attention(*tensors).sum().backward()) for _ in range(3))
