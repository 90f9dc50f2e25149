"""Operators without a cost of their own take their neighbors' cuts where that sends no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import shardwright as sw
from core.search.handmade import GraphBuilder, aten
from core.search.handmade import llama as llama_graph
from random_cases import random_cases
from random_plans import random_cuts
from sample_models import Model, bert, encoder, llama
from shardwright.core.graph.graph import Graph, Origin
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import communication, default_storage
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import make_plan
from shardwright.core.search.request import CutsOfGraph, SearchRequest
from shardwright.core.search.shard_uncosted_ops import shard_uncosted_ops

TWO, EIGHT = prime_mesh(2), prime_mesh(8)
BATCH = {"b": (0,)}


def sent_for_activations(graph: Graph, mesh: Layout, cuts: CutsOfGraph) -> int:
    decisions = Decisions(cuts, default_storage(graph, mesh, cuts))
    return sum(
        transfer.forward_bytes + transfer.backward_bytes
        for transfer in communication(graph, mesh, decisions).transfers
        if transfer.value.origin is not Origin.PARAMETER
    )


def between_products() -> Graph:
    """Two products with two operators between them."""
    net = GraphBuilder()
    y = net.linear("first", net.input("x", 1024, 512), 512)
    y = net.op("relu", aten.relu.default, y)
    net.linear("last", net.op("gelu", aten.gelu.default, y), 512)
    return net.build()


def test_operators_behind_and_before_a_cut_product_are_cut_as_it_is() -> None:
    graph = between_products()
    for cuts in ({"first": BATCH}, {"last": BATCH}):
        found = shard_uncosted_ops(SearchRequest(graph, TWO), cuts)
        assert found == {**cuts, "relu": BATCH, "gelu": BATCH}
        assert sent_for_activations(graph, TWO, found) <= sent_for_activations(graph, TWO, cuts)


def test_an_operator_pinned_whole_stays_whole_and_others_do_not_follow_past_it() -> None:
    request = SearchRequest(between_products(), TWO, pinned={"gelu": {}})
    assert shard_uncosted_ops(request, {"last": BATCH}) == {"last": BATCH}
    assert shard_uncosted_ops(request, {"first": BATCH}) == {"first": BATCH, "relu": BATCH}


def test_what_would_send_more_stays_whole() -> None:
    net = GraphBuilder()
    y = net.linear("first", net.input("x", 1024, 512), 512)
    wide = net.op("cat", aten.cat.default, [y, y], 1)
    net.linear("last", wide, 512)
    request = SearchRequest(net.build(), TWO)
    assert shard_uncosted_ops(request, {"first": BATCH}) == {"first": BATCH}


def residual_blocks(tokens: int) -> Graph:
    """Products along the batch and pairs of columns and rows, added to one stream in turn."""
    net = GraphBuilder()
    x = net.linear("stem", net.input("x", tokens, 512), 512)
    for i in range(2):
        y = net.linear(f"{i}.batch", net.op(f"{i}.relu", aten.relu.default, x), 512)
        x = net.op(f"{i}.add", aten.add.Tensor, x, y)
        y = net.linear(f"{i}.columns", net.op(f"{i}.gelu", aten.gelu.default, x), 512)
        x = net.op(f"{i}.last", aten.add.Tensor, x, net.linear(f"{i}.rows", y, 512))
    net.op("loss", aten.sum.default, x)
    return net.build()


def residual_cuts() -> CutsOfGraph:
    cuts: CutsOfGraph = {"stem": {"k": (0,)}}
    for i in range(2):
        cuts |= {f"{i}.batch": {"b": (0,)}, f"{i}.columns": {"j": (0,)}, f"{i}.rows": {"k": (0,)}}
    return cuts


def test_a_stream_follows_as_a_whole_where_none_of_its_additions_would_alone() -> None:
    graph, cuts = residual_blocks(2**16), residual_cuts()
    found = shard_uncosted_ops(SearchRequest(graph, TWO), cuts)
    assert all(f"{i}.{name}" in found for i in range(2) for name in ("add", "gelu", "last"))
    assert sent_for_activations(graph, TWO, found) < sent_for_activations(graph, TWO, cuts)


def test_a_stream_of_few_bytes_does_not_take_more_messages() -> None:
    found = shard_uncosted_ops(SearchRequest(residual_blocks(8), TWO), residual_cuts())
    assert "0.last" in found and "1.last" not in found


@random_cases(6)
def test_no_decision_is_taken_back_and_no_more_is_sent(seed: int) -> None:
    graph = llama_graph(2)
    cuts = random_cuts(graph, EIGHT, seed)
    found = shard_uncosted_ops(SearchRequest(graph, EIGHT), cuts)
    for name, factors in cuts.items():
        assert all(set(axes) <= set(found[name][f]) for f, axes in factors.items() if axes)
    assert sent_for_activations(graph, EIGHT, found) <= sent_for_activations(graph, EIGHT, cuts)


@pytest.mark.parametrize("model", [bert, llama, encoder], ids=lambda model: model.__name__)
def test_followers_compute_the_values_and_gradients_of_one_device(
    model: Callable[..., Model],
) -> None:
    options = {} if model is encoder else {"batch": 8, "layers": 1}
    net, args, kwargs = model(**options)
    graph = sw.capture(net, args, kwargs)
    cuts = random_cuts(graph, EIGHT, seed=0)
    found = shard_uncosted_ops(SearchRequest(graph, EIGHT), cuts)
    assert found != cuts
    plan = make_plan(
        Partitioned(graph, EIGHT, Decisions(found, default_storage(graph, EIGHT, found))),
        mode="recursive_programming",
        options={},
        search_seconds=0.0,
        training=True,
    )
    assert sw.check(net, args, kwargs, plan).passes(1e-9)
