"""Stages cut automatically are nearly equal in work and let little cross."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
import torch
from torch import nn

import shardwright as sw
from random_cases import random_cases
from sample_models import captured, llama, mlp
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.split import split_graph
from shardwright.core.search.assign_stages import (
    _cheapest_chunk_ends,
    balanced_chunks,
    operator_work,
)


def work_of_parts(graph: Graph, chunk_of: dict[str, int]) -> list[float]:
    parts = [0.0] * (max(chunk_of.values()) + 1)
    for op, work in zip(graph.ops, operator_work(graph), strict=True):
        parts[chunk_of[op.name]] += work
    return parts


@pytest.mark.parametrize("count", [2, 4])
def test_parts_ascend_and_are_nearly_equal(count: int) -> None:
    graph = captured(llama, layers=8)
    chunk_of = balanced_chunks(graph, count)
    numbers = [chunk_of[op.name] for op in graph.ops]
    assert numbers == sorted(numbers)
    work = work_of_parts(graph, chunk_of)
    assert len(work) == count
    heaviest = max(operator_work(graph))
    assert max(work) - min(work) <= 2 * heaviest


def test_a_transformer_is_cut_where_one_value_crosses() -> None:
    graph = captured(llama, layers=8)
    pieces = split_graph(graph, balanced_chunks(graph, 4))
    assert [len(piece.leaving) for piece in pieces] == [1, 1, 1, 0]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_part_ends_between_what_reads_and_what_updates_a_buffer(count: int) -> None:
    layers = [nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(4)]
    graph = sw.capture(nn.Sequential(*layers), (torch.ones(2, 8),))
    chunk_of = balanced_chunks(graph, count)
    assert len(graph.updates) == 8 and set(chunk_of.values()) == set(range(count))
    for buffer, value in graph.updates:
        together = {op.name for op, _ in graph.consumers[buffer]} | {graph.producer[value].name}
        assert len({chunk_of[name] for name in together}) == 1
    split_graph(graph, chunk_of)


def test_given_work_decides() -> None:
    graph = captured(mlp)
    work = [0.0] * len(graph.ops)
    work[0] = work[-1] = 1.0
    chunk_of = balanced_chunks(graph, 2, work)
    assert work_of_parts(graph, chunk_of)[0] > 0
    assert chunk_of[graph.ops[0].name] == 0 and chunk_of[graph.ops[-1].name] == 1


def test_more_parts_than_working_operators_are_refused() -> None:
    graph = sw.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),))
    with pytest.raises(
        sw.StrategyError, match="cannot divide the model into 4 pipeline chunks: only 2"
    ):
        balanced_chunks(graph, 4)


@random_cases(20)
def test_of_all_divisions_with_no_heavier_chunk_the_one_that_sends_least_is_taken(
    seed: int,
) -> None:
    random = Random(seed)
    weights = [random.choice((0, 1, 2, 5)) for _ in range(12)]
    total = [0, *accumulate(weights)]
    crossing = [random.randrange(9) for _ in total]
    count = random.randrange(2, 5)

    def chunks(ends: tuple[int, ...]) -> list[int]:
        return [total[end] - total[start] for start, end in pairwise((0, *ends))]

    every = [(*inner, len(weights)) for inner in combinations(range(1, len(weights)), count - 1)]
    divisions = [ends for ends in every if min(chunks(ends)) > 0]
    limit = random.choice(sorted(max(chunks(ends)) for ends in divisions))
    found = _cheapest_chunk_ends(total, crossing, count, limit)
    assert tuple(found) in divisions and max(chunks(tuple(found))) <= limit

    def sent(ends: tuple[int, ...]) -> int:
        return sum(crossing[end] for end in ends[:-1])

    assert sent(tuple(found)) == min(sent(e) for e in divisions if max(chunks(e)) <= limit)
