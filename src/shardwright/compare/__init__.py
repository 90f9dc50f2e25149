"""The automatic plan against what experts configure by hand: predicted, and really run."""

from shardwright.compare.modelled import compare
from shardwright.compare.ways import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    GRID,
    TENSOR_PARALLEL,
    Comparison,
    Way,
)

__all__ = [
    "AUTO",
    "DATA_PARALLEL",
    "EXPERT",
    "GRID",
    "TENSOR_PARALLEL",
    "Comparison",
    "Way",
    "compare",
]
