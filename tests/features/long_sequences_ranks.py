"""What `test_long_sequences.py` runs on every rank: a sequence in blocks is as on one device."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from features.test_long_sequences import Attention, Packed, WindowedAttention
from shardwright.core.capture import causal_masks
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention
from shardwright.core.layout.layout import Layout
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import make_plan
from torchrun import run_checks


def check(whole: nn.Module, *args: torch.Tensor, compiled: bool = False) -> None:
    """Blocks of six positions, in an order unlike the ranks'."""
    net: Any = copy.deepcopy(whole)
    graph = sw.capture(net, args)
    cuts = {op.name: {FACTORS[op.target]: (1, 0)} for op in graph.ops if op.target in FACTORS}
    assert len(cuts) == 2
    whole_parameters = {value.name: ((),) * len(value.shape) for value in graph.parameters}
    parts = Partitioned(graph, Layout((2, 2), ("a", "b")), Decisions(cuts, whole_parameters))
    plan = make_plan(parts, mode="random", options={}, search_seconds=0.0, training=True)
    net = sw.parallelize(net, plan, "cpu")
    if compiled:
        net.compile(fullgraph=True, backend="aot_eager")
    for module in (whole, net):
        module(*args).pow(2).sum().backward()
    torch.testing.assert_close(net(*args), whole(*args))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).grad.full_tensor(), parameter.grad)


FACTORS: dict[Any, str] = {
    windowed_attention: "s",
    masked_attention: "s",
    torch.ops.aten.scaled_dot_product_attention.default: "ring",
}


def check_windows() -> None:
    """Some blocks read three others."""
    torch.manual_seed(0)
    net = nn.Sequential(WindowedAttention(17), WindowedAttention(4))
    check(net, torch.randn(1, 24, 16))


def check_compiled_windows_and_rings() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(WindowedAttention(17), Attention())
    check(net, torch.randn(1, 24, 16), compiled=True)


class PackedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Packed(), Packed()

    def forward(self, x: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, document), document)


def check_documents(compiled: bool = False) -> None:
    torch.manual_seed(0)
    causal_masks.LARGE = 0
    document = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8])
    check(PackedTwice(), torch.randn(1, 24, 16), document, compiled=compiled)


def check_compiled_documents() -> None:
    check_documents(compiled=True)


def check_rings() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Attention(), Attention())
    check(net, torch.randn(1, 24, 16))


CHECKS = (
    check_windows,
    check_documents,
    check_compiled_documents,
    check_rings,
    check_compiled_windows_and_rings,
)

if __name__ == "__main__":
    run_checks(CHECKS)
