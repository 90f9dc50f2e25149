"""`sw.rules.register`: sharding rules of users' own operators, tested against the operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op, OpTarget, Value
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules.notation import from_notation
from shardwright.core.rules.rule import Kernel, Local, RuleMaker, ShardingRule, registry, rule_for
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError

TOLERANCE = 1e-3
"""Allowed difference relative to the largest element: the error of a wrong rule is of order 1."""


def register(
    target: OpTarget,
    notation: str,
    *,
    example: tuple[Any, ...],
    reduced: str | Iterable[str] = (),
    kernel: Kernel | None = None,
) -> None:
    """Register the sharding rule of an operator.

    Args:
        target: `torch.ops.library.operator.default`, made for instance with
            `torch.library.custom_op` and `register_fake`.
        notation: the dimensions of its tensors, `"b s k, j k -> b s j"`; see `docs/rules.md`.
        example: arguments of a call, on which the rule is tested: random tensors, in which the size
            of every factor is even. With tensors on the meta device only the notation is checked.
        reduced: factors that the output lacks and that can be sharded, names or one string of them:
            the local outputs are then terms of a sum.
        kernel: builds the function that computes a shard, if it is not the operator itself.

    Raises:
        StrategyError: if the operator already has a rule, the notation does not match its tensors,
            or two shards of the example do not give the result that the rule predicts.
    """
    if target in registry():
        raise StrategyError(f"{target} has a sharding rule already\nremove one of the two calls")

    def rule(op: Op) -> ShardingRule:
        return from_notation(notation, op, reduced=reduced, kernel=kernel)

    # Before it is registered, so that a wrong rule leaves nothing behind.
    _check(target, rule, example)
    rule_for(target)(rule)


def example_op(target: OpTarget, args: tuple[Any, ...]) -> Op:
    """Make the `Op` of the call `target(*args)`."""

    def value(tensor: Tensor) -> Value:
        return Value("tensor", tuple(tensor.shape), tensor.dtype)

    outputs = tuple(map(value, pytree.tree_leaves(target(*args))))
    return Op("example", target, pytree.tree_map_only(Tensor, value, args), {}, outputs)


def _check(target: OpTarget, maker: RuleMaker, example: tuple[Any, ...]) -> None:
    op = example_op(target, example)
    try:
        rule = maker(op)
    except ValueError as error:
        raise StrategyError(f"the sharding rule of {target} does not fit it: {error}") from None
    assert rule is not None
    full_outputs = pytree.tree_leaves(target(*example))
    # Without values only shapes could be compared, which the notation has already been checked
    # against.
    if all(output.is_meta for output in full_outputs):
        return
    even_factors = [factor for factor in rule.factors if rule.capacity[factor] % 2 == 0]
    if not even_factors:
        raise StrategyError(
            f"the sharding rule `{rule}` of {target} cannot be checked: no factor of the example"
            " has an even size\nuse an example in which the size of every factor is even"
        )
    for factor in even_factors:
        try:
            difference = _difference(op, rule, factor, example, full_outputs)
        # Users' operators raise anything on shapes that they do not support.
        except Exception as error:
            difference = f"it fails: {str(error).strip().splitlines()[0]}"
        if difference:
            raise StrategyError(
                f"the sharding rule `{rule}` contradicts {target}: on halves of {factor!r}"
                f" {difference}\n"
                "write `_` for a dimension that cannot be sharded, or pass a kernel"
            )


def _difference(
    op: Op, rule: ShardingRule, factor: str, example: tuple[Any, ...], full_outputs: list[Tensor]
) -> str:
    """Shard `factor` in two and describe how the joined outputs differ from the full ones.

    Returns an empty text if they agree.
    """
    # Two shards show a wrong dimension, a missing sum and a wrong kernel.
    mesh, cuts = DeviceMatrix((2,), ("x",)), {factor: (0,)}
    inputs, outputs = rule.layouts(mesh, cuts)
    local_outputs = []
    for rank in range(2):
        layouts = iter(inputs)

        def shard(tensor: Tensor, rank: int = rank, layouts: Any = layouts) -> Tensor:
            return tensor[next(layouts).slices(rank, tuple(tensor.shape))].contiguous()

        args = pytree.tree_map_only(Tensor, shard, example)
        shapes = tuple(o.shard_shape(v.shape) for o, v in zip(outputs, op.outputs, strict=True))
        local = Local(rule.shard_counts(mesh, cuts), lambda f, i=rank: i * (f == factor), shapes)  # type: ignore[misc]
        function = op.target if rule.kernel is None else rule.kernel(op, local)
        local_outputs.append(pytree.tree_leaves(function(*args)))
    for index, (full, layout) in enumerate(zip(full_outputs, outputs, strict=True)):
        first, second = (of_rank[index] for of_rank in local_outputs)
        expected = layout.shard_shape(tuple(full.shape))
        if {tuple(first.shape), tuple(second.shape)} != {expected}:
            return f"output {index} has shape {list(first.shape)}, not {list(expected)}"
        sharded_dims = [dim for dim, axes in enumerate(layout.axes) if axes]
        joined = torch.cat([first, second], sharded_dims[0]) if sharded_dims else first + second
        if full.numel() and (joined - full).abs().max() > TOLERANCE * full.abs().max():
            return f"output {index} is not " + (
                "its blocks" if sharded_dims else "the sum of its terms"
            )
    return ""
