"""The public names, from where `__init__.py` loads each when it is first used."""

from shardwright.core import rules as rules
from shardwright.core.api import (
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
from shardwright.core.capture.capture import capture
from shardwright.core.capture.experts import mixture_of_experts
from shardwright.core.capture.local_map import local_map
from shardwright.core.checkpoint.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from shardwright.core.checkpoint.dataloader import dataloader
from shardwright.core.checkpoint.manifest import CheckpointWarning
from shardwright.core.checkpoint.position import Position
from shardwright.core.checkpoint.state_dict_file import load_state_dict, save_state_dict
from shardwright.core.constraints.load_strategies import load_strategies
from shardwright.core.constraints.pin import NamedFunction as Op
from shardwright.core.constraints.pin import reshard
from shardwright.core.constraints.recompute import recompute
from shardwright.core.constraints.shard import shard
from shardwright.core.deferred import materialize, no_init_parameters
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.parallel.whole import whole
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.plan import Plan
from shardwright.core.plan.ranked import RankedPlans
from shardwright.core.runtime.adopt_optimizer import adopt
from shardwright.core.runtime.global_mean import global_mean
from shardwright.core.runtime.stop_signals import StopSignals
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
    "StopSignals",
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
    "global_mean",
    "load_checkpoint",
    "load_state_dict",
    "load_strategies",
    "local_map",
    "materialize",
    "mixture_of_experts",
    "no_init_parameters",
    "parallelize",
    "plan",
    "recompute",
    "rehearse",
    "reshard",
    "rules",
    "save_checkpoint",
    "save_pretrained",
    "save_state_dict",
    "shard",
    "show_progress",
    "whole",
]
