"""The automatic plan against what experts configure by hand: predicted, and really run."""

from shardwright.compare.measured import Measured, RealComparison, compare_really
from shardwright.compare.modelled import compare
from shardwright.compare.ways import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    GRID,
    TENSOR_PARALLEL,
    Comparison,
    Way,
    named,
)

__all__ = [
    "AUTO",
    "DATA_PARALLEL",
    "EXPERT",
    "GRID",
    "TENSOR_PARALLEL",
    "Comparison",
    "Measured",
    "RealComparison",
    "Way",
    "compare",
    "compare_really",
    "named",
]
