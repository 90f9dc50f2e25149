from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, randn

import shardwright as sw
from shardwright.core.graph.graph import Op
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import LocalSharding, registered_rules


@torch.library.custom_op("test_register::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    """A product, of which each row is divided by its norm."""
    return x / x.norm(dim=-1, keepdim=True) @ weight.T


@scaled.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("test_register::gram", mutates_args=())
def gram(x: Tensor) -> Tensor:
    return x @ x.T


@gram.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[0])


gram.register_autograd(
    lambda ctx, gradient: (gradient + gradient.T) @ ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("test_register::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    """Whether an element is the largest of its row."""
    return x == x.amax(-1, keepdim=True)


@largest.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


class Grams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(4, 6))
        self.gram = sw.Op(GRAM)

    def forward(self) -> Tensor:
        return self.gram(self.weight).square().sum()


GRAM = torch.ops.test_register.gram.default
LARGEST = torch.ops.test_register.largest.default
TARGET = torch.ops.test_register.scaled.default
EXAMPLE = randn(4, 6), randn(8, 6)


@pytest.mark.parametrize(
    ("notation", "options", "words"),
    [
        (
            "b k, j k -> b j",
            {"reduced": "k"},
            "factor 'k' in two shards, the local outputs do not add up to output 0",
        ),
        ("b k, j k -> j b", {}, "failed on its example inputs: .* factor"),
        ("b s k, j k -> b s j", {}, "failed on its example inputs"),
        ("b k, _ k -> b _", {"reduced": "k"}, "contradicts .*factor 'k' in two shards"),
        ("b _, j _ -> b j", {"example": (randn(3, 5), randn(7, 5))}, "no factor of the example"),
    ],
)
def test_a_rule_that_contradicts_its_operator_is_one_error(notation, options, words) -> None:
    with pytest.raises(sw.StrategyError, match=words):
        sw.rules.register(TARGET, notation, **{"example": EXAMPLE, **options})
    assert TARGET not in registered_rules()


def test_halves_of_another_shape_are_an_error() -> None:
    with pytest.raises(
        sw.StrategyError, match=r"factor 'b' in two shards, output 0 has local shape \[2, 2\]"
    ):
        sw.rules.register(GRAM, "b s -> b s", example=(randn(4, 4),))


def test_the_half_of_another_shape_is_named() -> None:
    def kernel(op: Op, local: LocalSharding) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, weight: scaled(x, weight)[: 2 - local.index("b")]

    with pytest.raises(sw.StrategyError, match=r"local shape \[1, 8\], expected \[2, 8\]"):
        sw.rules.register(TARGET, "b _, _ _ -> b _", example=EXAMPLE, kernel=kernel)


def test_operators_that_return_booleans_can_have_a_rule() -> None:
    with pytest.raises(sw.StrategyError, match="do not concatenate to output 0"):
        sw.rules.register(LARGEST, "b k -> b k", example=(torch.eye(4) * torch.arange(1, 5),))
    sw.rules.register(LARGEST, "b _ -> b _", example=(randn(4, 6),))
    assert LARGEST in registered_rules()


def test_a_kernel_computes_the_halves() -> None:
    def kernel(op: Op, local: LocalSharding) -> Callable[[Tensor], Tensor]:
        return lambda x: x @ x.T / 1

    def twice(x: Tensor) -> Tensor:
        return 2 * x @ x.T

    net = Grams()
    before = sw.capture(net, ()).ops[0]
    assert rule_of(before) is None
    with pytest.raises(
        sw.StrategyError, match="factor 's' in two shards, the local outputs do not add up"
    ):
        sw.rules.register(
            GRAM, "_ s -> _ _", reduced="s", example=EXAMPLE[:1], kernel=lambda *_: twice
        )
    sw.rules.register(GRAM, "_ s -> _ _", reduced="s", example=EXAMPLE[:1], kernel=kernel)
    assert rule_of(before) is not None, "of what was captured before too"
    assert [op for op in sw.capture(net, ()).ops if rule_of(op) is None] == []
    sw.shard(net.gram, ((1, 3),))
    plan = sw.plan(net, (), devices=3, mode="semi_auto")
    assert plan.cuts["gram"] == {"s": (0,)}
    assert sw.check(net, (), {}, plan).passes(1e-9)


def test_an_operator_with_a_rule_keeps_it() -> None:
    with pytest.raises(sw.StrategyError, match="already has a sharding rule"):
        sw.rules.register(torch.ops.aten.linear.default, "b k, j k -> b j", example=EXAMPLE)
