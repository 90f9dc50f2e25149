"""Sharding propagation: the published case, where pins meet, pins of every kind, random pins."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from core.search.handmade import GraphBuilder, aten
from core.search.handmade import llama as llama_graph
from random_cases import random_cases
from random_plans import random_cuts
from sample_models import Model, llama, mlp, resnet
from shardwright.core.graph.graph import Graph, Origin
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import Communication, communication, default_storage
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import Plan, make_plan
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.propagation.propagation import propagate
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import SearchRequest
from shardwright.errors import StrategyError

EIGHT = prime_mesh(8)
Pins = Mapping[str, Cuts]


def case_f(bias: bool) -> Graph:
    """The published example: Linear 784-512-256-128-64-10 with ReLU between, batch 32."""
    net = GraphBuilder()
    x = net.input("x", 32, 784)
    for i, features in enumerate((512, 256, 128, 64, 10), start=1):
        x = net.linear(f"layer{i}", x, features, bias)
        if i < 5:
            x = net.op(f"relu{i}", aten.relu.default, x)
    return net.build()


F_PINS: Pins = {"layer1": {"b": (0,), "k": (1, 2)}, "layer3": {"k": (0, 1, 2)}}
F_PUBLISHED: Pins = {
    **F_PINS,
    "relu1": {"b": (0,)},
    "layer2": {"b": (0,), "j": (1, 2)},
    "relu2": {"b": (0,), "s": (1, 2)},
    "layer4": {"j": (0, 1, 2)},
    "relu4": {"s": (0, 1, 2)},
    "layer5": {"k": (0, 1, 2)},
}


def flow(graph: Graph, mesh: Layout, cuts: Pins) -> Communication:
    return communication(graph, mesh, Decisions(cuts, default_storage(graph, mesh, cuts)))


def activation_bytes(found: Communication) -> int:
    """What is sent but for the gradients of parameters."""
    return sum(
        t.forward_bytes + t.backward_bytes
        for t in found.transfers
        if t.value.origin is not Origin.PARAMETER
    )


def product_strategy(graph: Graph, cuts: Pins, name: str) -> tuple[tuple[int, ...], ...]:
    """Parts of the inputs as published: the weight as (k, j)."""
    found = rule_of(graph.by_name[name])
    assert found is not None
    layouts, _ = found.layouts(EIGHT, cuts.get(name, {}))
    first, *weight = (layout.shard_counts for layout in layouts)
    return (first, *(counts[::-1] for counts in weight))


def test_case_f_is_cut_as_published_but_for_the_place_of_one_redistribution() -> None:
    graph = case_f(bias=False)
    cuts = propagate(SearchRequest(graph, EIGHT, F_PINS))
    assert {name: product_strategy(graph, cuts, name) for name in graph.by_name} == {
        "layer1": ((2, 4), (4, 1)),
        "relu1": ((2, 1),),
        "layer2": ((2, 1), (1, 4)),
        # Published with ((2, 4),): there the redistribution comes behind the ReLU, here before it.
        "relu2": ((1, 8),),
        "layer3": ((1, 8), (8, 1)),
        "relu3": ((1, 1),),
        "layer4": ((1, 1), (1, 8)),
        "relu4": ((1, 8),),
        "layer5": ((1, 8), (8, 1)),
    }


def test_case_f_communicates_as_much_as_published() -> None:
    graph = case_f(bias=False)
    found, published = (
        flow(graph, EIGHT, cuts)
        for cuts in (propagate(SearchRequest(graph, EIGHT, F_PINS)), F_PUBLISHED)
    )
    assert activation_bytes(found) == activation_bytes(published) == 170_176
    assert found.bytes == published.bytes == 702_656


def test_case_f_with_biases_communicates_less_than_published() -> None:
    graph = case_f(bias=True)
    followed = {"layer1.bias": "relu1", "layer2.bias": "relu2", "layer4.bias": "relu4"}
    published = {**F_PUBLISHED, **{bias: F_PUBLISHED[relu] for bias, relu in followed.items()}}
    found = flow(graph, EIGHT, propagate(SearchRequest(graph, EIGHT, F_PINS)))
    assert (found.bytes, flow(graph, EIGHT, published).bytes) == (704_704, 704_960)


def chain(*features: int) -> Graph:
    """Products behind each other, batch 32."""
    net = GraphBuilder()
    x = net.input("x", 32, features[0])
    for i, size in enumerate(features[1:], start=1):
        x = net.linear(f"layer{i}", x, size)
    return net.build()


def test_an_operators_own_all_reduce_counts_between_cuts_that_redistribute_alike() -> None:
    """Before a product that reads a whole input: summing up its own terms would save memory."""
    pins: Pins = {"layer2": {"j": (0, 1, 2)}}
    cuts = propagate(SearchRequest(chain(512, 512, 512), EIGHT, pins))
    assert "k" not in cuts.get("layer1", {})


def test_an_operators_own_all_reduce_does_not_count_against_redistribution() -> None:
    """Behind a product whose output is cut: only one that sums over that reads it as it is."""
    cuts = propagate(SearchRequest(chain(512, 512, 512), EIGHT, {"layer1": {"j": (0, 1, 2)}}))
    assert cuts["layer2"] == {"k": (0, 1, 2)}


def test_pinned_operators_are_kept_as_they_are() -> None:
    pins: Pins = {"layer2": {"k": (2, 0)}, "relu1": {}, "layer4": {"b": (1,), "j": (2, 0)}}
    cuts = propagate(SearchRequest(case_f(bias=True), EIGHT, pins))
    assert cuts["layer2"] == {"k": (2, 0)}
    assert "relu1" not in cuts
    assert cuts["layer4"] == {"b": (1,), "j": (2, 0)}


def test_a_data_parallel_pin_makes_the_whole_model_data_parallel() -> None:
    graph = case_f(bias=True)
    cuts = propagate(SearchRequest(graph, EIGHT, {"layer3": {"b": (0, 1, 2)}}))
    assert cuts == {op.name: {"b": (0, 1, 2)} for op in graph.ops}


def test_the_order_of_axes_of_a_pin_is_taken_over() -> None:
    graph = case_f(bias=False)
    cuts = propagate(SearchRequest(graph, EIGHT, {"layer2": {"j": (2, 0, 1)}}))
    assert cuts["relu2"] == {"s": (2, 0, 1)}
    assert cuts["layer3"] == {"k": (2, 0, 1)}


def test_pins_that_meet_are_converted_where_least_is_sent() -> None:
    """Between a data parallel and a model parallel product the tensor is narrow in one place."""
    net = GraphBuilder()
    x = net.linear("first", net.input("x", 32, 512), 512)
    x = net.op("wide", aten.relu.default, x)
    x = net.op("narrow", aten.relu.default, net.linear("down", x, 16))
    net.linear("last", net.op("wide2", aten.relu.default, net.linear("up", x, 512)), 512)
    graph = net.build()
    pins = {"first": {"b": (0, 1, 2)}, "last": {"k": (0, 1, 2)}}
    cuts = propagate(SearchRequest(graph, EIGHT, pins))
    assert cuts["down"] == {"b": (0, 1, 2)}
    assert cuts["up"] == {"j": (0, 1, 2)}
    converted = {t.value.name for t in flow(graph, EIGHT, cuts).transfers if t.step.group_size > 1}
    assert converted & {"down", "narrow"}
    assert not converted & {"wide", "up", "wide2"}


def test_a_redistribution_far_from_both_pins_finds_the_narrow_place() -> None:
    """Breadth first, the ways meet in the middle; the narrow tensor is near the second pin."""
    net = GraphBuilder()
    x = net.linear("first", net.input("x", 32, 512), 512)
    for i in range(6):
        x = net.op(f"wide{i}", aten.relu.default, x)
    x = net.op("narrow", aten.relu.default, net.linear("down", x, 16))
    net.linear("last", net.linear("up", x, 512), 512)
    graph = net.build()
    cuts = propagate(
        SearchRequest(graph, EIGHT, {"first": {"b": (0, 1, 2)}, "last": {"k": (0, 1, 2)}})
    )
    assert all(cuts[f"wide{i}"] == {"b": (0, 1, 2)} for i in range(6))
    assert cuts["up"] == {"j": (0, 1, 2)}


def test_a_residual_stream_is_not_converted_around_one_pinned_layer() -> None:
    net = GraphBuilder()
    x = net.linear("stem", net.input("x", 32, 512), 512)
    for i in range(3):
        y = net.op(f"{i}.relu", aten.relu.default, net.linear(f"{i}.up", x, 2048))
        x = net.op(f"{i}.add", aten.add.Tensor, x, net.linear(f"{i}.down", y, 512))
    graph = net.build()
    cuts = propagate(SearchRequest(graph, EIGHT, {"1.up": {"j": (0, 1, 2)}}))
    for i in range(3):
        assert cuts[f"{i}.up"] == {"j": (0, 1, 2)}
        assert cuts[f"{i}.down"] == {"k": (0, 1, 2)}
        assert f"{i}.add" not in cuts
    kinds = {t.step.operation for t in flow(graph, EIGHT, cuts).transfers}
    assert kinds <= {"all_reduce", "vary", "slice"}


def test_operators_that_no_path_joins_with_a_pin_follow_the_batch() -> None:
    net = GraphBuilder()
    x = net.input("x", 32, 64)
    net.op("apart", aten.relu.default, x)
    net.linear("layer", x, 64)
    cuts = propagate(SearchRequest(net.build(), EIGHT, {"layer": {"j": (0, 1, 2)}}))
    assert cuts["apart"] == {"b": (0, 1, 2)}


def test_operators_apart_are_whole_where_the_batch_does_not_divide() -> None:
    net = GraphBuilder()
    x = net.input("x", 9, 64)
    net.op("apart", aten.relu.default, x)
    net.linear("layer", x, 64)
    cuts = propagate(SearchRequest(net.build(), EIGHT, {"layer": {"j": (0, 1, 2)}}))
    assert cuts.keys() == {"layer"}


def test_operators_follow_how_a_pinned_one_is_told_to_leave_its_output() -> None:
    graph = case_f(bias=False)
    outputs = {"layer1": ((((0, 1, 2)), ()),)}
    cuts = propagate(SearchRequest(graph, EIGHT, {"layer1": {"k": (0, 1, 2)}}, outputs))
    assert cuts["relu1"] == {"b": (0, 1, 2)}


def test_without_pins_the_error_says_what_to_do() -> None:
    with pytest.raises(
        StrategyError, match=r'none are pinned\n.*`sw\.shard\(module.*"recursive_programming"'
    ):
        propagate(SearchRequest(case_f(bias=False), EIGHT, {}))


def test_propagation_gives_the_same_plan_every_time() -> None:
    pins = {"0.up_proj": {"j": (0, 1)}, "0.attn.q_proj": {"b": (2,), "j": (0,)}}
    first, second = (propagate(SearchRequest(llama_graph(1), EIGHT, pins)) for _ in range(2))
    assert list(first.items()) == list(second.items())


def test_a_thousand_operators_take_a_few_seconds() -> None:
    graph = llama_graph(20)
    assert len(graph.ops) > 1000
    started = time.process_time()
    cuts = propagate(
        SearchRequest(graph, EIGHT, {"0.up_proj": {"j": (0, 1, 2)}, "9.attn.q_proj": {"b": (0,)}})
    )
    assert time.process_time() - started < 20
    assert len(cuts) > 500


# Pins in captured models, run on simulated ranks against one device.


def planned(graph: Graph, devices: int, pins: Pins) -> Plan:
    mesh = prime_mesh(devices)
    cuts = propagate(SearchRequest(graph, mesh, pins))
    assert {name: cuts.get(name, {}) for name in pins} == {
        name: {f: axes for f, axes in pin.items() if axes} for name, pin in pins.items()
    }
    return make_plan(
        Partitioned(graph, mesh, Decisions(cuts, default_storage(graph, mesh, cuts))),
        mode="sharding_propagation",
        options={},
        search_seconds=0.0,
        training=True,
    )


def checked(model: Model, devices: int, pins: Pins) -> Plan:
    net, args, kwargs = model
    plan = planned(sw.capture(net, args, kwargs), devices, pins)
    result = sw.check(net, args, kwargs, plan)
    assert result.passes(1e-9), f"{result}\n{plan}"
    return plan


class WeightOperators(nn.Module):
    """A vocabulary's embedding and a feed-forward layer, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.mse_loss(x, target)


