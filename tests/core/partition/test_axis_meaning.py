"""Axes are called by what is cut over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import bert, llama
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.partition.axis_meaning import name_axes
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import CutAxes, Decisions
from shardwright.core.rules.rule import Cuts

AXES = Layout((2, 2, 2), ("a", "b", "c"))


class Tokens(nn.Module):
    """Token and position embeddings, a norm, and an MLP with a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.position = nn.Parameter(torch.randn(1, 8, 16))
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.token(ids) + self.position)
        return self.down(self.up(x).relu()).square().mean()


def tokens() -> Graph:
    return sw.capture(Tokens(), (torch.zeros(8, 8, dtype=torch.long),))


def names(cuts: dict[str, Cuts], graph: Graph, **storage: CutAxes) -> tuple[str, ...]:
    stored = default_storage(graph, AXES, cuts)
    return name_axes(graph, 3, Decisions(cuts, {**stored, **storage}))


def test_the_batch_is_dp_and_parameters_are_tp() -> None:
    up, down = {"b": (0,), "j": (1, 2)}, {"b": (0,), "k": (1, 2)}
    assert names({"up": up, "relu": {"b": (0,)}, "down": down}, tokens()) == ("dp", "tp0", "tp1")


def test_data_parallel_that_stores_shards_is_fsdp() -> None:
    cuts = {"up": {"b": (0, 1)}, "down": {"b": (0, 1)}}
    weight = {"up.weight": ((1,), ())}
    assert names(cuts, tokens(), **weight) == ("dp", "fsdp", "c")


def test_storage_alone_is_no_meaning() -> None:
    assert names({"up": {"b": (0,)}}, tokens(), **{"up.weight": ((1,), ())}) == ("dp", "b", "c")


def test_positions_are_sp_also_where_a_parameter_is_added_at_each() -> None:
    everywhere = {"b": (0,), "s": (1,)}
    named = names({"token": everywhere, "add": everywhere, "norm": everywhere}, tokens())
    assert named == ("dp", "sp", "c")


def test_positions_between_parameters_are_still_tp() -> None:
    cuts = {"norm": {"b": (0,), "s": (1,)}, "up": {"b": (0,), "j": (1,)}}
    assert names(cuts, tokens()) == ("dp", "tp", "c")


def test_an_axis_of_several_meanings_keeps_its_letter() -> None:
    assert names({"up": {"b": (0,)}, "down": {"k": (0,), "b": (1,)}}, tokens()) == ("a", "dp", "c")


@pytest.mark.parametrize("factor", ["k", "j"])
def test_features_of_an_input_that_weights_sum_over_are_no_positions(factor: str) -> None:
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16, bias=False))
    graph = sw.capture(net, (torch.randn(8, 16),))
    assert names({"0": {"s": (1,)}, "1": {"b": (0,), factor: (1,)}}, graph) == ("dp", "tp", "c")


def test_masks_are_of_the_batch_of_what_they_hide() -> None:
    """The mask of `transformers` is made of positions alone."""
    net, args, kwargs = llama()
    plan = sw.plan(net, args, kwargs, devices=4, mode="data_parallel")
    assert plan.mesh.sizes == "dp 4"
    net, args, kwargs = bert(batch=4)
    assert sw.plan(net, args, kwargs, devices=4, mode="data_parallel").mesh.sizes == "dp 4"


def test_hybrid_sharding_is_called_as_it_is_known() -> None:
    net, args, kwargs = llama(batch=8)
    shard = {"shard_size": 4, "threshold": 0}
    plan = sw.plan(net, args, kwargs, devices=8, mode="data_parallel", hsdp=shard)
    assert plan.mesh.sizes == "dp 2, fsdp 4"
