"""Sharding rules: for each operator, which factors can be cut and what it computes on shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardwright.core.graph.graph import Op

# These modules are imported for the rules that they register.
from shardwright.core.rules import (  # noqa: F401
    attention,
    batched,
    blockwise_attention,
    contraction,
    convolution,
    creation,
    cross_entropy,
    dropout,
    embedding,
    experts,
    indexing,
    loss,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reduction,
    views,
)
from shardwright.core.rules.notation import draws_random
from shardwright.core.rules.register import register
from shardwright.core.rules.rule import RuleMaker, ShardingRule, find_rule_maker, num_rules
from shardwright.errors import StrategyError

__all__ = ["ShardingRule", "is_random", "register", "rule_of"]


def rule_of(op: Op) -> ShardingRule | None:
    """The sharding rule of `op`; None if it has none, in which case every device computes it whole.

    Operators with the same target, shapes, dtypes and arguments share one rule.
    """
    number = num_rules()
    known = _KNOWN.get(op)
    if known is None or known[0] != number:
        known = _KNOWN[op] = number, _find_rule(op)
    return known[1]


_KNOWN: WeakKeyDictionary[Op, tuple[int, ShardingRule | None]] = WeakKeyDictionary()
"""The rules of operators, each with the number of rules that were registered when it was found."""


def _find_rule(op: Op) -> ShardingRule | None:
    maker = find_rule_maker(op.target)
    if maker is None and torch.Tag.pointwise in getattr(op.target, "tags", ()):
        maker = pointwise.pointwise
    if maker is None:
        return None
    return _build_rule(_Structure(maker, op.target, op.structure, op))


def is_random(op: Op) -> bool:
    """Whether `op` draws random numbers, which lowering then seeds: also without a rule, so that
    devices that all compute it in full draw the same."""
    rule = rule_of(op)
    return draws_random(op) if rule is None else rule.random


@dataclass(frozen=True, slots=True)
class _Structure:
    """The cache key of a rule: all that it depends on, and one such operator."""

    maker: RuleMaker
    target: Any
    arguments: Any
    op: Op = field(compare=False)


@lru_cache(maxsize=1 << 14)
def _build_rule(structure: _Structure) -> ShardingRule | None:
    try:
        return structure.maker(structure.op)
    except ValueError as error:
        raise StrategyError(f"the sharding rule of {structure.target}: {error}") from error
