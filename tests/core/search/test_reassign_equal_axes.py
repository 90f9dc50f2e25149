"""Axes that are alike are dealt out so that operators use them alike, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwright as sw
from sample_models import Model, bert, encoder, gpt2, llama, mlp, network, resnet
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.search.reassign_equal_axes import reassign_equal_axes
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import SearchRequest
from shardwright.core.search.shard_uncosted_ops import shard_uncosted_ops

MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: mlp(64, (512, 2048, 2048, 512)),
    "network": lambda: network(32),
    "resnet": lambda: resnet(16),
    "encoder": lambda: encoder(16, 32, 64),
    "gpt2": lambda: gpt2(16, 32, width=64),
    "bert": lambda: bert(16, 32, width=64),
    "llama": lambda: llama(16, 32, width=64),
}


@pytest.mark.parametrize("devices", [24, 64])
@pytest.mark.parametrize("name", MODELS)
def test_plans_send_no_more_and_operators_are_cut_in_as_many_parts(name: str, devices: int) -> None:
    net, args, kwargs = MODELS[name]()
    graph, mesh = sw.capture(net, args, kwargs), prime_mesh(devices)
    request = SearchRequest(graph, mesh)
    cuts = shard_uncosted_ops(request, search_recursively(request))
    plan = sw.plan(graph, devices=devices)
    decided = Decisions(cuts, default_storage(graph, mesh, cuts))
    assert plan.bytes <= max(map(sum, Partitioned(graph, mesh, decided).step_bytes))
    for name, factors in cuts.items():
        parts = {factor: mesh.size(axes) for factor, axes in factors.items()}
        assert parts == {f: plan.mesh.size(axes) for f, axes in plan.cuts[name].items()}


def test_blocks_that_decide_in_another_order_use_the_same_axes() -> None:
    """In the first layer of each pair the batch is cut over a and c, in the second over a and b."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    graph, mesh = sw.capture(net, (torch.randn(64, 64),)), prime_mesh(16)
    first = {"b": (0, 2), "j": (1, 3)}
    second = {"b": (0, 1), "k": (2, 3)}
    cuts = {"0": first, "1": second, "2": first, "3": second}
    nested = reassign_equal_axes(graph, mesh, cuts, pinned=())
    assert nested["0"] == nested["2"] == {"b": (0, 1), "j": (2, 3)}
    assert nested["1"] == nested["3"] == {"b": (0, 1), "k": (2, 3)}
    kept = reassign_equal_axes(graph, mesh, cuts, pinned={"0"})
    assert kept == {**nested, "0": first}


def test_axes_of_other_sizes_do_not_change_places() -> None:
    net = nn.Linear(48, 48, bias=False)
    graph, mesh = sw.capture(net, (torch.randn(48, 48),)), prime_mesh(24)
    nested = reassign_equal_axes(graph, mesh, {"linear": {"b": (2, 3), "j": (0, 1)}}, pinned=())
    assert nested == {"linear": {"b": (0, 3), "j": (1, 2)}}


def test_a_plan_on_a_cluster_keeps_the_axes_that_its_search_chose() -> None:
    net, args, kwargs = network(batch=32)
    options = {"devices": 8, "order": "topology", "cost_model": "symbolic"}
    anywhere, on_nodes = (
        sw.plan(net, args, kwargs, **options, cluster=cluster) for cluster in (None, "h100")
    )
    assert anywhere.mesh.sizes == "dp 2, tp 4"
    assert on_nodes.mesh.sizes == "tp 4, dp 2"
    assert anywhere.bytes == on_nodes.bytes
