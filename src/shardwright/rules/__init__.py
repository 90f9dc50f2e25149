"""Sharding rules: for each operator, what may be cut and what it computes on the shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from shardwright.graph.graph import Op, Value

# These modules are imported for the rules that they register.
from shardwright.rules import (
    attention,
    contraction,
    convolution,
    creation,
    cross_entropy,
    dropout,
    embedding,
    indexing,
    loss,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reduction,
    views,
)
from shardwright.rules.rule import RuleMaker, ShardingRule, registered

__all__ = ["ShardingRule", "rule_of"]

_REGISTERING = (
    *(attention, contraction, convolution, creation, cross_entropy, dropout, embedding, indexing),
    *(loss, normalization, pointwise, pooling, recurrent, reduction, views),
)


def rule_of(op: Op) -> ShardingRule | None:
    """The sharding rule of `op`; None if there is none, and then it is computed whole everywhere.

    Operators with the same target, shapes, dtypes and arguments share one rule.
    """
    maker = registered(op.target)
    if maker is None and torch.Tag.pointwise in getattr(op.target, "tags", ()):
        maker = pointwise.pointwise
    if maker is None:
        return None
    return _made(_Structure(maker, op.target, _structure(op.args), _structure(op.kwargs), op))


@dataclass(frozen=True, slots=True)
class _Structure:
    """What the rule of an operator depends on, and one operator that has it."""

    maker: RuleMaker
    target: Any
    args: Any
    kwargs: Any
    op: Op = field(compare=False)


@lru_cache(maxsize=1 << 14)
def _made(structure: _Structure) -> ShardingRule | None:
    return structure.maker(structure.op)


def _structure(argument: Any) -> Any:
    """`argument` with shape and dtype in place of each value, hashable."""
    if isinstance(argument, Value):
        return argument.shape, argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple([_structure(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(key, _structure(item)) for key, item in argument.items()])
    return argument
