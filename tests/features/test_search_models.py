"""The searches on captured models and on shapes of large ones."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import sample_models as models
from core.search.handmade import llama as llama_by_hand
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.rules import rule_of
from shardwright.core.search.baselines import data_parallel
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import CutsOfGraph, SearchRequest


@pytest.fixture
def llama() -> Graph:
    return models.captured(models.llama, batch=8, sequence=8)


def letters(graph: Graph, cuts: CutsOfGraph) -> dict[str, set[str]]:
    """What each operator that is decided by cost cuts, in the letters of the literature."""
    found = {}
    for op in graph.ops:
        of_op = rule_of(op)
        if of_op is not None and of_op.main is not None:
            found[op.name] = {of_op.main.labels[f] for f in cuts.get(op.name, {})}
    return found


@pytest.mark.parametrize("order", ["weight", "topology"])
def test_llama_is_data_parallel_with_the_default_coefficient(llama: Graph, order: str) -> None:
    cuts = search_recursively(SearchRequest(llama, prime_mesh(8), order=order))
    assert all(cut == {"I"} for cut in letters(llama, cuts).values())
    assert cuts["model.layers.1.mlp.down_proj"] == {"b": (0, 1, 2)}


@pytest.mark.parametrize("order", ["weight", "topology"])
def test_llama_is_cut_as_by_megatron_with_a_large_coefficient(llama: Graph, order: str) -> None:
    cuts = search_recursively(SearchRequest(llama, prime_mesh(2), mem_coeff=10, order=order))
    found = letters(llama, cuts)
    for layer in ("model.layers.0", "model.layers.1"):
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        columns += ("mlp.gate_proj", "mlp.up_proj")
        assert all(found[f"{layer}.{name}"] == {"J"} for name in columns)
        assert found[f"{layer}.self_attn.scaled_dot_product_attention"] == {"H"}
        assert found[f"{layer}.self_attn.o_proj"] == {"K"}
        assert found[f"{layer}.mlp.down_proj"] == {"K"}
    assert found["lm_head"] == {"J"}
    assert found["model.embed_tokens"] == {"K"}, "rows of the table, not its width"


def test_llama_products_are_not_cut_with_a_tiny_coefficient(llama: Graph) -> None:
    found = letters(llama, search_recursively(SearchRequest(llama, prime_mesh(2), mem_coeff=1e-6)))
    products = [name for name in found if name.endswith(("_proj", "lm_head"))]
    assert len(products) == 15
    assert all(found[name] == set() for name in products)


def test_data_parallel_cuts_all_that_depends_on_the_batch_of_llama(llama: Graph) -> None:
    cuts = data_parallel(llama, prime_mesh(8))
    assert all(cut == {"I"} for cut in letters(llama, cuts).values())


def test_captured_network_has_the_strategies_of_the_golden_case() -> None:
    graph = models.captured(models.network, batch=32)
    cuts = search_recursively(SearchRequest(graph, prime_mesh(8), mem_coeff=0.1, order="topology"))
    assert cuts["layer1"] == {"k": (0, 1), "b": (2,)}
    assert cuts["layer2"] == {"j": (0, 1), "b": (2,)}
    assert cuts["layer3"] == {"k": (0, 1), "b": (2,)}


@pytest.mark.parametrize("model", [models.resnet, models.gpt2, models.bert])
@pytest.mark.parametrize("order", ["weight", "topology"])
def test_residual_models_are_data_parallel_or_cut_in_their_weights(
    model: Callable[..., models.Model], order: str
) -> None:
    graph, mesh = models.captured(model, batch=8), prime_mesh(4)
    batch = letters(
        graph, search_recursively(SearchRequest(graph, mesh, mem_coeff=0.1, order=order))
    )
    assert sum(cut == {"I"} for cut in batch.values()) > 0.7 * len(batch)
    weights = letters(
        graph, search_recursively(SearchRequest(graph, mesh, mem_coeff=100, order=order))
    )
    assert sum(bool(cut & set("JKH")) for cut in weights.values()) > 0.5 * len(weights)


def test_equal_layers_of_a_deep_model_are_cut_equally() -> None:
    cuts = search_recursively(SearchRequest(llama_by_hand(4), prime_mesh(64), mem_coeff=10))
    for name in ("attn.q_proj", "attn.sdpa", "attn.o_proj", "gate_proj", "down_proj", "add2"):
        assert len({str(cuts.get(f"{layer}.{name}")) for layer in (0, 1, 2)}) == 1, name


@pytest.mark.slow
def test_70b_on_1024_devices_is_searched_in_a_second() -> None:
    graph = llama_by_hand(80)
    assert len(graph.ops) > 4000
    seconds = []
    for order in ("weight", "topology"):
        start = time.process_time()
        cuts = search_recursively(
            SearchRequest(graph, prime_mesh(1024), mem_coeff=1.0, order=order)
        )
        seconds.append(time.process_time() - start)
        assert sum(len(axes) for axes in cuts["40.gate_proj"].values()) == 10
    assert max(seconds) < 1.0
