"""What was decided, as data: a plan holds every cut and every parameter's storage."""

from shardwright.plan.build import make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.rows import OperatorRow, RedistributionRow

__all__ = ["OperatorRow", "Plan", "RedistributionRow", "make_plan"]
