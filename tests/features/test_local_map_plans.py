"""Local maps in plans: random cuts, micro-batches, stages, recomputation, other shapes, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwright as sw
from features.local_map_ranks import Branching, Model, batch
from random_plans import check_random_plan, random_plan
from sample_models import llama


class Rows(nn.Module):
    """Rows and features that may be sharded, two results, and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(16))
        self.again = self.scale

    def forward(self, x: Tensor, features: Tensor, *, bias: bool) -> tuple[Tensor, Tensor]:
        if x.isnan().any() and bias:
            raise ValueError("no number")
        y = self.up(x) * self.scale * self.again
        return self.down(y.tanh()), (x * features).sum(-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rows = nn.Linear(4, 8), Rows()
        self.features = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y, sums = self.rows(self.first(x), self.features, bias=True)
        return functional.gelu(y).pow(2).mean() + sums.mean()


def marked() -> Net:
    net = Net()
    sw.local_map(net.rows, "b s _h, _h -> b s _h, b s")
    return net


ARGS = (torch.randn(8, 4, 4),)


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_equal_one_device(seed: int) -> None:
    net = marked()
    graph = sw.capture(net, ARGS)
    check_random_plan(net, ARGS, {}, graph, random_plan(graph, 4, seed))


def test_reduced_names_are_sums_and_means() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return (x * x).sum(-1), x.exp().mean()

    class Reduced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)
            self.loss = sw.local_map(Loss(), "b k -> b, ()", partial=("sum", "mean"))

        def forward(self, x: Tensor) -> Tensor:
            sums, mean = self.loss(self.linear(x))
            return sums.mean() + mean

    net, args = Reduced(), (torch.randn(8, 4),)
    graph = sw.capture(net, args)
    assert str(sw.rules.rule_of(graph.by_name["loss"])) == "b k -> b, ()"
    for seed in range(2):
        check_random_plan(net, args, {}, graph, random_plan(graph, 4, seed))


def test_micro_batches_and_stages_equal_one_device() -> None:
    net = Model(Branching())
    sw.local_map(net.layer, "b _h -> b _h")
    plan = sw.plan(net, batch(), devices=4, stages=2, micro_batches=2)
    assert sw.check(net, batch(), None, plan).passes(1e-9)


def attention_of_each_layer(net: nn.Module) -> None:
    notation = "b _s _h, b _ _s _s, _ _s, _ _s _d, _ _s _d -> b _s _h"
    for layer in net.get_submodule("model.layers").children():
        sw.local_map(layer.get_submodule("self_attn"), notation)


def whole_model(net: nn.Module) -> None:
    sw.local_map(net, "b _s, b _s -> (), b _s 64", partial=("mean", None))


@pytest.mark.parametrize("mark", [attention_of_each_layer, whole_model])
def test_a_llama_with_sharded_parameters_equals_one_device(
    mark: Callable[[nn.Module], None],
) -> None:
    net, args, kwargs = llama()
    mark(net)
    level = sw.OptimizerParallel("level3", threshold=0)
    plan = sw.plan(net, args, kwargs, devices=4, hsdp=level)
    assert sw.check(net, args, kwargs, plan).passes()


def test_a_recurrent_module_reads_gathered_parameters() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.lstm(x)[0]).mean()

    net = sw.local_map(Recurrent(), "b _ _ -> ()", partial="mean")
    plan = sw.plan(net, ARGS, devices=2)
    assert sw.check(net, ARGS, None, plan).passes()


def test_random_numbers_are_seen() -> None:
    net = Model(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    sw.local_map(net.layer, "b _h -> b _h")
    result = sw.check(net, batch(), None, sw.plan(net, batch(), devices=4))
    assert result.random_operators == ("layer",)
    assert result.passes()


def test_it_is_compiled_around() -> None:
    net = Model(Branching())
    sw.local_map(net.layer, "b _h -> b _h")
    planned: Any = sw.parallelize(net, sw.plan(net, batch(), devices=1), copy=True)
    planned.compile(backend="eager")
    torch.testing.assert_close(planned(*batch()), net(*batch()))


def test_it_is_recomputed() -> None:
    net = marked()
    sw.recompute(net.rows)
    plan = sw.plan(net, ARGS, devices=2)
    assert sw.check(net, ARGS, None, plan).passes(1e-9)


def test_other_shapes_run_with_the_same_plan() -> None:
    net = marked()
    plan = sw.plan(net, ARGS, devices=1)
    planned = sw.parallelize(net, plan, copy=True)
    for rows in (8, 6, 4, 2):
        x = torch.randn(rows, 4, 4)
        torch.testing.assert_close(planned(x), net(x))


def test_memory_and_operations_are_counted_or_stated() -> None:
    class Big(nn.Module):
        def __init__(self, marked: bool = True, **options: Any) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
            self.last = nn.Linear(64, 1)
            if marked:
                sw.local_map(self.layers, "b _h -> b _h", **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layers(x)).mean()

    args = (torch.randn(1 << 14, 64),)

    def plan(**options: Any) -> sw.Plan:
        return sw.plan(Big(**options), args, devices=2, cluster="h100")

    captured, counted = plan(marked=False), plan()
    assert counted.memory.peak == pytest.approx(captured.memory.peak, rel=0.1)
    stated = plan(saved_bytes=1e8)
    assert stated.memory.peak > counted.memory.peak + 4e7


BAD = [
    ("b s", {}, "it needs inputs and results around an arrow"),
    ("b-s -> b", {}, "'b-s' is no name"),
    ("b -> b", {"partial": "max"}, 'pass "sum", "mean" or None'),
    ("b -> b", {"dtypes": (torch.int64, torch.int64)}, "2 dtypes for 1 results"),
]


@pytest.mark.parametrize(("notation", "options", "message"), BAD)
def test_a_malformed_notation_is_refused(notation: str, options: Any, message: str) -> None:
    with pytest.raises(sw.StrategyError, match=message):
        sw.local_map(nn.Linear(2, 2), notation, **options)


def test_a_call_that_does_not_fit_is_refused() -> None:
    def refused(notation: str, message: str) -> None:
        net = Net()
        sw.local_map(net.rows, notation)
        with pytest.raises(sw.StrategyError, match=message):
            sw.capture(net, (torch.randn(6, 4, 4),))

    refused("b _h -> b _h", r'called with \[6, 4, 8\], \[8\].*\n.*"b _ _, _ -> b _h"')
    refused("b s b, _ -> b s b, b s", r"`b` of `b s b, _ -> b s b, b s` is both 6 and 8")


def test_a_function_that_holds_what_is_trained_is_refused() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(sw.StrategyError, match="reads a Linear"):
        sw.local_map(lambda x: linear(x), "b _ -> b _")
    with pytest.raises(sw.StrategyError, match="takes a module or a function"):
        sw.local_map(nn.Linear, "b -> b")


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    net = marked()
    sw.shard(net.rows, ((3, 1, 1), None))
    with pytest.raises(sw.StrategyError, match="8, which is not divisible into 3 shards"):
        sw.plan(net, ARGS, devices=6)
