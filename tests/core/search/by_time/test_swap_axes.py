"""Two axes that change places for some operators."""

from __future__ import annotations

import pytest
import torch

from core.search.toy import TOY, searcher
from sample_models import captured, llama, mlp
from shardwright.core.capture.capture import capture
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.by_time.search import TimedSearch, timed_search
from shardwright.core.search.by_time.swap_axes import swap_axes
from shardwright.core.search.request import SearchRequest, TimedStep
from shardwright.progress import ignore_share

NODE, NETWORK = 2, 0
"""An axis of fast links, and one of slow links."""


def swapped(cut: Cuts) -> Cuts:
    places = {NODE: NETWORK, NETWORK: NODE}
    return {f: tuple(sorted(places.get(a, a) for a in axes)) for f, axes in cut.items()}


def swap(search: TimedSearch, cuts: list[Cuts]) -> bool:
    return swap_axes(search.objective, cuts, search.total, search.weights(0.0), ignore_share)


@pytest.fixture
def search() -> TimedSearch:
    return searcher(captured(mlp, batch=512, sizes=(2048,) * 7), prime_mesh(8), TOY)


def test_operators_that_gain_only_together_swap_two_axes(search: TimedSearch) -> None:
    best = search.best()
    least = search.total(search.objective.cost(best))
    half = len(best) // 2
    cuts = [*map(swapped, best[:half]), *best[half:]]
    more = search.total(search.objective.cost(cuts))
    assert more > 1.001 * least
    assert swap(search, cuts)
    assert search.total(search.objective.cost(cuts)) <= least * (1 + 1e-9)


def test_nothing_is_swapped_where_nothing_is_gained(search: TimedSearch) -> None:
    cuts = search.best()
    before = list(cuts)
    assert not swap(search, cuts)
    assert cuts == before


def test_long_sequences_are_as_fast_as_with_pinned_attention() -> None:
    with torch.device("meta"):
        net, args, kwargs = llama(
            batch=1, sequence=2**18, heads=32, kv_heads=32, width=4096, vocabulary=32000
        )
    graph = capture(net, args, kwargs, compute_dtype=torch.bfloat16)
    attention = [op.name for op in graph.ops if "scaled_dot_product" in op.name]
    pinned = {name: {"h": (0, 1, 2, 3, 4), "s": (5,)} for name in attention}
    timed_step = TimedStep(load_cluster("h100_flash2"))

    def least(pins: dict[str, Cuts]) -> float:
        search = timed_search(SearchRequest(graph, prime_mesh(64), pins, timed_step=timed_step))
        return search.total(search.objective.cost(search.best()))

    # An axis at a time does not find the best heads and positions for all operators together.
    assert least({}) <= 1.02 * least(pinned)
