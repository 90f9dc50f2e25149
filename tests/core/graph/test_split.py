"""A graph divided into parts computes what the whole does, and each value crosses as it should."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from random_cases import random_cases
from random_graphs import random_net
from shardwright.core.graph.float64 import graph_in_float64, in_float64
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.graph.interpreter import interpret, run
from shardwright.core.graph.split import GraphChunk, split_graph


def ascending(graph: Graph, count: int, seed: int) -> dict[str, int]:
    """Operators in order, cut at random places."""
    draw = random.Random(seed)
    places = sorted(draw.sample(range(1, len(graph.ops)), count - 1))
    return {op.name: sum(i >= p for p in places) for i, op in enumerate(graph.ops)}


def trained_net(seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """A random net that has parameters."""
    tries = (random_net(1000 * seed + i) for i in range(1000))
    return next((net, args) for net, args in tries if list(net.parameters()))


def chained(
    pieces: tuple[GraphChunk, ...], whole: Graph, parameters: dict[str, Tensor], inputs: list[Any]
) -> dict[str, Tensor]:
    """The values that the pieces return, each given what the piece before leaves."""
    given = dict(zip(whole.inputs, inputs, strict=True))
    returned: dict[str, Tensor] = {}
    sent: list[Tensor] = []
    for piece in pieces:
        tensors: dict[Value, Tensor] = {v: parameters[v.name] for v in piece.graph.parameters}
        tensors |= {v: given[v] for v in piece.graph.input_values if v in given}
        tensors |= dict(zip(piece.arriving, sent, strict=True))
        tensors |= piece.graph.constants
        for op in piece.graph.ops:
            tensors |= zip(op.outputs, run(op, tensors, torch.device("cpu")), strict=True)
        sent = [tensors[value] for value in piece.leaving]
        returned |= {value.name: tensors[value] for value in piece.returned}
    return returned


@random_cases(12)
def test_the_parts_of_a_random_graph_compute_what_the_whole_does(seed: int) -> None:
    net, args = trained_net(seed)
    graph = graph_in_float64(sw.capture(net, args))
    pieces = split_graph(graph, ascending(graph, 2 + seed % 3, seed))
    named = dict(net.named_parameters())
    gradients = []
    for part in (False, True):
        parameters = {v.name: in_float64(named[v.name]).requires_grad_() for v in graph.parameters}
        inputs = [in_float64(x) for x in args]
        if part:
            assert graph.loss is not None
            loss = chained(pieces, graph, parameters, inputs)[graph.loss.name]
        else:
            loss, _ = interpret(graph, parameters, {}, tuple(inputs))
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in parameters.values())])
    for got, wanted in zip(gradients[1], gradients[0], strict=True):
        if wanted is None:
            assert got is None
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


class Skips(nn.Module):
    """A skip over two layers, a weight that is used twice, a mask of the inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        mask = (ids > 3).unsqueeze(-1) * self.scale
        start = self.table(ids)
        middle = self.one(start) * mask
        end = self.two(middle) + start * mask
        logits = self.head(end)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), middle


def skips() -> tuple[Graph, dict[str, int]]:
    graph = sw.capture(Skips(), (torch.randint(0, 12, (2, 3)),))
    stages = {"table": 0, "one": 1, "two": 2, "head": 3}
    chunk_of, part = {}, 0
    for op in graph.ops:
        part = max(part, stages.get(op.module, part))
        chunk_of[op.name] = part
    return graph, chunk_of


def test_a_skip_passes_through_the_parts_between() -> None:
    pieces = split_graph(*skips())
    assert [[v.name for v in piece.leaving] for piece in pieces] == [
        ["table"],
        ["table", "mul_1"],
        [pieces[2].leaving[0].name],
        [],
    ]
    assert [[v.name for v in piece.arriving] for piece in pieces[1:]] == [
        [v.name for v in piece.leaving] for piece in pieces[:-1]
    ]


def test_what_follows_from_inputs_alone_is_computed_in_every_part_that_reads_it() -> None:
    graph, chunk_of = skips()
    pieces = split_graph(graph, chunk_of)
    mask = next(op.name for op in graph.ops if "gt" in op.name)
    readers = [mask in piece.graph.by_name for piece in pieces]
    assert readers == [False, True, True, False]
    assert [bool(piece.graph.buffers) for piece in pieces] == readers


def test_a_random_operator_is_not_computed_twice() -> None:
    graph, chunk_of = skips()
    mask = next(op.name for op in graph.ops if "gt" in op.name)
    pieces = split_graph(graph, chunk_of, frozenset({mask}))
    assert sum(mask in piece.graph.by_name for piece in pieces) == 1


def test_a_tied_parameter_is_in_every_part_that_uses_it() -> None:
    pieces = split_graph(*skips())
    holders = [["table.weight" in {v.name for v in p.graph.parameters}] for p in pieces]
    assert holders == [[True], [False], [False], [True]]


def test_outputs_are_returned_where_they_are_made() -> None:
    graph, chunk_of = skips()
    pieces = split_graph(graph, chunk_of)
    assert graph.loss is not None
    assert [[v.name for v in piece.returned] for piece in pieces] == [
        [],
        ["mul_1"],
        [],
        [graph.loss.name],
    ]
    assert [piece.graph.loss for piece in pieces] == [None, None, None, graph.loss]


def test_what_cannot_be_divided_is_refused() -> None:
    graph, chunk_of = skips()
    first, last = graph.ops[0].name, graph.ops[-1].name
    with pytest.raises(sw.PlanError, match="is not assigned to a stage"):
        split_graph(graph, {name: part for name, part in chunk_of.items() if name != last})
    with pytest.raises(sw.PlanError, match="would be empty"):
        split_graph(graph, {name: 2 * part for name, part in chunk_of.items()})
    with pytest.raises(sw.PlanError, match="stages that do not decrease along"):
        split_graph(graph, {**chunk_of, "table": 3})
    assert first in chunk_of


def test_a_buffer_that_another_part_updates_is_refused() -> None:
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(norm, nn.Linear(4, 4), norm)
    graph = sw.capture(net, (torch.randn(6, 4),))
    chunk_of = {op.name: int(i > 2) for i, op in enumerate(graph.ops)}
    with pytest.raises(sw.PlanError, match="assign both to the same stage"):
        split_graph(graph, chunk_of)


class EarlyLoss(nn.Module):
    """Something is returned that is made after the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.one(x)
        return x.square().mean(), self.two(x)


def test_the_loss_goes_on_to_the_last_part() -> None:
    graph = sw.capture(EarlyLoss(), (torch.randn(3, 4),))
    chunk_of = {op.name: int(op.module == "two") for op in graph.ops}
    first, last = split_graph(graph, chunk_of)
    assert graph.loss is not None and graph.loss in first.leaving
    assert first.graph.loss is None and last.graph.loss is not None
    assert last.graph.loss.name == graph.loss.name
    assert last.graph.loss in last.graph.outputs
