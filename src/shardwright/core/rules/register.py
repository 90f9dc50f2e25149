"""`sw.rules.register`: register sharding rules of custom operators, tested on example inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op, OpTarget, Value
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules.notation import from_notation
from shardwright.core.rules.rule import (
    Kernel,
    LocalSharding,
    RuleMaker,
    ShardingRule,
    registered_rules,
    rule_for,
)
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError

TOLERANCE = 1e-3
"""Largest allowed difference between joined local outputs and the full output, as a fraction of
the largest absolute value in the full output; a wrong rule causes differences of order 1."""


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
        target: the operator, `torch.ops.library.operator.default`, defined for instance with
            `torch.library.custom_op` and `register_fake`.
        notation: the factors of the operator's tensors, one name per dimension, such as
            `"b s k, j k -> b s j"`; see `docs/rules.md`.
        example: positional arguments of a call on which the rule is tested: random tensors in which
            the size of each factor is even. With meta tensors only the notation is checked.
        reduced: factors that the output lacks and that can be sharded, as names or as one string of
            names separated by spaces; the local outputs are then partial sums.
        kernel: builder of the function that computes a device's local outputs; None if the operator
            itself computes them from local tensors.

    Raises:
        StrategyError: if the operator already has a rule, the notation does not match its tensors,
            or the local outputs of two shards of the example do not join to the full outputs.
    """
    if target in registered_rules():
        raise StrategyError(
            f"`{target}` already has a sharding rule\nremove this call of `sw.rules.register`, or"
            " the earlier one for the same operator"
        )

    def rule(op: Op) -> ShardingRule:
        return from_notation(notation, op, reduced=reduced, kernel=kernel)

    # Test before registering, so that a wrong rule is not registered.
    _check_rule_on_example(target, rule, example)
    rule_for(target)(rule)


def example_op(target: OpTarget, args: tuple[Any, ...]) -> Op:
    """Make the `Op` of the call `target(*args)`."""

    def value(tensor: Tensor) -> Value:
        return Value("tensor", tuple(tensor.shape), tensor.dtype)

    outputs = tuple(map(value, pytree.tree_leaves(target(*args))))
    return Op("example", target, pytree.tree_map_only(Tensor, value, args), {}, outputs)


def _check_rule_on_example(target: OpTarget, maker: RuleMaker, example: tuple[Any, ...]) -> None:
    op = example_op(target, example)
    try:
        rule = maker(op)
    except ValueError as error:
        raise StrategyError(
            f"the sharding rule of `{target}` failed on its example inputs: {error}\ncorrect the"
            " notation, or pass an example that matches the operator's signature"
        ) from None
    assert rule is not None
    full_outputs = pytree.tree_leaves(target(*example))
    # Meta tensors have no values to compare, and their shapes agree with the notation by now.
    if all(output.is_meta for output in full_outputs):
        return
    even_factors = [factor for factor in rule.factors if rule.capacity[factor] % 2 == 0]
    if not even_factors:
        raise StrategyError(
            f"the sharding rule `{rule}` of `{target}` cannot be tested: no factor of the example"
            " has an even size\npass an example in which the size of each factor is even"
        )
    for factor in even_factors:
        try:
            difference = _describe_output_difference(op, rule, factor, example, full_outputs)
        # Users' operators raise anything on shapes that they do not support.
        except Exception as error:
            difference = f"the computation fails: {str(error).strip().splitlines()[0]}"
        if difference:
            raise StrategyError(
                f"the sharding rule `{rule}` contradicts `{target}`: with factor {factor!r} in two"
                f" shards, {difference}\n"
                "write `_` for a dimension that cannot be sharded, or pass `kernel`"
            )


def _describe_output_difference(
    op: Op, rule: ShardingRule, factor: str, example: tuple[Any, ...], full_outputs: list[Tensor]
) -> str:
    """Describe how the joined outputs of two shards along `factor` differ from the full outputs;
    return an empty string if they are equal."""
    # Two shards suffice to detect a wrong dimension, a missing sum or a wrong kernel.
    mesh, cuts = DeviceMatrix((2,), ("x",)), {factor: (0,)}
    inputs, outputs = rule.layouts(mesh, cuts)
    local_outputs = []
    for rank in range(2):
        layouts = iter(inputs)

        # The default arguments bind the current values of the loop.
        def shard(tensor: Tensor, rank: int = rank, layouts: Any = layouts) -> Tensor:
            # Contiguous, as local shards are when a program runs.
            return tensor[next(layouts).slices(rank, tuple(tensor.shape))].contiguous()

        args = pytree.tree_map_only(Tensor, shard, example)
        shapes = tuple(o.shard_shape(v.shape) for o, v in zip(outputs, op.outputs, strict=True))

        def index(name: str, rank: int = rank) -> int:
            return rank if name == factor else 0

        local = LocalSharding(rule.shard_counts(mesh, cuts), index, shapes)
        function = op.target if rule.kernel is None else rule.kernel(op, local)
        local_outputs.append(pytree.tree_leaves(function(*args)))
    for number, (full, layout) in enumerate(zip(full_outputs, outputs, strict=True)):
        first, second = (of_rank[number] for of_rank in local_outputs)
        expected = layout.shard_shape(tuple(full.shape))
        for shape in (tuple(first.shape), tuple(second.shape)):
            if shape != expected:
                return f"output {number} has local shape {list(shape)}, expected {list(expected)}"
        sharded_dims = [dim for dim, axes in enumerate(layout.axes) if axes]
        joined = torch.cat([first, second], sharded_dims[0]) if sharded_dims else first + second
        if not _is_close_to_expected(joined, full):
            joining = "concatenate" if sharded_dims else "add up"
            return f"the local outputs do not {joining} to output {number}"
    return ""


def _is_close_to_expected(joined: Tensor, expected: Tensor) -> bool:
    # Only floating-point numbers are rounded; booleans cannot be subtracted.
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(joined, expected)
    # The maximum of an empty tensor is an error.
    if not expected.numel():
        return True
    return not (joined - expected).abs().max() > TOLERANCE * expected.abs().max()
