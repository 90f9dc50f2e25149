"""Marked modules, functions and kinds of operators: found in the graph, with what they keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from sample_models import llama
from shardwright.core.constraints.recompute import recompute_of
from shardwright.core.partition.decisions import Recompute


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 16)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.ffn = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.act = nn.GELU()
        self.head = nn.Linear(8, 4)
        self.function: Callable[[Net, Tensor], Tensor] = lambda net, x: torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.function(self, self.act(x))).square().mean()


ARGS = (torch.randn(4, 8),)


def segments(net: nn.Module) -> dict[str, list[str]]:
    """The operators of each segment."""
    found: dict[str, list[str]] = {}
    for name, said in recompute_of(sw.capture(net, ARGS)).items():
        found.setdefault(said.segment, []).append(name)
    return found


def test_a_module_list_stands_for_each_of_its_modules() -> None:
    net = Net()
    assert sw.recompute(net.layers) is net.layers
    found = segments(net)
    assert list(found) == ["layers.0", "layers.1"]
    assert found["layers.0"][0] == "layers.0.norm"
    assert found["layers.0"][-1] == "layers.0.add"
    assert all(name.startswith("layers.1.") for name in found["layers.1"])


def test_the_innermost_mark_wins() -> None:
    net = Net()
    sw.recompute(net)
    sw.recompute(net.layers[0].ffn, communication=False)
    sw.recompute(net.layers[1], operators=())
    found = recompute_of(sw.capture(net, ARGS))
    assert found["layers.0.norm"] == Recompute("model", True)
    assert found["layers.0.ffn.up"] == Recompute("layers.0.ffn", False)
    assert not any(name.startswith("layers.1.") for name in found)


def test_a_later_mark_replaces_an_earlier_one_and_copies_keep_it() -> None:
    net = Net()
    sw.recompute(net.head)
    sw.recompute(net.head, communication=False)
    assert recompute_of(sw.capture(copy.deepcopy(net), ARGS))["head"].communication is False


def test_marks_and_pins_of_one_module_live_together() -> None:
    net = Net()
    sw.shard(net.head, ((4, 1), (1, 1)))
    sw.recompute(net.head)
    sw.shard(net.layers[0].ffn.up, ((2, 1), (1, 1)))
    plan = sw.plan(net, ARGS, devices=4, mode="semi_auto")
    assert plan.row("head").pinned and plan.row("layers.0.ffn.up").pinned
    assert plan.recompute == {
        "head": Recompute("head"),
        "head.bias": Recompute("head"),
        "square": Recompute("head"),
    }


def test_each_call_of_a_module_is_a_segment() -> None:
    net = Net()
    net.function = lambda net, x: net.layers[0](x)
    sw.recompute(net.layers[0])
    found = segments(net)
    assert list(found) == ["layers.0", "layers.0@2"]
    assert len(found["layers.0"]) == len(found["layers.0@2"]) == 10


def test_each_call_of_a_marked_function_is_a_segment() -> None:
    net = Net()
    net.function = sw.recompute(lambda net, x: torch.tanh(x).exp() * 2, False)
    found = recompute_of(sw.capture(net, ARGS))
    assert found == dict.fromkeys(("tanh", "exp", "mul"), Recompute("tanh", False))


def test_a_mark_on_a_module_inside_a_marked_function_wins_there() -> None:
    net = Net()
    net.function = sw.recompute(lambda net, x: net.layers[0](x).exp())
    sw.recompute(net.layers[0].ffn, communication=False)
    found = recompute_of(sw.capture(net, ARGS))
    assert found["layers.0@2.add"].communication
    assert found["exp"].segment == found["layers.0.norm@2"].segment
    assert found["layers.0.ffn.down@2"] == Recompute("layers.0.ffn@2", False)


def test_kinds_are_selected_with_the_operators_that_keep_their_results() -> None:
    net = Net()
    sw.recompute(net.layers, operators=("aten.silu", "mul"))
    found = segments(net)
    assert found["layers.0.ffn.silu"] == [
        "layers.0.ffn.silu",
        "layers.0.ffn.mul",
        "layers.0.ffn.down",
    ]


def test_a_result_that_two_matrix_products_keep_is_not_followed() -> None:
    net = Net()
    sw.recompute(net.layers[0], operators=["layer_norm"])
    assert segments(net) == {"layers.0.norm": ["layers.0.norm"]}


def test_a_single_operator_takes_the_one_that_keeps_its_result_along() -> None:
    net = Net()
    sw.recompute(net.act)
    assert segments(net) == {"act": ["act"]}, "tanh keeps its own result"
    net.function = lambda net, x: torch.sin(x)
    assert segments(net) == {"act": ["act", "sin"]}


def test_what_is_no_module_or_function_is_refused() -> None:
    thing: Any = 3
    with pytest.raises(sw.StrategyError, match="takes a module or a function, not 3"):
        sw.recompute(thing)
    with pytest.raises(sw.StrategyError, match=r"operators='softmax': must be a sequence"):
        sw.recompute(Net(), operators="softmax")


def test_a_mark_without_an_operator_is_an_error_that_names_it() -> None:
    net = Net()
    net.add_module("unused", sw.recompute(nn.Linear(8, 8)))
    with pytest.raises(sw.StrategyError, match="module 'unused' is marked by `recompute`, but has"):
        sw.plan(net, ARGS, devices=2)


def test_a_kind_that_a_module_does_not_have_is_an_error_that_lists_its_kinds() -> None:
    net = Net()
    sw.recompute(net.layers[1], operators=("silu", "softmax"))
    with pytest.raises(
        sw.StrategyError,
        match=r"module 'layers.1' has no operator 'softmax'\nuse one of its operators: layer_norm",
    ):
        sw.plan(net, ARGS, devices=2)


def test_a_marked_function_whose_result_is_not_used_is_an_error() -> None:
    class Unused(Net):
        def forward(self, x: Tensor) -> Tensor:
            marked(x)
            return super().forward(x)

    marked = sw.recompute(torch.sin)
    with pytest.raises(sw.StrategyError, match=r"the function called at test_recompute.py:\d+"):
        sw.plan(Unused(), ARGS, devices=2)


def test_a_plan_shows_what_is_computed_again() -> None:
    net, args, kwargs = llama()
    sw.recompute(net.model.layers, communication=False)
    plan = sw.plan(net, args, kwargs, devices=4, mem_coeff=10.0)
    rows = [row for row in plan.operators if row.segment]
    assert {row.segment.partition("/")[0] for row in rows} == {"model.layers.0", "model.layers.1"}
    assert f"{len(rows)} of {len(plan.operators)} operators are recomputed" in plan.text(full=True)
    up = plan.explain("model.layers.1.mlp.up_proj")
    assert "recomputed in the backward pass in segment model.layers.1" in up
    assert "communication inside the segment is not repeated" in up
    last = plan.explain("model.layers.1.add_1")
    assert "in segment model.layers.1, but not recomputed: autograd saves no tensor of it" in last
    assert "in segment model.layers.0, without its communication" in plan.dump()
    assert sw.Plan.from_json(plan.to_json()) == plan
