"""A plan as data, as text and as files: every cut, and the storage of every parameter."""

from shardwright.plan.build import make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.rows import OperatorRow, RedistributionRow

__all__ = ["OperatorRow", "Plan", "RedistributionRow", "make_plan"]
