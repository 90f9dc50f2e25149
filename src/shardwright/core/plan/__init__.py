"""The result of planning: the sharding of every operator and the storage of every parameter."""

from shardwright.core.plan.build import make_plan
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.rows import OperatorRow, RedistributionRow

__all__ = ["OperatorRow", "Plan", "RedistributionRow", "make_plan"]
