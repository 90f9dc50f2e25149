"""Graphs derived from those of two batch sizes are those that capture returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.graph.graph import Graph
from shardwright.core.micro_batches.interpolated_graph import GraphsBySize


class Flattened(nn.Module):
    """Reshapes, expands and slices by sizes that depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).reshape(-1, 4) + self.offset[:4]
        positions = torch.arange(x.shape[1], device=x.device)[None].expand(len(x), -1)
        return (rows.view(len(x), -1) * positions.sum(1, keepdim=True)).square().mean()


class Other(nn.Module):
    """Computes something that is not linear in the batch size, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "branch" and len(x) < 10:
            y = y.relu()
        if self.kind == "square":
            y = y @ torch.ones(8, len(x) ** 2)
        if self.kind == "number":
            y = y * (1 / len(x))
        return y.square().mean()


def graphs(net: nn.Module, sizes: Sequence[int]) -> tuple[GraphsBySize, list[Graph], list[int]]:
    """The graphs for batches of `sizes` rows, and the sizes that were captured."""
    captured: list[int] = []

    def capture(leaves: list[Any]) -> Graph:
        captured.append(len(leaves[0]))
        return sw.capture(net, tuple(leaves))

    by_size = GraphsBySize()
    made = [by_size.graph([torch.zeros(rows, 8)], capture) for rows in sizes]
    return by_size, made, captured


def test_a_derived_graph_is_that_of_a_capture() -> None:
    net = Flattened()
    by_size, made, captured = graphs(net, [64, 32, 16, 4, 16])
    assert captured == [64, 32] and by_size.num_derived == 3
    for graph, rows in zip(made, [64, 32, 16, 4, 16], strict=True):
        assert graph.fingerprint == sw.capture(net, (torch.zeros(rows, 8),)).fingerprint
    assert made[2] is made[4]


@pytest.mark.parametrize("kind", ["square", "number"])
def test_what_is_not_linear_in_the_batch_is_captured(kind: str) -> None:
    by_size, made, captured = graphs(Other(kind), [64, 32, 16])
    assert captured == [64, 32, 16] and not by_size.num_derived
    assert made[2].input_values[0].shape == (16, 8)


def test_a_graph_of_the_captured_kind_can_be_asked_for() -> None:
    net = Other("branch")
    by_size, made, _ = graphs(net, [64, 32, 8])
    with by_size.deriving(False) as uses_derived:
        exact = by_size.graph([torch.zeros(8, 8)], lambda leaves: sw.capture(net, tuple(leaves)))
    assert not uses_derived()
    assert exact.fingerprint != made[2].fingerprint


def test_numbers_whose_graph_cannot_be_derived_are_not_planned() -> None:
    net, batch = Other("branch"), (torch.zeros(64, 8),)
    options: dict[str, Any] = {"devices": 2, "cluster": "a100"}
    needed = []
    for count in (1, 2, 4):
        with pytest.raises(sw.MemoryLimitError) as error:
            sw.plan(net, batch, micro_batches=count, memory_limit=1, **options)
        needed.append(error.value.needed)
    plan = sw.plan(net, batch, micro_batches="auto", memory_limit=min(needed), **options)
    assert plan.pipeline.micro_batches in (1, 2, 4)
    # 8 and more micro-batches would need less, but have fewer than 10 samples each.
    with pytest.raises(sw.MemoryLimitError) as error:
        sw.plan(net, batch, micro_batches="auto", memory_limit=min(needed) - 1, **options)
    assert error.value.needed == min(needed)
