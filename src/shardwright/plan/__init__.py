"""What was decided, as data: a plan holds every cut and every parameter's storage."""

from shardwright.plan.build import make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.rows import ConversionRow, OperatorRow

__all__ = ["ConversionRow", "OperatorRow", "Plan", "make_plan"]
