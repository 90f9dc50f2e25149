"""Compare automatic plans with expert configurations, by prediction and by measurement."""

from shardwright.tools.compare.alternatives import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    GRID,
    TENSOR_PARALLEL,
    Alternative,
    Comparison,
    alternative_name,
)
from shardwright.tools.compare.measured import MeasuredComparison, MeasuredPlan, compare_measured
from shardwright.tools.compare.predicted import compare_predicted

__all__ = [
    "AUTO",
    "DATA_PARALLEL",
    "EXPERT",
    "GRID",
    "TENSOR_PARALLEL",
    "Alternative",
    "Comparison",
    "MeasuredComparison",
    "MeasuredPlan",
    "alternative_name",
    "compare_measured",
    "compare_predicted",
]
