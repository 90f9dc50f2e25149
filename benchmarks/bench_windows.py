"""Attention in sliding windows, and masks

Two layers of Mistral 7B, whose window is 4,096 tokens, on 16 H100, one sequence: predicted. The
mask of all pairs is passed as a tensor; follows from an `attention_mask` or from `position_ids`,
whose values nobody knows while a model is planned; or says no more than the window. Goal: memory
that at most doubles with the tokens, unless the mask is passed.

The kernel on one device: forward and backward, 4 heads of 64, float32, one thread, CPU time, the
shortest of three, against the mask as a tensor. In documents of 1,024 tokens their numbers are
compared. Goal: never slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import shardwright as sw
from benchmarks.full_size import language
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention

LENGTHS = (32768, 65536, 131072, 262144)
MASKS = {
    "passed": {"attention_mask": lambda n: torch.empty(1, 1, n, n, dtype=torch.bool)},
    "of padding": {"attention_mask": lambda n: torch.empty(1, n, dtype=torch.long)},
    "of packed rows": {"position_ids": lambda n: torch.empty(1, n, dtype=torch.long)},
    "of the window": {},
}
KERNELS = ((2048, 1024), (4096, 1024), (8192, 1024), (8192, 4096))
PACKED = (4096, 8192)


def run(size: Size = Size.DEFAULT) -> list[Table]:
    lengths, kernels, packed = size.of(
        (LENGTHS[:2], KERNELS[:2], PACKED[:1]), full=(LENGTHS, KERNELS, PACKED)
    )
    return [_plans(lengths), _kernels(kernels, packed)]


def _plans(lengths: Sequence[int]) -> Table:
    columns = ("tokens", "mask", "memory, GiB", "step, ms", "sent forward, MiB", "cuts")
    table = Table("Plans", columns)
    for mask in MASKS:
        peaks = []
        for length in lengths:
            plan = _plan(length, mask)
            assert plan.memory is not None
            assert plan.step_time is not None
            peaks.append(plan.memory.peak)
            (name, *_) = (name for name in plan.cuts if name.endswith("_attention"))
            cuts = {factor: plan.mesh.size(axes) for factor, axes in plan.cuts[name].items()}
            table.add(
                f"{length:,}",
                mask,
                f"{peaks[-1] / 2**30:.1f}",
                f"{1e3 * plan.step_time:.0f}",
                f"{plan.forward_bytes / 2**20:,.0f}",
                ", ".join(f"{factor}/{count}" for factor, count in cuts.items()),
            )
        if mask != "passed" and any(after > 2 * before for before, after in pairwise(peaks)):
            table.missed.append(f"with a mask {mask} memory grows faster than the sequence")
    return table


def _plan(length: int, mask: str) -> sw.Plan:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=4096)
    net, kwargs = language(lambda: transformers.MistralForCausalLM(config).bfloat16(), 1, length)
    with torch.device("meta"):
        kwargs.update({name: make(length) for name, make in MASKS[mask].items()})
    return sw.plan(net, (), kwargs, devices=16, cluster="h100", memory_limit="none")


def _kernels(kernels: Sequence[tuple[int, int]], packed: Sequence[int]) -> Table:
    table = Table("Kernel", ("tokens", "mask", "a tensor, s", "not held, s", "ratio"))
    for length, window in kernels:
        mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        _compare(table, f"window of {window:,}", mask, partial(windowed_attention, window=window))
    for length in packed:
        document = torch.arange(length) // 1024
        vectors = document[:, None], document[None]
        mask = (vectors[0] == vectors[1]).tril()
        kernel = partial(masked_attention, vectors=vectors, terms="eq 0 1", causal=True)
        _compare(table, "documents of 1,024", mask, kernel)
    return table


def _compare(table: Table, name: str, mask: Tensor, kernel: Callable[..., Tensor]) -> None:
    length = mask.shape[-1]
    before = _seconds(length, partial(F.scaled_dot_product_attention, attn_mask=mask))
    now = _seconds(length, kernel)
    table.add(f"{length:,}", name, f"{before:.2f}", f"{now:.2f}", f"{now / before:.2f}")
    if now > before:
        table.missed.append(f"{length} tokens with a mask of a {name} take longer")


def _seconds(length: int, attention: Callable[..., Tensor]) -> float:
    tensors = [torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(3)]
    return min(cpu_seconds(lambda: attention(*tensors).sum().backward()) for _ in range(3))
