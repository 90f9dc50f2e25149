"""Blocks that repeat are found, wherever they begin."""

from __future__ import annotations

from core.search.handmade import GraphBuilder, aten
from shardwright.core.graph.graph import Graph
from shardwright.core.search.by_time.problem import BlockRun, block_runs, representatives
from shardwright.core.search.indexed_graph import index_graph


def stack(widths: list[int]) -> Graph:
    """Residual blocks of two products, one for each width; a product before and one after."""
    builder = GraphBuilder()
    x = builder.linear("first", builder.input("x", 8, 16), 16)
    for number, width in enumerate(widths):
        hidden = builder.linear(f"{number}.up", x, width)
        down = builder.linear(f"{number}.down", hidden, 16)
        x = builder.op(f"{number}.add", aten.add.Tensor, x, down)
    builder.linear("last", x, 4)
    return builder.build()


def found(graph: Graph) -> list[BlockRun]:
    return block_runs(index_graph(graph), [None] * len(graph.ops))


def test_equal_blocks_in_a_row_are_one_run() -> None:
    (run,) = found(stack([32] * 8))
    assert (run.period, run.blocks) in ((3, 8), (3, 7))


def test_few_blocks_are_none() -> None:
    assert found(stack([32] * 3)) == []


def test_two_rows_of_different_blocks_are_two_runs() -> None:
    found_runs = found(stack([32] * 6 + [64] * 6))
    assert sorted(run.period for run in found_runs) == [3, 3]
    assert all(run.blocks >= 4 for run in found_runs)


def test_blocks_that_read_a_value_of_their_own_twice_are_equal() -> None:
    builder = GraphBuilder()
    x = builder.input("x", 8, 16)
    for number in range(8):
        scale = builder.parameter(f"{number}.scale", 16)
        once = builder.op(f"{number}.mul", aten.mul.Tensor, x, scale)
        x = builder.op(f"{number}.add", aten.add.Tensor, once, scale)
    (run,) = found(builder.build())
    assert (run.period, run.blocks) in ((2, 8), (2, 7))


def test_what_must_be_equal_parts_rows() -> None:
    graph = stack([32] * 8)
    pinned = [op.name == "4.up" for op in graph.ops]
    indexed = index_graph(graph)
    assert all(
        not run.start <= pinned.index(True) < run.start + run.period * run.blocks
        for run in block_runs(indexed, pinned)
    )


def test_the_first_and_the_last_block_are_decided_by_themselves() -> None:
    graph = stack([32] * 8)
    decided_by = representatives(index_graph(graph), [None] * len(graph.ops))
    (run,) = found(graph)
    last = run.start + (run.blocks - 1) * run.period
    assert decided_by[last : last + run.period] == list(range(last, last + run.period))
    middle = run.start + run.period
    assert decided_by[middle + run.period] == decided_by[middle] == middle


def test_blocks_that_read_two_masks_in_turn_repeat_in_pairs() -> None:
    builder = GraphBuilder()
    x, masks = builder.input("x", 8, 16), [builder.input(name, 8, 16) for name in ("near", "all")]
    for number in range(12):
        masked = builder.op(f"{number}.mul", aten.mul.Tensor, x, masks[number % 2])
        x = builder.op(f"{number}.add", aten.add.Tensor, x, masked)
    (run,) = found(builder.build())
    assert (run.period, run.blocks) in ((4, 6), (4, 5))
