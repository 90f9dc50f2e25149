"""The calls that users make: plan a model, look into it, run it split."""

from shardwright.api.auto_parallel import AutoParallel
from shardwright.api.best_plans import best_plans
from shardwright.api.check import Check, check
from shardwright.api.examine import Examination, WithLoss, examine
from shardwright.api.parallelize import parallelize
from shardwright.api.plan import plan
from shardwright.api.pretrained import from_pretrained, save_pretrained
from shardwright.api.rehearse import rehearse
from shardwright.api.show_progress import show_progress
from shardwright.planner.pipeline import Pipeline

__all__ = [
    "AutoParallel",
    "Check",
    "Examination",
    "Pipeline",
    "WithLoss",
    "best_plans",
    "check",
    "examine",
    "from_pretrained",
    "parallelize",
    "plan",
    "rehearse",
    "save_pretrained",
    "show_progress",
]
