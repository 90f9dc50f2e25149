"""The sharding factor of the rows in the inputs and outputs of an operator.

If a sharding rule has a factor for the rows in all tensors, the operator computes each row
independently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from shardwright.core.capture.fx_nodes import is_tensor
from shardwright.core.capture.selected_rows import operator_of
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import ShardingRule, depends_on_position


def find_row_factor(
    node: fx.Node, dims_of_rows: Mapping[fx.Node, int], num_rows: int
) -> tuple[str, ShardingRule] | None:
    """Find the sharding factor of the rows of an operator, and its sharding rule.

    Args:
        node: an operator.
        dims_of_rows: the row dimension of each tensor with rows.
        num_rows: number of rows.

    Returns:
        (factor, rule); None if rows depend on each other, or if an input that is not in
        `dims_of_rows` has the factor.
    """
    op = operator_of(node)
    rule = rule_of(op)
    if rule is None or not op.outputs:
        return None
    input_nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda each: input_nodes.append(each) or each)  # type: ignore[func-returns-value]
    # `rule.inputs` has the dimensions of each tensor argument, in order.
    pairs = list(zip((each for each in input_nodes if is_tensor(each)), rule.inputs, strict=True))
    factors = {dims[dims_of_rows[each]] for each, dims in pairs if each in dims_of_rows}
    (factor,) = factors if len(factors) == 1 else (None,)
    if (
        factor is None
        or rule.capacity[factor] != num_rows
        # A factor that is summed over shards makes rows depend on each other.
        or rule.reductions(op, {factor: 2})
        or depends_on_position(op, rule, factor)
        or any(factor in dims and each not in dims_of_rows for each, dims in pairs)
    ):
        return None
    return factor, rule


def find_row_dims(outputs: Sequence[Sequence[str | None]], factor: str) -> tuple[int, ...] | None:
    """Return the dimension with the rows' factor in each output; None if an output has none."""
    if not all(list(dims).count(factor) == 1 for dims in outputs):
        return None
    return tuple(list(dims).index(factor) for dims in outputs)
