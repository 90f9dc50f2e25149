"""Matrix products; sharding the contracted dimension makes the output a partial sum.

Factors are labeled I (rows of the first input), J (columns of the second input, the weight), K
(contracted dimensions) and B (batch dimensions).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    NAMES,
    aligned_to_output,
    argument,
    call_arguments,
    factor_names,
    from_notation,
    sharding_rule,
)
from shardwright.core.rules.rule import Dims, LocalSharding, MainFactors, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(aten.linear.default)
def linear(op: Op) -> ShardingRule:
    """Linear layer, `... k, j k -> ... j`; K cannot be sharded with a bias, which every shard would
    add."""
    if argument(op, "bias") is None:
        return _label_product_factors(
            from_notation("... k, j k -> ... j", op, reduced="k"), weight=1
        )
    return _label_product_factors(from_notation("... k, j k, j -> ... j", op), weight=1)


@rule_for(
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.dot.default,
    aten.vdot.default,
)
def matmul(op: Op) -> ShardingRule:
    """Matrix product, `b s k, k j -> b s j`, or `b s i k, b s k j -> b s i j`: batch dimensions are
    broadcast."""
    first, second = (len(value.shape) for value in op.inputs)
    # `i`, `j` and `k` are rows, columns and the contracted dimension.
    leading = tuple(name for name in NAMES if name not in "ijk")
    # A matrix on the right is a weight that all leading dimensions share, as in `linear`; a batch
    # on the right is activations, as in attention scores.
    if second <= 2:
        rows: Dims = leading[: first - 1]
        columns: Dims = ("j",) if second == 2 else ()
        return _label_product_factors(
            _build_matrix_product_rule(op, (*rows, "k"), ("k", *columns), (*rows, *columns)),
            weight=1,
        )
    batch: Dims = leading[: max(first, second) - 2]
    rows = ("i",) if first > 1 else ()
    # Batch dimensions are broadcast, so the shorter operand takes the last ones; a vector has none.
    lhs = (*batch[len(batch) - max(first - 2, 0) :], *rows, "k")
    rhs = (*batch[len(batch) - (second - 2) :], "k", "j")
    return _label_product_factors(
        _build_matrix_product_rule(op, lhs, rhs, (*batch, *rows, "j")), weight=None
    )


@rule_for(aten.addmm.default, aten.addmv.default, aten.baddbmm.default)
def addmm_rule(op: Op) -> ShardingRule:
    """Matrix product plus input, `beta * input + alpha * (a @ b)`: `i j, i _, _ j -> i j`, with
    batch dimension `b` in `baddbmm`.

    The contracted dimension cannot be sharded, as every shard would add the input.
    """
    batch: Dims = ("b",) if len(op.output.shape) == 3 else ()
    columns: Dims = ("j",) if len(op.inputs[2].shape) > 1 else ()
    out = (*batch, "i", *columns)
    added = aligned_to_output(op, out)[0]
    inputs = (added, (*batch, "i", "k"), (*batch, "k", *columns))
    # Input 0 is the added tensor, so the product is that of inputs 1 and 2; a batched one
    # multiplies activations.
    return _label_product_factors(
        sharding_rule(op, inputs, (out,)), weight=None if batch else 2, first=1
    )


@rule_for(aten.addbmm.default)
def addbmm(op: Op) -> ShardingRule:
    """Sum of matrix products plus input, `input + Σ_b a[b] @ c[b]`: `i j, _ i _, _ _ j -> i j`.

    The summed batch `b` cannot be sharded, as every shard would add the input.
    """
    inputs = (aligned_to_output(op, ("i", "j"))[0], (None, "i", None), (None, None, "j"))
    return _label_product_factors(sharding_rule(op, inputs, (("i", "j"),)), weight=None, first=1)


@rule_for(aten.addr.default)
def addr(op: Op) -> ShardingRule:
    """Matrix plus outer product, `i j, i, j -> i j`: both dimensions can be sharded."""
    added = aligned_to_output(op, ("i", "j"))[0]
    return sharding_rule(op, (added, ("i",), ("j",)), (("i", "j"),))


@rule_for(aten.bilinear.default)
def bilinear(op: Op) -> ShardingRule:
    """Bilinear layer, `b s _, b s _, j _ _ -> b s j`: the features of the inputs cannot be
    sharded."""
    notation = "... _, ... _, j _ _" + (", j" if argument(op, "bias") is not None else "")
    return from_notation(f"{notation} -> ... j", op)


@rule_for(aten.outer.default, aten.ger.default)
def outer(op: Op) -> ShardingRule:
    """Outer product, `i, j -> i j`: both vectors can be sharded."""
    return from_notation("i, j -> i j", op)


@rule_for(aten.inner.default)
def inner(op: Op) -> ShardingRule:
    """Inner product over the last dimensions, `s k, t k -> s t`; elementwise if an input is a
    scalar."""
    if not all(value.shape for value in op.inputs):
        dims = factor_names(op.output)
        return sharding_rule(op, aligned_to_output(op, dims), (dims,))
    last = tuple(len(value.shape) - 1 for value in op.inputs)
    return _build_contraction_rule(op, last[:1], last[1:])


@rule_for(aten.tensordot.default)
def tensordot(op: Op) -> ShardingRule:
    """Tensor contraction, `b s t, s t u -> b u`: all dimensions can be sharded, including
    contracted dimensions."""
    return _build_contraction_rule(
        op, tuple(argument(op, "dims_self")), tuple(argument(op, "dims_other"))
    )


def _build_contraction_rule(
    op: Op, first: tuple[int, ...], second: tuple[int, ...]
) -> ShardingRule:
    """Build the rule that contracts dimension `first[i]` of the first input with dimension
    `second[i]` of the second, for each i."""
    unused = iter(NAMES)
    lhs, rhs = ([next(unused) for _ in value.shape] for value in op.inputs)
    for i, j in zip(first, second, strict=True):
        # A contracted pair of dimensions is one factor.
        rhs[j] = lhs[i]
    summed = set(lhs) & set(rhs)
    out = tuple(name for name in (*lhs, *rhs) if name not in summed)
    return _label_product_factors(
        sharding_rule(op, (tuple(lhs), tuple(rhs)), (out,), reduced=summed), weight=1
    )


@rule_for(aten.einsum.default)
def einsum(op: Op) -> ShardingRule:
    """Einsum: its equation is the rule. A label that an operand repeats, as in `ii`, cannot be
    sharded, because a mesh axis cannot shard two dimensions of one tensor."""
    terms, out = _parse_einsum_labels(op)
    repeated = {label for term in terms for label in term if term.count(label) > 1}
    *terms, out = [
        tuple(None if label in repeated else label for label in term) for term in (*terms, out)
    ]
    reduced = {label for term in terms for label in term if label not in out}
    rule = sharding_rule(op, terms, (out,), reduced=(label for label in reduced if label))
    # I, J and K describe a product of two operands; an einsum of others follows the cuts of its
    # neighbors.
    if len(terms) != 2:
        return rule
    # A label of both operands and the result is a batch dimension: neither operand is a weight.
    batched = any(label and label in terms[1] and label in out for label in terms[0])
    return _label_product_factors(rule, weight=None if batched else 1)


# By name, since the operators exist only after the import of the library that defines them.
@rule_for(aten._grouped_mm.default, "transformers.grouped_mm_fallback.default")
@rule_for("shardwright.segment_matmul.default")
def grouped_mm(op: Op) -> ShardingRule | None:
    """Grouped matrix product, `b k, _ k j, _ -> b j`: rows sorted by group, each multiplied by the
    matrix of its group.

    Returns None for other shapes, in which columns or contracted dimensions are grouped.
    """
    ranks = [len(value.shape) for value in op.inputs]
    if ranks != [2, 3, 1] or call_arguments(op).get("bias") is not None:
        return None
    notation = "b k, _ k j, _ -> b j"
    return _label_product_factors(
        from_notation(notation, op, reduced="k", kernel=_build_grouped_mm_kernel), weight=1
    )


def _build_grouped_mm_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    """Build the local kernel of `grouped_mm` sharded by rows, which clips `offs`, the ends of the
    groups, to the rows of this device."""
    # With sharded `k` or `j` every device has all rows, and so the same groups.
    if local.shard_counts.get("b", 1) == 1:
        return op.target
    rows = local.output_shapes[0][0]
    first: Any = local.index("b") * rows

    def multiply(x: Tensor, weight: Tensor, offs: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Rows are sorted by group, so a device has a range of groups. Groups before the range end
        # at row 0, groups after it at the last row; both have no rows here.
        ends = (offs - first).clamp(0, rows).to(offs.dtype)
        return op.target(x, weight, ends, *args, **kwargs)

    return multiply


def _parse_einsum_labels(op: Op) -> tuple[list[Dims], Dims]:
    """Return the labels of the operands and of the result of an einsum; capitals replace `...`."""
    inputs, arrow, output = op.args[0].replace(" ", "").partition("->")
    operands = inputs.split(",")
    lengths = [
        len(value.shape) - len(term.replace("...", ""))
        for term, value in zip(operands, op.inputs, strict=True)
    ]
    pairs = zip(lengths, operands, strict=True)
    longest = max((length for length, term in pairs if "..." in term), default=0)
    # Capital letters that the equation does not use, so that they do not collide with its labels.
    ellipsis_names = [name.upper() for name in NAMES if name.upper() not in inputs][:longest]
    labels = sorted(set(inputs) - set(",."))
    if not arrow:
        # Implicit output of einsum: the labels that occur once, in alphabetical order, behind the
        # ellipsis.
        output = "..." + "".join(label for label in labels if inputs.count(label) == 1)

    def expand(term: str, length: int) -> Dims:
        return tuple(term.replace("...", "".join(ellipsis_names[longest - length :])))

    terms = [expand(term, n) for term, n in zip(operands, lengths, strict=True)]
    return terms, expand(output, longest)


def _build_matrix_product_rule(op: Op, lhs: Dims, rhs: Dims, out: Dims) -> ShardingRule:
    """Build the rule of a matrix product that contracts factor `k` of `lhs` and `rhs`."""
    return sharding_rule(op, (lhs, rhs), (out,), reduced="k")


def _label_product_factors(rule: ShardingRule, weight: int | None, first: int = 0) -> ShardingRule:
    """Return `rule` with its factors labeled as batch, rows, columns or contracted dimensions of a
    matrix product, so that the search chooses the product's sharding by cost.

    Args:
        rule: sharding rule of the operator.
        weight: index of the input that is the weight; None for a product of activations.
        first: index of the product's left input; the right input follows it.
    """
    lhs, rhs, out = rule.inputs[first], rule.inputs[first + 1], rule.outputs[0]
    # In order of first occurrence, since ties go to the first factor.
    named = [name for name in dict.fromkeys((*lhs, *rhs)) if name is not None]
    batch = [name for name in named if name in lhs and name in rhs and name in out]
    rows = [name for name in named if name in lhs and name in out and name not in rhs]
    columns = [name for name in named if name in rhs and name in out and name not in lhs]
    summed = [n for n in named if n in lhs and n in rhs and n in rule.reduced]
    letters = (("B", batch), ("I", rows), ("J", columns), ("K", summed))
    main = MainFactors(
        labels={name: letter for letter, group in letters for name in group},
        weight=weight,
        # The search shards J or K of a product, but a strategy may shard both.
        exclusive=tuple(product(columns, summed)),
    )
    return replace(rule, main=main)
