"""The public names, from where `__init__.py` loads each when it is first used."""

from shardwright.api import (
    AutoParallel,
    Check,
    Examination,
    Pipeline,
    WithLoss,
    best_plans,
    check,
    examine,
    from_pretrained,
    parallelize,
    plan,
    rehearse,
    save_pretrained,
    show_progress,
)
from shardwright.capture.capture import capture
from shardwright.capture.experts import mixture_of_experts
from shardwright.constraints.load_strategies import load_strategies
from shardwright.constraints.recompute import recompute
from shardwright.constraints.shard import NamedFunction as Op
from shardwright.constraints.shard import shard
from shardwright.deferred import materialize, no_init_parameters
from shardwright.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    DeferredError,
    LayoutError,
    LockError,
    MemoryLimitError,
    PlanError,
    ShardwrightError,
    StrategyError,
)
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.parallel.whole import whole
from shardwright.partition.decisions import OptimizerParallel
from shardwright.plan import Plan
from shardwright.plan.ranked import RankedPlans
from shardwright.runtime.adopt_optimizer import adopt
from shardwright.train.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from shardwright.train.checkpoint_manifest import CheckpointWarning
from shardwright.train.dataloader import dataloader
from shardwright.train.position import Position
from shardwright.train.state_dict_file import load_state_dict, save_state_dict

__version__: str

__all__ = [
    "AutoParallel",
    "CaptureError",
    "Check",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "ConfigError",
    "DamagedCheckpointError",
    "DataError",
    "DeferredError",
    "Examination",
    "Layout",
    "LayoutError",
    "LockError",
    "MemoryLimitError",
    "Op",
    "OptimizerParallel",
    "Pipeline",
    "Plan",
    "PlanError",
    "Position",
    "RankedPlans",
    "ShardwrightError",
    "StrategyError",
    "TensorLayout",
    "WithLoss",
    "adopt",
    "best_plans",
    "capture",
    "check",
    "dataloader",
    "examine",
    "from_pretrained",
    "load_checkpoint",
    "load_state_dict",
    "load_strategies",
    "materialize",
    "mixture_of_experts",
    "no_init_parameters",
    "parallelize",
    "plan",
    "recompute",
    "rehearse",
    "save_checkpoint",
    "save_pretrained",
    "save_state_dict",
    "shard",
    "show_progress",
    "whole",
]
