"""Rules that users give to their own operators, checked against the operator itself."""

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
"""Relative to the largest number of an output; what a wrong rule gives is of its own size."""


def register(
    target: OpTarget,
    notation: str,
    *,
    example: tuple[Any, ...],
    reduced: str | Iterable[str] = (),
    kernel: Kernel | None = None,
) -> None:
    """Gives an operator a sharding rule.

    Args:
        target: `torch.ops.library.operator.default`, made for instance with
            `torch.library.custom_op` and `register_fake`.
        notation: the dimensions of its tensors, `"b s k, j k -> b s j"`; see `docs/rules.md`.
        example: arguments of a call, on which the rule is checked: tensors of random numbers whose
            dimensions that carry a factor are even. On the meta device nothing is checked but the
            notation.
        reduced: factors that the output lacks but that may be cut, names or one string of them:
            the outputs of blocks are terms of a sum.
        kernel: builds what computes a shard, if that is not the operator itself.

    Raises:
        StrategyError: if the operator has a rule, the notation does not fit its tensors, or halves
            of the example do not give what the rule says.
    """
    if target in registry():
        raise StrategyError(f"{target} has a sharding rule already")

    def rule(op: Op) -> ShardingRule:
        return from_notation(notation, op, reduced=reduced, kernel=kernel)

    _check(target, rule, example)
    rule_for(target)(rule)


def example_op(target: OpTarget, args: tuple[Any, ...]) -> Op:
    """The operator `target(*args)` as graphs have it."""

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
    wholes = pytree.tree_leaves(target(*example))
    if all(whole.is_meta for whole in wholes):
        return
    halved = [factor for factor in rule.factors if rule.capacity[factor] % 2 == 0]
    if not halved:
        raise StrategyError(
            f"the sharding rule `{rule}` of {target} cannot be checked: no factor of the example"
            " has an even size"
        )
    for factor in halved:
        try:
            difference = _difference(op, rule, factor, example, wholes)
        except Exception as error:
            difference = f"it fails: {str(error).strip().splitlines()[0]}"
        if difference:
            raise StrategyError(
                f"the sharding rule `{rule}` contradicts {target}: on halves of {factor!r}"
                f" {difference}"
            )


def _difference(
    op: Op, rule: ShardingRule, factor: str, example: tuple[Any, ...], wholes: list[Tensor]
) -> str:
    """In what the two halves of `factor`, put together, differ from the whole; empty if in
    nothing."""
    mesh, cuts = DeviceMatrix((2,), ("x",)), {factor: (0,)}
    inputs, outputs = rule.layouts(mesh, cuts)
    parts = []
    for half in range(2):
        layouts = iter(inputs)

        def shard(tensor: Tensor, half: int = half, layouts: Any = layouts) -> Tensor:
            return tensor[next(layouts).slices(half, tuple(tensor.shape))].contiguous()

        args = pytree.tree_map_only(Tensor, shard, example)
        shapes = tuple(o.shard_shape(v.shape) for o, v in zip(outputs, op.outputs, strict=True))
        local = Local(rule.shard_counts(mesh, cuts), lambda f, i=half: i * (f == factor), shapes)  # type: ignore[misc]
        function = op.target if rule.kernel is None else rule.kernel(op, local)
        parts.append(pytree.tree_leaves(function(*args)))
    for place, (whole, layout) in enumerate(zip(wholes, outputs, strict=True)):
        first, second = (half[place] for half in parts)
        expected = layout.shard_shape(tuple(whole.shape))
        if {tuple(first.shape), tuple(second.shape)} != {expected}:
            return f"output {place} has shape {list(first.shape)}, not {list(expected)}"
        cut = [dim for dim, axes in enumerate(layout.axes) if axes]
        joined = torch.cat([first, second], cut[0]) if cut else first + second
        if whole.numel() and (joined - whole).abs().max() > TOLERANCE * whole.abs().max():
            return f"output {place} is not " + ("its blocks" if cut else "the sum of its terms")
    return ""
