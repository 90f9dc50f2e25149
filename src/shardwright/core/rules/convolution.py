"""Convolutions: `b k …, j k … -> b j …`; spatial dimensions are never sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    WithArguments,
    call_arguments,
    input_dims,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.rule import Dims, Local, Main, ShardingRule, rule_for


@rule_for(*overloads("conv1d", "conv2d", "conv3d"))
def convolution(op: Op) -> ShardingRule:
    """Convolution, `b k _ _, j k _ _ -> b j _ _`: batch and channels can be sharded."""
    return _convolution_rule(op, transposed=False)


@rule_for(*overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
def transposed_convolution(op: Op) -> ShardingRule:
    """Transposed convolution, `b k _ _, k j _ _ -> b j _ _`: the weight has its input channels
    first."""
    return _convolution_rule(op, transposed=True)


@rule_for(*overloads("convolution"))
def general_convolution(op: Op) -> ShardingRule:
    """`aten.convolution`: the rule of a convolution or, if `transposed`, of its transpose."""
    return _convolution_rule(op, transposed=call_arguments(op)["transposed"])


@rule_for(*overloads("convolution_backward"))
def gradient_of_convolution(op: Op) -> ShardingRule | None:
    """Gradient of the input of a convolution, `b _ …, b k …, _ k … -> b k …`: batch and input
    channels can be sharded.

    None if the gradient of a parameter is computed too.
    """
    arguments = call_arguments(op)
    if tuple(arguments["output_mask"]) != (True, False, False):
        return None
    space: Dims = (None,) * (len(op.output.shape) - 2)
    k = "k" if arguments["groups"] == 1 else None
    filters: Dims = (k, None) if arguments["transposed"] else (None, k)
    inputs = {"grad_output": ("b", None), "input": ("b", k), "weight": filters}
    return sharding_rule(
        op,
        input_dims(op, {name: (*dims, *space) for name, dims in inputs.items()}),
        (("b", k, *space),),
    )


def _convolution_rule(op: Op, transposed: bool) -> ShardingRule:
    """Build a rule that can shard batch `b`, output channels `j` and input channels `k`.

    Sharding `k` makes the output a partial sum. With a bias, which every device would add, `k`
    cannot be sharded. A grouped (or depthwise) convolution is sharded between groups only, by one
    factor `g` of input, weight and output channels.
    """
    arguments = call_arguments(op)
    weight, groups = arguments["weight"], arguments["groups"]
    # Shards of spatial dimensions would have to exchange halos of the size of the kernel.
    space: Dims = (None,) * (len(weight.shape) - 2)
    batch: Dims = ("b",)[: len(op.output.shape) - len(space) - 1]
    if groups > 1:
        return sharding_rule(
            op,
            _input_factors(op, (*batch, "g", *space), ("g", None, *space), "g"),
            ((*batch, "g", *space),),
            # Inputs and outputs of a group must be on one device, so shards end between groups.
            capacity={"g": groups},
            main=Main({"b": "I", "g": "J"}, weight=1),
            kernel=_grouped_convolution_kernel,
        )
    k = "k" if arguments["bias"] is None else None
    filters: Dims = (k, "j") if transposed else ("j", k)
    return sharding_rule(
        op,
        _input_factors(op, (*batch, k, *space), (*filters, *space), "j"),
        ((*batch, "j", *space),),
        reduced="k",
        main=Main({"b": "I", "j": "J", "k": "K"}, weight=1, exclusive=(("j", "k"),)),
    )


def _input_factors(op: Op, x: Dims, weight: Dims, channels: str) -> tuple[Dims, ...]:
    return input_dims(op, {"input": x, "weight": weight, "bias": (channels,)})


def _grouped_convolution_kernel(op: Op, local: Local) -> Callable[..., Any]:
    return WithArguments(op, groups=call_arguments(op)["groups"] // local.shard_counts.get("g", 1))
