"""Plans without a search."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from core.search.handmade import GraphBuilder, aten, case_a, residual_mlp
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.baselines import StandAlone, data_parallel
from shardwright.core.search.request import SearchRequest
from shardwright.errors import StrategyError


@pytest.mark.parametrize("devices", [2, 8, 12, 16])
def test_data_parallel_cuts_every_operator_along_the_batch(devices: int) -> None:
    graph, mesh = case_a(batch=48), prime_mesh(devices)
    axes = tuple(range(len(mesh.device_matrix)))
    assert data_parallel(graph, mesh) == {op.name: {"b": axes} for op in graph.ops}


def test_data_parallel_leaves_operators_on_parameters_alone_whole() -> None:
    net = GraphBuilder()
    table = net.op("table", aten.cos.default, net.parameter("angles", 64))
    net.op("mul", aten.mul.Tensor, net.input("x", 8, 64), table)
    assert data_parallel(net.build(), prime_mesh(4)) == {"mul": {"b": (0, 1)}}


def test_data_parallel_ignores_inputs_that_have_no_batch() -> None:
    net = GraphBuilder()
    x, scale = net.input("x", 8, 4), net.input("scale", 4)
    net.op("scaled", aten.mul.Tensor, net.op("relu", aten.relu.default, scale), x)
    assert data_parallel(net.build(), prime_mesh(4)) == {"scaled": {"b": (0, 1)}}


class Recurrent(nn.Module):
    """Embeds tokens and reads them by an LSTM, which has samples in dimension 1 by default."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(32, 16), nn.LSTM(16, 16), nn.Linear(16, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.rnn(self.table(ids))[0])[-1], labels)


@pytest.mark.parametrize("steps", [6, 8, 5])
def test_data_parallel_cuts_a_batch_in_dimension_1(steps: int) -> None:
    net, call = Recurrent(), (torch.zeros(steps, 8).long(), torch.zeros(8).long())
    plan = sw.plan(net, call, devices=2, mode="data_parallel")
    assert plan.row("table").cuts and (steps == 8 or plan.mesh.alias_names == ("dp",))
    assert all(row.cuts for row in plan.operators if row.outputs[0])
    assert sw.check(net, call, None, plan).passes()


class SequenceFirst(nn.Module):
    """Attention over `[sequence, batch, features]`, with labels `[sequence, batch]`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 2), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x)
        return F.cross_entropy(self.head(attended).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_a_batch_that_is_named_is_sharded_although_dimension_0_is_indivisible(mode: str) -> None:
    net, call = SequenceFirst(), (torch.randn(5, 8, 16), torch.randint(4, (5, 8)))
    plan = sw.plan(net, call, devices=2, mode=mode, batch_dims={"x": 1})
    assert plan.row("head").strategy[0] == (1, 2, 1)
    assert sw.check(net, call, None, plan).passes()


def test_an_indivisible_dimension_0_suggests_the_dimension_that_may_be_the_batch() -> None:
    net, call = SequenceFirst(), (torch.randn(5, 8, 16), torch.randint(4, (5, 8)))
    with pytest.raises(StrategyError, match=r"batch_dims=\{'x': 1\}"):
        sw.plan(net, call, devices=2, mode="data_parallel")
    with pytest.raises(StrategyError, match=r"(?s)batch size 8 \(`batch_dims`\).*such as 6 or 9"):
        sw.plan(net, call, devices=3, mode="data_parallel", batch_dims={"x": 1})
    # Inputs without a batch leave the others as they are.
    with pytest.raises(StrategyError, match="batch size 5 "):
        sw.plan(net, call, devices=2, mode="data_parallel", batch_dims={"labels": None})


def test_data_parallel_names_both_numbers_and_the_nearest_batch_sizes() -> None:
    with pytest.raises(StrategyError, match=r"(?s)batch size 30 .* 8 devices.*such as 24 or 32"):
        data_parallel(case_a(batch=30), prime_mesh(8))
    with pytest.raises(StrategyError, match=r"(?s)batch size 3 .* 8 devices.*such as 8$"):
        data_parallel(case_a(batch=3), prime_mesh(8))


def test_data_parallel_needs_a_tensor_input() -> None:
    net = GraphBuilder()
    net.op("relu", aten.relu.default, net.parameter("p", 8))
    with pytest.raises(StrategyError, match="no tensor input"):
        data_parallel(net.build(), prime_mesh(2))


def test_data_parallel_on_one_device_cuts_nothing() -> None:
    assert data_parallel(case_a(), prime_mesh(1)) == {}


def test_stand_alone_cuts_nothing() -> None:
    assert StandAlone().search(SearchRequest(residual_mlp(), prime_mesh(8))) == {}
