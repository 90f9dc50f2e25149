"""Convolutions: `b k s t, j k _ _ -> b j s t`."""

from __future__ import annotations

from typing import Any

from shardwright.core.graph.custom_ops import padded_convolution
from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    call_arguments,
    input_factors,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.overlapped import OutputHalos
from shardwright.core.rules.rule import Dims, LocalSharding, MainFactors, ShardingRule, rule_for
from shardwright.core.rules.windowed import (
    InputHalos,
    Padding,
    input_windows,
    spatial_factors,
    spatial_windows,
)


@rule_for(*overloads("conv1d", "conv2d", "conv3d"))
def convolution(op: Op) -> ShardingRule:
    """Convolution, `b k s t, j k _ _ -> b j s t`: batch, channels and space can be sharded."""
    return _build_convolution_rule(op, transposed=False)


@rule_for(padded_convolution)
def convolution_of_padded_image(op: Op) -> ShardingRule:
    """Convolution with reflected, repeated, circular or unequal padding, `b k s t, j k _ _ -> b j s
    t`: the first and the last shard of space add the padding."""
    return _build_convolution_rule(op, transposed=False)


@rule_for(*overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
def transposed_convolution(op: Op) -> ShardingRule:
    """Transposed convolution, `b k s t, k j _ _ -> b j s t`: the weight has its input channels
    first."""
    return _build_convolution_rule(op, transposed=True)


@rule_for(*overloads("convolution"))
def general_convolution(op: Op) -> ShardingRule:
    """`aten.convolution`: a convolution or, if the argument `transposed` is true, a transposed
    convolution."""
    return _build_convolution_rule(op, transposed=call_arguments(op)["transposed"])


@rule_for(*overloads("convolution_backward"))
def gradient_of_convolution(op: Op) -> ShardingRule | None:
    """Gradient of the input of a convolution, `b _ …, b k …, _ k … -> b k …`: batch and input
    channels can be sharded.

    Returns None if the operator also computes the gradient of a parameter.
    """
    arguments = call_arguments(op)
    # Whether the gradients of input, weight and bias are computed.
    if tuple(arguments["output_mask"]) != (True, False, False):
        return None
    space: Dims = (None,) * (len(op.output.shape) - 2)
    # Shards of channels would cut across groups.
    k = "k" if arguments["groups"] == 1 else None
    filters: Dims = (k, None) if arguments["transposed"] else (None, k)
    inputs = {"grad_output": ("b", None), "input": ("b", k), "weight": filters}
    return sharding_rule(
        op,
        input_factors(op, {name: (*dims, *space) for name, dims in inputs.items()}),
        (("b", k, *space),),
    )


def _build_convolution_rule(op: Op, transposed: bool) -> ShardingRule:
    """Build the rule of a convolution: batch `b`, output channels `j`, input channels `k` and
    spatial dimensions can be sharded.

    Neighboring shards of space exchange the rows that windows across their border read or, in a
    transposed convolution, write. Sharding `k` makes the output a partial sum. With a bias, which
    every device would add, `k` cannot be sharded. A grouped (or depthwise) convolution is sharded
    between groups only, by one factor `g` of input, weight and output channels.
    """
    arguments = call_arguments(op)
    weight, groups = arguments["weight"], arguments["groups"]
    kernel_size = weight.shape[2:]
    num_dims = len(kernel_size)
    has_bias = arguments.get("bias") is not None
    k, j = ("g", "g") if groups > 1 else (None if has_bias else "k", "j")
    # An image without a batch has channels and space only.
    batch: Dims = ("b",)[: len(op.output.shape) - num_dims - 1]
    halos: InputHalos | OutputHalos
    if transposed:
        # Each row of the input is one window over the output.
        counts = op.inputs[0].shape[-num_dims:]
        windows = spatial_windows(op, kernel_size, op.output.shape, counts)
        halos = OutputHalos(
            windows, (*batch, j, *spatial_factors(windows)), replace=_make_local_num_groups_argument
        )
        filters: Dims = (k, j)
    else:
        windows = input_windows(op, kernel_size)
        # A string pads all dimensions alike: the kernel passes `valid`, and pads unsharded
        # dimensions too.
        pads_all = isinstance(arguments.get("padding"), str)
        dims = (*batch, k, *spatial_factors(windows))
        rows = Padding(arguments.get("mode", "constant"), arguments.get("value") or 0)
        halos = InputHalos(
            *(windows, dims, rows), pads_all=pads_all, replace=_make_local_num_groups_argument
        )
        filters = (j, k)
    # Spatial dimensions count as rows (`I`) below: like the batch, they are dimensions of input and
    # output, but not of the weight.
    space, labels = spatial_factors(windows), {"b": "I", j: "J", k: "K"}
    # The weight of a grouped convolution has the input channels of one group only.
    if groups > 1:
        filters, labels = ("g", None), {"b": "I", "g": "J"}
    return sharding_rule(
        op,
        _assign_convolution_factors(op, (*batch, k, *space), (*filters, *(None,) * num_dims), j),
        ((*batch, j, *space),),
        reduced=() if groups > 1 else "k",
        # Inputs and outputs of a group must be on one device, so shards end between groups.
        capacity=halos.capacity | ({"g": groups} if groups > 1 else {}),
        main=MainFactors(
            {name: label for name, label in labels.items() if name}
            | {name: "I" for name in space if name},
            weight=1,
            exclusive=(("j", "k"),) if groups == 1 and k else (),
        ),
        kernel=halos.kernel,
        reductions=halos.reductions,
    )


def _assign_convolution_factors(op: Op, x: Dims, weight: Dims, channels: str) -> tuple[Dims, ...]:
    return input_factors(op, {"input": x, "weight": weight, "bias": (channels,)})


def _make_local_num_groups_argument(op: Op, local: LocalSharding) -> dict[str, Any]:
    shards = local.shard_counts.get("g", 1)
    return {"groups": call_arguments(op)["groups"] // shards} if shards > 1 else {}
