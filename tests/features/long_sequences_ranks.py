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
from features.test_long_sequences import WindowedAttention
from shardwright.layout.layout import Layout
from shardwright.partition.decisions import Decisions
from shardwright.partition.partitioned import Partitioned
from shardwright.plan import make_plan
from torchrun import run_checks


def check_windows(compiled: bool = False) -> None:
    """Blocks of six positions, of which some read three others, in an order unlike the ranks'."""
    torch.manual_seed(0)
    whole = nn.Sequential(WindowedAttention(17), WindowedAttention(4))
    x = torch.randn(1, 24, 16)
    net: Any = copy.deepcopy(whole)
    graph = sw.capture(net, (x,))
    cuts = {op.name: {"s": (1, 0)} for op in graph.ops if op.name.endswith("windowed_attention")}
    assert len(cuts) == 2
    whole_parameters = {value.name: ((),) * len(value.shape) for value in graph.parameters}
    parts = Partitioned(graph, Layout((2, 2), ("a", "b")), Decisions(cuts, whole_parameters))
    plan = make_plan(parts, mode="random", options={}, search_seconds=0.0, training=True)
    net = sw.parallelize(net, plan, "cpu")
    if compiled:
        net.compile(fullgraph=True, backend="aot_eager")
    for module in (whole, net):
        module(x).pow(2).sum().backward()
    torch.testing.assert_close(net(x), whole(x))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).grad.full_tensor(), parameter.grad)


def check_compiled_windows() -> None:
    check_windows(compiled=True)


CHECKS = (check_windows, check_compiled_windows)

if __name__ == "__main__":
    run_checks(CHECKS)
