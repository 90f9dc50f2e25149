"""Sharding rules: the factors of each operator that can be sharded, and its local computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from shardwright.core.graph.graph import Op

# These modules are imported for the rules that they register.
from shardwright.core.rules import (  # noqa: F401
    attention,
    batched,
    blockwise_attention,
    candidates,
    contraction,
    convolution,
    creation,
    cross_entropy,
    dropout,
    embedding,
    experts,
    group_norm,
    indexing,
    interpolation,
    local_map,
    loss,
    masked_scatter,
    moved,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reduction,
    sliding_views,
    views,
)
from shardwright.core.rules.notation import draws_random
from shardwright.core.rules.register import register
from shardwright.core.rules.rule import RuleMaker, ShardingRule, find_rule_maker, num_rules
from shardwright.errors import StrategyError

__all__ = ["ShardingRule", "has_rule", "is_random", "register", "rule_of"]


def rule_of(op: Op) -> ShardingRule | None:
    """Return the sharding rule of `op`; None for an operator without a rule, which is replicated.

    Operators with the same target, shapes, dtypes and arguments share one rule.
    """
    rule_count = num_rules()
    cached: tuple[int, ShardingRule | None] | None = op.cache.get("rule_of")
    # A user may register a rule after a graph has been captured, which changes the number of rules.
    if cached is None or cached[0] != rule_count:
        cached = op.cache["rule_of"] = rule_count, _find_rule(op)
    return cached[1]


def has_rule(target: Any) -> bool:
    """Whether calls of the operator `target` have a sharding rule."""
    return find_maker(target) is not None


def find_maker(target: Any) -> RuleMaker | None:
    """Return the function that makes the rules of an operator; None if it has none."""
    is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    # A registered rule has priority over ATen's tag.
    return find_rule_maker(target) or (pointwise.pointwise if is_pointwise else None)


def _find_rule(op: Op) -> ShardingRule | None:
    maker = find_maker(op.target)
    if maker is None:
        return None
    return _build_rule(_RuleCacheKey(maker, op.target, op.structure, op))


def is_random(op: Op) -> bool:
    """Whether `op` draws random numbers; lowered programs seed such calls.

    Holds for operators without a sharding rule too: all devices must draw the same numbers.
    """
    rule = rule_of(op)
    return draws_random(op) if rule is None else rule.random


@dataclass(frozen=True, slots=True)
class _RuleCacheKey:
    """Cache key of a sharding rule: the properties of `op` that determine the rule.

    `op` itself is not compared, so that equal operators share a rule.
    """

    maker: RuleMaker
    target: Any
    arguments: Any
    op: Op = field(compare=False)


@lru_cache(maxsize=1 << 14)
def _build_rule(key: _RuleCacheKey) -> ShardingRule | None:
    try:
        return key.maker(key.op)
    # `sharding_rule` raises it if a rule names other dimensions than the tensors of the call have.
    except ValueError as error:
        raise StrategyError(
            f"the sharding rule of `{key.target}` does not match a call of the operator: {error}\n"
            "correct the notation, with one name per dimension as in `b s k, j k -> b s j`"
        ) from error
