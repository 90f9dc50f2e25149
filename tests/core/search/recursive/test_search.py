"""The double recursion against the golden cases, figure by figure, and in general."""

from __future__ import annotations

import logging
import re
from math import prod

import pytest

from core.search.handmade import GraphBuilder, aten, case_a, case_w, one_product, residual_mlp
from shardwright.core.cost.symbolic import break_even
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.rules import rule_of
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import CutsOfGraph, SearchRequest
from shardwright.errors import StrategyError

Figures = dict[str, tuple[float, float]]
"""For each of I, J, K and none the operator cost and the redistribution."""


def strategy(
    graph: Graph, mesh: Layout, cuts: CutsOfGraph, name: str
) -> tuple[tuple[int, ...], ...]:
    """In how many parts each dimension of the inputs of an operator is cut."""
    op = graph.by_name[name]
    found = rule_of(op)
    assert found is not None
    layouts, _ = found.layouts(mesh, cuts.get(name, {}))
    return tuple(layout.shard_counts for layout in layouts)


def product_strategy(
    graph: Graph, cuts: CutsOfGraph, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As the literature writes it: the weight as (k, j), the transposed of how torch stores it."""
    x, weight = strategy(graph, prime_mesh(8), cuts, name)
    return x, weight[::-1]


def logged(
    caplog: pytest.LogCaptureFixture, graph: Graph, devices: int, mem_coeff: float
) -> tuple[dict[tuple[str, int], Figures], dict[tuple[str, int], str]]:
    """Costs and choices by operator and level, read from the log of a search by topology."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="shardwright.search"):
        search_recursively(
            SearchRequest(
                graph, prime_mesh(devices), mem_coeff=mem_coeff, order="topology", log_costs=True
            )
        )
    figures: dict[tuple[str, int], Figures] = {}
    chosen: dict[tuple[str, int], str] = {}
    current = ("", 0)
    for line in caplog.messages:
        if header := re.match(r"(\S+), level (\d+) ", line):
            current = (header[1], int(header[2]))
            figures[current] = {}
        elif cost := re.match(
            r"If (?:the (\w)-axis is cut|do NOT cut the axis), the op-cost is (\S+),"
            r" the rest-cost is (\S+), and the total cost is",
            line,
        ):
            figures[current][cost[1] or "none"] = float(cost[2]), float(cost[3])
        elif choice := re.match(r"The (\w)-axis is chosen|Choose NOT to cut", line):
            chosen[current] = choice[1] or "none"
    return figures, chosen


A_FIGURES: dict[tuple[str, int], Figures] = {
    ("layer1", 1): {"I": (20070.4, 0), "J": (12544, 0), "K": (8192, 0), "none": (2684354, 0)},
    ("layer1", 2): {"I": (10035.2, 0), "K": (8192, 0), "none": (1573519, 0)},
    ("layer1", 3): {"I": (5017.6, 0), "K": (8192, 0), "none": (393380, 0)},
    ("layer2", 1): {
        "I": (13107.2, 262144),
        "J": (8192, 0),
        "K": (8192, 262144),
        "none": (2684354, 0),
    },
    ("layer2", 2): {"I": (6553.6, 262144), "J": (8192, 0), "none": (671089, 0)},
    ("layer2", 3): {"I": (3276.8, 0), "J": (8192, 262144), "none": (167772, 262144)},
    ("layer3", 1): {"I": (25.6, 262144), "K": (16, 0), "none": (10.24, 262144)},
    ("layer3", 2): {"I": (12.8, 131072), "K": (16, 0), "none": (6.55, 131072)},
    ("layer3", 3): {"I": (6.4, 0), "K": (16, 65536), "none": (1.64, 65536)},
}


@pytest.mark.parametrize("bias", [True, False])
def test_case_a_logs_every_published_figure(caplog: pytest.LogCaptureFixture, bias: bool) -> None:
    figures, _ = logged(caplog, case_a(bias=bias), 8, 0.1)
    assert figures.keys() == A_FIGURES.keys()
    for place, published in A_FIGURES.items():
        assert figures[place].keys() == published.keys(), place
        for letter, (operator, redistribution) in published.items():
            assert figures[place][letter][0] == pytest.approx(operator, rel=1e-3 / 2, abs=0.005)
            assert figures[place][letter][1] == redistribution, (place, letter)


@pytest.mark.parametrize(
    ("mem_coeff", "levels"),
    [
        (0.1, ["KJK", "KJK", "III"]),
        (0.01, ["III", "III", "III"]),
        (1.0, ["KJK", "KJK", "KJK"]),
    ],
)
def test_case_a_chooses_as_published(
    caplog: pytest.LogCaptureFixture, mem_coeff: float, levels: list[str]
) -> None:
    _, chosen = logged(caplog, case_a(), 8, mem_coeff)
    for level, letters in enumerate(levels, start=1):
        assert "".join(chosen[f"layer{i}", level] for i in (1, 2, 3)) == letters


@pytest.mark.parametrize(
    ("mem_coeff", "layers", "relus"),
    [
        (0.1, (((2, 4), (4, 1)), ((2, 1), (1, 4)), ((2, 4), (4, 1))), ((2, 1), (2, 4))),
        (0.01, (((8, 1), (1, 1)),) * 3, ((8, 1), (8, 1))),
        (1.0, (((1, 8), (8, 1)), ((1, 1), (1, 8)), ((1, 8), (8, 1))), ((1, 1), (1, 8))),
    ],
)
def test_case_a_has_the_published_strategies(
    mem_coeff: float,
    layers: tuple[tuple[tuple[int, ...], ...], ...],
    relus: tuple[tuple[int, ...], ...],
) -> None:
    graph = case_a()
    cuts = search_recursively(
        SearchRequest(graph, prime_mesh(8), mem_coeff=mem_coeff, order="topology")
    )
    assert tuple(product_strategy(graph, cuts, f"layer{i}") for i in (1, 2, 3)) == layers
    found = tuple(strategy(graph, prime_mesh(8), cuts, name)[0] for name in ("relu1", "relu2"))
    assert found == relus


@pytest.mark.parametrize(
    ("mem_coeff", "up", "down"),
    [
        (0.1, ((4, 1), (1, 2)), ((4, 2), (2, 1))),
        (0.01, ((8, 1), (1, 1)), ((8, 1), (1, 1))),
        (1.0, ((1, 1), (1, 8)), ((1, 8), (8, 1))),
    ],
)
def test_case_w_has_the_published_strategies(
    mem_coeff: float, up: tuple[tuple[int, ...], ...], down: tuple[tuple[int, ...], ...]
) -> None:
    graph = case_w()
    cuts = search_recursively(
        SearchRequest(graph, prime_mesh(8), mem_coeff=mem_coeff, order="topology")
    )
    assert product_strategy(graph, cuts, "up") == up
    assert product_strategy(graph, cuts, "down") == down


def test_case_w_decides_level_by_level_as_published(caplog: pytest.LogCaptureFixture) -> None:
    _, chosen = logged(caplog, case_w(), 8, 0.1)
    assert [chosen["up", i] + chosen["down", i] for i in (1, 2, 3)] == ["II", "JK", "II"]


def test_log_of_the_figure_reads_as_in_the_documents(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardwright.search"):
        search_recursively(
            SearchRequest(one_product(8192, 1, 4096), prime_mesh(2), mem_coeff=0.01, log_costs=True)
        )
    assert caplog.messages == [
        "product, level 1 (2 devices along the axis)",
        "If the I-axis is cut, the op-cost is 20.48, the rest-cost is 0, and the total cost is"
        " 20.48",
        "If the K-axis is cut, the op-cost is 4096, the rest-cost is 0, and the total cost is 4096",
        "If do NOT cut the axis, the op-cost is 16.7772, the rest-cost is 0, and the total cost"
        " is 16.7772",
        "The costs of cutting the I-axis/J-axis/K-axis/no_cut are :"
        " {20.48, 1.79769e+308, 4096, 16.7772}",
        "Choose NOT to cut",
    ]


def test_break_even_of_the_figure_separates_no_cut_from_data_parallel() -> None:
    coefficient = break_even(20.48, 0.01, 16.7772)
    graph = one_product(8192, 1, 4096)
    below = search_recursively(SearchRequest(graph, prime_mesh(2), mem_coeff=coefficient * 0.999))
    above = search_recursively(SearchRequest(graph, prime_mesh(2), mem_coeff=coefficient * 1.001))
    assert "product" not in below
    assert above["product"] == {"b": (0,)}


def test_log_names_the_factor_where_a_letter_has_several(caplog: pytest.LogCaptureFixture) -> None:
    net = GraphBuilder()
    net.linear("dense", net.input("x", 4, 8, 16), 32)
    with caplog.at_level(logging.INFO, logger="shardwright.search"):
        search_recursively(SearchRequest(net.build(), prime_mesh(2), log_costs=True))
    assert "The I-axis (b) is chosen" in caplog.messages
    assert any("the I-axis (b)/I-axis (s)/J-axis/K-axis/no_cut are" in m for m in caplog.messages)


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        search_recursively(SearchRequest(case_a(), prime_mesh(8)))
    assert caplog.messages == []


def test_one_device_cuts_nothing() -> None:
    assert search_recursively(SearchRequest(case_a(), prime_mesh(1))) == {}


def assert_valid(graph: Graph, mesh: Layout, cuts: CutsOfGraph) -> None:
    """Axes once an operator, parts that divide capacity and every dimension."""
    assert set(cuts) <= set(graph.by_name)
    for name, cut in cuts.items():
        op = graph.by_name[name]
        found = rule_of(op)
        assert found is not None
        axes = [axis for used in cut.values() for axis in used]
        assert len(axes) == len(set(axes))
        for factor, used in cut.items():
            assert found.can_shard(factor)
            assert found.capacity[factor] % prod(mesh.device_matrix[a] for a in used) == 0
            assert list(used) == sorted(used), "outermost axes must be the most significant"
        inputs, outputs = found.layouts(mesh, cut)
        for value, layout in zip((*op.inputs, *op.outputs), (*inputs, *outputs), strict=True):
            layout.shard_shape(value.shape)


@pytest.mark.parametrize("devices", [*range(1, 25), 1000])
@pytest.mark.parametrize("order", ["weight", "topology"])
def test_any_number_of_devices_gives_a_valid_plan_or_a_clear_error(
    devices: int, order: str
) -> None:
    graph, mesh = case_a(batch=48), prime_mesh(devices)
    try:
        cuts = search_recursively(SearchRequest(graph, mesh, order=order))
    except StrategyError as error:
        assert all(48 % p and 784 % p and 512 % p for p in mesh.device_matrix)
        assert str(devices) in str(error)
    else:
        assert bool(cuts) == (devices > 1)
        assert_valid(graph, mesh, cuts)


def test_a_factor_of_3_cuts_what_it_divides() -> None:
    graph, mesh = case_a(batch=12), prime_mesh(12)
    cuts = search_recursively(SearchRequest(graph, mesh, mem_coeff=1e-3))
    assert cuts["layer2"] == {"b": (0, 1, 2)}
    assert strategy(graph, mesh, cuts, "layer2")[0] == (12, 1)


@pytest.mark.parametrize("order", ["weight", "topology"])
def test_search_is_deterministic(order: str) -> None:
    plans = [
        search_recursively(SearchRequest(residual_mlp(), prime_mesh(24), order=order))
        for _ in range(3)
    ]
    assert plans[0] == plans[1] == plans[2]
    assert [list(plan) for plan in plans] == [list(plans[0])] * 3


def test_j_and_k_of_one_product_are_not_both_cut() -> None:
    for mem_coeff in (0.1, 1.0, 10.0):
        for cut in search_recursively(
            SearchRequest(case_a(batch=2), prime_mesh(64), mem_coeff=mem_coeff)
        ).values():
            assert not {"j", "k"} <= set(cut)


def main_cuts(graph: Graph, cuts: CutsOfGraph) -> dict[str, set[str]]:
    """The letters that each operator with a cost cuts."""
    found = {}
    for op in graph.ops:
        of_op = rule_of(op)
        if of_op is not None and of_op.main is not None:
            found[op.name] = {of_op.main.labels[f] for f in cuts.get(op.name, {})}
    return found


@pytest.mark.parametrize("order", ["weight", "topology"])
def test_a_small_coefficient_keeps_a_residual_stream_data_parallel(order: str) -> None:
    graph = residual_mlp()
    cuts = search_recursively(SearchRequest(graph, prime_mesh(8), mem_coeff=1e-3, order=order))
    assert set(map(frozenset, main_cuts(graph, cuts).values())) == {frozenset("I")}
    assert cuts.keys() == set(graph.by_name)


def test_a_large_coefficient_cuts_blocks_as_megatron_does() -> None:
    graph = residual_mlp()
    cuts = search_recursively(SearchRequest(graph, prime_mesh(8), mem_coeff=10, order="weight"))
    letters = main_cuts(graph, cuts)
    for block in range(3):
        assert letters[f"{block}.up"] == {"J"}
        assert letters[f"{block}.down"] == {"K"}
        assert f"{block}.add" not in cuts, "the residual stream stays whole"


def test_a_tiny_coefficient_cuts_no_product() -> None:
    assert search_recursively(SearchRequest(case_a(), prime_mesh(8), mem_coeff=1e-6)) == {}


def test_a_batch_fed_directly_counts_as_a_neighbor_and_one_behind_a_view_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    direct, _ = logged(caplog, case_w(), 8, 1.0)
    assert direct["up", 1]["J"][1] == 16 * 32 * 1024
    behind, _ = logged(caplog, case_a(), 8, 1.0)
    assert behind["layer1", 1]["J"][1] == 0


def test_a_whole_broadcast_operand_does_not_hold_back_what_it_is_added_to() -> None:
    """Rotary and mask tables are shared by all layers and lack the batch."""
    net = GraphBuilder()
    table = net.op("table", aten.cos.default, net.parameter("angles", 64))
    x = net.input("x", 32, 64)
    for i in range(3):
        y = net.op(f"{i}.mul", aten.mul.Tensor, net.linear(f"{i}.dense", x, 64), table)
        x = net.op(f"{i}.relu", aten.relu.default, y)
    graph = net.build()
    cuts = search_recursively(SearchRequest(graph, prime_mesh(8), mem_coeff=0.01))
    assert all(cuts[name] == {"b": (0, 1, 2)} for name in graph.by_name if name != "table")
    assert "table" not in cuts


def test_a_model_without_products_is_data_parallel() -> None:
    net = GraphBuilder()
    x = net.op("relu", aten.relu.default, net.input("x", 16, 5))
    net.op("add", aten.add.Tensor, x, net.parameter("shift", 5))
    cuts = search_recursively(SearchRequest(net.build(), prime_mesh(8)))
    assert cuts == {"relu": {"b": (0, 1, 2)}, "add": {"b": (0, 1, 2)}}


def test_pinned_operators_are_kept_and_the_others_follow() -> None:
    pinned = {"layer1": {"k": (0, 1), "b": (2,)}, "layer3": {"k": (0, 1, 2)}}
    cuts = search_recursively(SearchRequest(case_a(), prime_mesh(8), mem_coeff=0.01, pinned=pinned))
    assert cuts["layer1"] == pinned["layer1"]
    assert cuts["layer3"] == pinned["layer3"]
    assert cuts["relu1"] == {"b": (2,)}
    assert cuts["layer2"] == {"j": (0, 1), "b": (2,)} or cuts["layer2"] == {"j": (0, 1, 2)}


def test_an_operator_pinned_uncut_stays_whole() -> None:
    cuts = search_recursively(
        SearchRequest(case_a(), prime_mesh(8), mem_coeff=0.01, pinned={"relu1": {}})
    )
    assert "relu1" not in cuts


def test_an_odd_batch_is_charged_unless_the_product_sums_over_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = GraphBuilder()
    net.linear("dense", net.input("x", 7, 10), 14)
    request = SearchRequest(net.build(), prime_mesh(2), mem_coeff=0.1, log_costs=True)
    with caplog.at_level("INFO"):
        assert search_recursively(request) == {"dense": {"k": (0,)}}
    charged = 16 * 70
    assert f"{{1.79769e+308, {35 + charged}, 49, {1.96 + charged:.6g}}}" in caplog.text


def test_a_batch_that_divides_nothing_is_an_error_with_valid_sizes() -> None:
    net = GraphBuilder()
    net.op("relu", aten.relu.default, net.linear("dense", net.input("x", 7, 15), 9))
    with pytest.raises(StrategyError, match=r"(?s)8 devices.*batch size 7.*batch size of 8"):
        search_recursively(SearchRequest(net.build(), prime_mesh(8)))


def test_a_model_without_products_whose_batch_does_not_divide_is_an_error() -> None:
    net = GraphBuilder()
    net.op("relu", aten.relu.default, net.input("x", 9, 64))
    with pytest.raises(StrategyError, match=r"(?s)batch size 9.*8 or 16"):
        search_recursively(SearchRequest(net.build(), prime_mesh(8)))


def test_an_inputs_first_dimension_that_no_product_has_is_not_said_to_be_indivisible() -> None:
    net = GraphBuilder()
    net.input("x", 8, 3)
    net.linear("dense", net.input("y", 3, 15), 9)
    with pytest.raises(StrategyError, match=r"(?s)dim 0 of the inputs \(8\).*make the batch dim 0"):
        search_recursively(SearchRequest(net.build(), prime_mesh(8)))


def test_operators_without_any_rule_are_named_as_the_reason() -> None:
    net = GraphBuilder()
    net.op("unknown", lambda x: x, net.input("x", 8, 8))
    with pytest.raises(StrategyError, match="none has a sharding rule with"):
        search_recursively(SearchRequest(net.build(), prime_mesh(2)))