def test_pins_of_weight_operators_spread_to_what_is_between() -> None:
    torch.manual_seed(0)
    model = (WeightOperators(), (torch.randint(0, 64, (4, 8)), torch.randn(4, 8, 32)), {})
    plan = checked(
        model,
        8,
        {
            "embedding": {"v": (1, 2), "b": (0,)},
            "up": {"b": (0,), "j": (1, 2)},
            "down": {"b": (0,), "k": (1, 2)},
        },
    )
    assert plan.cuts["norm"] == {"b": (0,)}
    assert plan.cuts["gelu"] == {"b": (0,), "t": (1, 2)}
    assert plan.storage["embedding.weight"] == ((1, 2), ())


class DimensionChanging(nn.Module):
    """Reshape, transpose and mean between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.first(x).reshape(8, 4, 4, 16).transpose(1, 2).mean(1)
        return nn.functional.mse_loss(self.last(y), target)


@pytest.mark.parametrize(
    "pins",
    [
        {"mean": {"b": (0, 1), "s": (2,)}},
        {"reshape": {"b": (0,), "s": (1, 2)}, "last": {"j": (0, 1, 2)}},
        {"transpose": {"s": (0, 1), "b": (2,)}},
    ],
    ids=lambda pins: "+".join(pins),
)
def test_pins_of_dimension_changing_operators_spread_through_them(pins: Pins) -> None:
    torch.manual_seed(0)
    net = DimensionChanging()
    model = (net, (torch.randn(8, 4, 16), torch.randn(8, 4, 8)), {})
    plan = checked(model, 8, pins)
    assert set(plan.cuts) >= {"first", "reshape", "transpose", "mean"}


def test_boundary_pins_split_a_model_in_a_data_and_a_model_parallel_half() -> None:
    model = mlp(batch=8, sizes=(32, 64, 64, 16, 64, 64, 16))
    plan = checked(
        model, 4, {"layers.1": {"b": (0, 1)}, "layers.4": {"k": (0, 1)}, "layers.3": {"j": (0, 1)}}
    )
    for name in ("layers.0", "layers.0.bias", "gelu", "gelu_1"):
        assert plan.cuts[name] == {"b": (0, 1)}, name
    assert plan.cuts["gelu_3"] == {"s": (0, 1)}
    assert plan.cuts["layers.5"] == {"j": (0, 1)}


# Random pins.

MODELS = {
    "mlp": mlp,
    "llama": lambda: llama(layers=1),
    "resnet": lambda: resnet(blocks=(1, 1)),
}


@cache
def captured(name: str) -> tuple[Model, Graph]:
    net, args, kwargs = MODELS[name]()
    return (net, args, kwargs), sw.capture(net, args, kwargs)


def random_pins(graph: Graph, mesh: Layout, seed: int) -> Pins:
    """One operator to five, each cut at random."""
    cuts = random_cuts(graph, mesh, seed)
    return {name: cuts[name] for name in random.Random(seed).sample(sorted(cuts), 1 + seed % 5)}


@random_cases(4, slow=24)
def test_random_pins_give_the_values_and_gradients_of_one_device(seed: int) -> None:
    draw = random.Random(seed)
    (net, args, kwargs), graph = captured(draw.choice(list(MODELS)))
    devices = draw.choice((2, 4, 8))
    plan = planned(graph, devices, random_pins(graph, prime_mesh(devices), seed))
    result = sw.check(net, args, kwargs, plan)
    assert result.passes(1e-9), f"{result}\n{plan}"


def test_the_searchs_costs_know_the_pins() -> None:
    """Left alone, the middle product is cut on its batch; between model parallel ones it is not."""
    graph = case_f(bias=True)
    alone = search_recursively(SearchRequest(graph, EIGHT, mem_coeff=0.01))
    assert alone["layer2"] == {"b": (0, 1, 2)}
    pins: Pins = {"layer1": {"k": (0, 1, 2)}, "layer3": {"k": (0, 1, 2)}}
    between = search_recursively(SearchRequest(graph, EIGHT, mem_coeff=0.01, pinned=pins))
    assert between["layer2"] == {"j": (0, 1, 2)}


def test_the_search_keeps_the_order_of_the_axes_of_a_pin() -> None:
    pins: Pins = {"layer2": {"b": (2,), "k": (1, 0)}}
    cuts = search_recursively(SearchRequest(case_f(bias=False), EIGHT, pinned=pins))
    assert list(cuts["layer2"].items()) == list(pins["layer2"].items())


def test_the_search_accepts_that_all_that_can_be_cut_is_pinned_whole() -> None:
    net = GraphBuilder()
    net.linear("layer", net.input("x", 8, 8), 8)
    assert search_recursively(SearchRequest(net.build(), EIGHT, pinned={"layer": {}})) == {}


@random_cases(8)
def test_neither_propagation_nor_the_search_changes_random_pins(seed: int) -> None:
    _, graph = captured(random.Random(seed).choice(list(MODELS)))
    pins = random_pins(graph, EIGHT, seed)
    request = SearchRequest(graph, EIGHT, pins)
    for cuts in (propagate(request), search_recursively(request)):
        for pinned, asked in pins.items():
            assert cuts.get(pinned, {}) == asked


def test_operators_follow_an_input_that_arrives_sharded() -> None:
    net = GraphBuilder()
    few = net.linear("few", net.input("x", 32, 784), 8)
    net.linear("pinned", few, 4)
    cuts = {
        arrival: propagate(
            SearchRequest(net.build(), prime_mesh(2), {"pinned": {}}, arrivals={"x": arrival})
        )
        for arrival in (((), ()), ((0,), ()))
    }
    # A gather of 8 features is cheaper than one of 784.
    assert cuts == {((), ()): {}, ((0,), ()): {"few": {"b": (0,)}}}
