"""Public functions: plan a model, examine and check a plan, and run the sharded model."""

from shardwright.core.api.check import Check, check
from shardwright.core.api.examine import Examination, WithLoss, examine
from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.plan import AutoParallel, best_plans, plan
from shardwright.core.api.pretrained import from_pretrained, save_pretrained
from shardwright.core.api.rehearse import rehearse
from shardwright.core.api.show_progress import show_progress
from shardwright.core.planner.pipeline import Pipeline

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
