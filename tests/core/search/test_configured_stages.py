"""Stages named by module: who belongs where, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.graph.graph import Graph
from shardwright.core.search.configured_stages import configured_stages


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.one = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.relu = nn.ReLU()
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).flatten(1).to(x.dtype)
        x = self.one(self.flatten(x))
        y = self.relu(self.block(x) + x)
        return self.last(y * mask).square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return sw.capture(Net(), (torch.ones(4, 2, 4),))


def test_operators_without_a_name_follow_their_neighbors(graph: Graph) -> None:
    stages, chunks, chunk_of = configured_stages(
        graph, {"one": 0, "block": 1, "last": 2}, "1f1b", ["flatten"]
    )
    assert (stages, chunks) == (3, 1)
    parts = {op.name: chunk_of[op.name] for op in graph.ops}
    assert parts["one"] == parts["one.bias"] == 0
    assert parts["block.0"] == parts["block.2"] == parts["relu"] == 1
    assert parts["last"] == parts["mean"] == 2


def test_a_module_whose_parameters_another_reads_may_be_named() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.places = nn.Linear(8, 8), nn.Linear(8, 1), nn.Embedding(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x + self.places.weight)).mean()

    graph = sw.capture(Positions(), (torch.ones(4, 8),))
    assert "places" not in {op.module for op in graph.ops}
    stages, _, chunk_of = configured_stages(graph, {"places": 0, "one": 0, "two": 1}, "1f1b")
    assert (stages, chunk_of["two"]) == (2, 1)


def test_the_longest_name_counts(graph: Graph) -> None:
    config = {"one": 0, "block": 0, "block.2": 1, "last": 1}
    _, _, chunk_of = configured_stages(graph, config, "gpipe")
    assert (chunk_of["block.0"], chunk_of["block.2"]) == (0, 1)


def test_stages_may_repeat_in_chunks(graph: Graph) -> None:
    config = {"one": 0, "block.0": 1, "block.2": 0, "last": 1}
    stages, chunks, chunk_of = configured_stages(graph, config, "interleaved_1f1b")
    assert (stages, chunks) == (2, 2)
    assert [chunk_of[n] for n in ("one", "block.0", "block.2", "last")] == [0, 1, 2, 3]


def test_stages_may_come_back_as_a_v(graph: Graph) -> None:
    config = {"one": 0, "block": 1, "last": 0}
    stages, chunks, chunk_of = configured_stages(graph, config, "zero_bubble_v")
    assert (stages, chunks) == (2, 2)
    assert [chunk_of[n] for n in ("one", "block.0", "block.2", "last")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("config", "schedule", "message"),
    [
        (
            {"one": 0, "blok": 1, "last": 1},
            "1f1b",
            "(?s)is named 'blok'\n.* modules of the model are flatten, one, block",
        ),
        ({"one": 0, "last": 1}, "1f1b", r"leaves out modules with parameters: block.0, block.2"),
        ({"one": 1, "block": 0, "last": 1}, "1f1b", "must ascend in the order of execution"),
        ({"one": 0, "block": 2, "last": 2}, "1f1b", "no module in stage 1"),
        ({"one": 0, "block": -1, "last": 2}, "1f1b", "must be an integer of at least 0"),
        ({}, "1f1b", "is empty"),
        (
            {"one": 0, "block.0": 1, "block.2": 0, "last": 1},
            "zero_bubble_v",
            "(?s)run through stages 0, 1, 0, 1 .*'zero_bubble_v' runs in the order 0, 1, 1, 0",
        ),
        (
            {"one": 0, "block": 1, "last": 0},
            "interleaved_1f1b",
            "(?s)run through stages 0, 1, 0 .*'interleaved_1f1b' runs in the order 0, 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    graph: Graph, config: dict[str, int], schedule: str, message: str
) -> None:
    with pytest.raises(sw.StrategyError, match=message):
        configured_stages(graph, config, schedule)
