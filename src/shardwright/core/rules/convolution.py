"""Convolutions: `b k s t, j k _ _ -> b j s t`."""

from __future__ import annotations

from typing import Any

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    call_arguments,
    input_dims,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.rule import Dims, Local, Main, ShardingRule, no_reductions, rule_for
from shardwright.core.rules.windowed import Windowed, patches_of, windows_of


@rule_for(*overloads("conv1d", "conv2d", "conv3d"))
def convolution(op: Op) -> ShardingRule:
    """Convolution, `b k s t, j k _ _ -> b j s t`: batch, channels and space can be sharded."""
    return _convolution_rule(op, transposed=False)


@rule_for(*overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
def transposed_convolution(op: Op) -> ShardingRule:
    """Transposed convolution, `b k s t, k j _ _ -> b j s t`: the weight has its input channels
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
    """Build a rule that can shard batch `b`, output channels `j`, input channels `k` and spatial
    dimensions: shards exchange halos or, of a transposed convolution, write separate patches.

    Sharding `k` makes the output a partial sum. With a bias, which every device would add, `k`
    cannot be sharded. A grouped (or depthwise) convolution is sharded between groups only, by one
    factor `g` of input, weight and output channels.
    """
    arguments = call_arguments(op)
    weight, groups = arguments["weight"], arguments["groups"]
    windows = () if transposed else windows_of(op, weight.shape[2:])
    replicated: Dims = (None,) * (len(weight.shape) - 2)
    patches = patches_of(op, weight.shape[2:]) if transposed else {}
    factors = {window.dim: window.factor for window in windows} or {
        dim: factor for dim, (factor, _) in patches.items()
    }
    first = len(op.output.shape) - len(replicated)
    space: Dims = tuple(factors.get(first + n) for n in range(len(replicated)))
    batch: Dims = ("b",)[: first - 1]
    space_capacity = {w.factor: w.capacity for w in windows} | dict(patches.values())
    spatial_labels = dict.fromkeys(factors.values(), "I")
    if groups > 1:
        windowed = Windowed(windows, (*batch, "g", *space), len(space), replace=_local_groups)
        return sharding_rule(
            op,
            _input_factors(op, (*batch, "g", *space), ("g", None, *replicated), "g"),
            ((*batch, "g", *space),),
            # Inputs and outputs of a group must be on one device, so shards end between groups.
            capacity={"g": groups, **space_capacity},
            main=Main({"b": "I", "g": "J", **spatial_labels}, weight=1),
            kernel=windowed.kernel,
            reductions=windowed.reductions,
        )
    k = "k" if arguments["bias"] is None else None
    filters: Dims = (k, "j") if transposed else ("j", k)
    windowed = Windowed(windows, (*batch, k, *space), len(space))
    return sharding_rule(
        op,
        _input_factors(op, (*batch, k, *space), (*filters, *replicated), "j"),
        ((*batch, "j", *space),),
        reduced="k",
        capacity=space_capacity,
        main=Main(
            {"b": "I", "j": "J", "k": "K", **spatial_labels}, weight=1, exclusive=(("j", "k"),)
        ),
        kernel=windowed.kernel if windows else None,
        reductions=windowed.reductions if windows else no_reductions,
    )


def _input_factors(op: Op, x: Dims, weight: Dims, channels: str) -> tuple[Dims, ...]:
    return input_dims(op, {"input": x, "weight": weight, "bias": (channels,)})


def _local_groups(op: Op, local: Local) -> dict[str, Any]:
    return {"groups": call_arguments(op)["groups"] // local.shard_counts.get("g", 1)}
