"""How decisions spread on one level."""

from __future__ import annotations

import torch

from core.search.handmade import GraphBuilder, aten, case_a
from shardwright.core.search.indexed_graph import NO_CUT, IndexedGraph, index_graph
from shardwright.core.search.recursive.axis_level import UNDECIDED, AxisLevel


def first_level(graph: IndexedGraph, axis_size: int = 2) -> AxisLevel:
    return AxisLevel(graph, [(1,) * len(op_type.factors) for op_type in graph.op_types], axis_size)


def decide(level: AxisLevel, name: str, factor: str | None) -> None:
    op = level.graph.names.index(name)
    factors = level.graph.op_types[op].factors
    level.choices[op] = NO_CUT if factor is None else factors.index(factor)
    level.propagate([op])


def chosen(level: AxisLevel, name: str) -> str | int:
    """The factor that an operator cuts, else `NO_CUT` or `UNDECIDED`."""
    op = level.graph.names.index(name)
    choice = level.choices[op]
    return level.graph.op_types[op].factors[choice] if choice >= 0 else choice


def test_neighbors_follow_up_to_the_next_operator_with_a_cost() -> None:
    level = first_level(index_graph(case_a()))
    decide(level, "layer2", "j")
    assert [chosen(level, n) for n in ("layer2.bias", "relu2")] == ["s", "s"]
    assert [chosen(level, n) for n in ("layer1.bias", "relu1")] == [NO_CUT, NO_CUT]
    assert [chosen(level, n) for n in ("layer1", "layer3", "flatten")] == [UNDECIDED] * 3


def test_behind_a_partial_sum_nothing_is_cut() -> None:
    level = first_level(index_graph(case_a()))
    decide(level, "layer1", "k")
    assert [chosen(level, n) for n in ("layer1.bias", "relu1")] == [NO_CUT, NO_CUT]


def test_an_operator_that_cannot_follow_is_not_cut_and_stops_the_spreading() -> None:
    net = GraphBuilder()
    x = net.linear("dense", net.input("x", 8, 8), 8)
    x = net.op("inverse", aten.inverse.default, x)
    net.op("relu", aten.relu.default, x)
    level = first_level(index_graph(net.build()))
    decide(level, "dense", "j")
    assert chosen(level, "inverse") == NO_CUT
    assert chosen(level, "relu") == UNDECIDED


def test_sizes_that_do_not_divide_are_not_followed() -> None:
    net = GraphBuilder()
    x = net.linear("dense", net.input("x", 8, 8), 6)
    net.op("relu", aten.relu.default, x)
    level = first_level(index_graph(net.build()), axis_size=4)
    decide(level, "dense", "b")
    assert chosen(level, "relu") == "b"
    level = first_level(index_graph(net.build()), axis_size=4)
    level.choices[0] = level.graph.op_types[0].factors.index("j")
    level.propagate([0])
    assert chosen(level, "relu") == NO_CUT


def test_a_tensor_is_read_in_one_way_while_its_maker_is_undecided() -> None:
    net = GraphBuilder()
    stem = net.linear("stem", net.input("x", 8, 8), 8)
    y = net.linear("dense", net.op("first", aten.relu.default, stem), 8)
    z = net.linear("other", net.op("second", aten.gelu.default, stem), 8)
    net.op("add", aten.add.Tensor, y, z)
    level = first_level(index_graph(net.build()))
    decide(level, "dense", "k")
    assert [chosen(level, n) for n in ("first", "second")] == ["s", "s"]


def test_fill_prefers_a_cut_to_no_cut() -> None:
    net = GraphBuilder()
    whole = net.op("whole", aten.relu.default, net.input("x", 8, 8))
    cut = net.op("cut", aten.relu.default, net.input("y", 8, 8))
    net.op("add", aten.add.Tensor, whole, cut)
    level = first_level(index_graph(net.build()))
    level.choices[0], level.choices[1] = NO_CUT, level.graph.op_types[1].factors.index("s")
    level.decide_remaining()
    assert chosen(level, "add") == "s"


def test_an_embedding_is_priced_as_the_product_with_one_hot_rows() -> None:
    net = GraphBuilder()
    ids = net.input("ids", 4, 6, dtype=torch.int64)
    net.op("embed", aten.embedding.default, net.parameter("table", 10, 16), ids)
    op_type = index_graph(net.build()).op_types[0]
    assert op_type.is_lookup
    assert [tensor.size for tensor in op_type.costed_tensors] == [10 * 16, 4 * 6 * 10, 4 * 6 * 16]
    assert [tensor.size for tensor in op_type.tensors] == [10 * 16, 4 * 6, 4 * 6 * 16]
