"""The calls that users make: plan a model, look into it, run it split."""

from shardwright.api.auto_parallel import AutoParallel
from shardwright.api.checking import Check, check
from shardwright.api.examining import Examination, examine
from shardwright.api.parallelizing import parallelize
from shardwright.api.pipeline import Pipeline
from shardwright.api.planning import plan
from shardwright.api.with_loss import WithLoss

__all__ = [
    "AutoParallel",
    "Check",
    "Examination",
    "Pipeline",
    "WithLoss",
    "check",
    "examine",
    "parallelize",
    "plan",
]
