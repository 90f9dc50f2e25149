"""Shardwright takes an ordinary PyTorch model, decides how every operator is split over N devices,
and trains it there.

>>> import shardwright as sw
>>> layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
"""

from shardwright.api import (
    AutoParallel,
    Check,
    Examination,
    Pipeline,
    WithLoss,
    check,
    examine,
    parallelize,
    plan,
)
from shardwright.decided import OptimizerParallel
from shardwright.deferred import materialise, no_init_parameters
from shardwright.errors import (
    CaptureError,
    CheckpointError,
    ConfigError,
    DataError,
    DeferredError,
    LayoutError,
    MemoryLimitError,
    PlanError,
    ShardwrightError,
    StrategyError,
)
from shardwright.graph.capture import capture
from shardwright.layout import Layout, TensorLayout
from shardwright.lower.adopt import adopt
from shardwright.pins import Op, shard
from shardwright.plan import Plan
from shardwright.recompute import recompute
from shardwright.strategy_files import load_strategies
from shardwright.train.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from shardwright.train.position import Position
from shardwright.train.state_dict_file import load_state_dict, save_state_dict

__version__ = "0.1.0"

__all__ = [
    "AutoParallel",
    "CaptureError",
    "Check",
    "CheckpointError",
    "Checkpoints",
    "ConfigError",
    "DataError",
    "DeferredError",
    "Examination",
    "Layout",
    "LayoutError",
    "MemoryLimitError",
    "Op",
    "OptimizerParallel",
    "Pipeline",
    "Plan",
    "PlanError",
    "Position",
    "ShardwrightError",
    "StrategyError",
    "TensorLayout",
    "WithLoss",
    "adopt",
    "capture",
    "check",
    "examine",
    "load_checkpoint",
    "load_state_dict",
    "load_strategies",
    "materialise",
    "no_init_parameters",
    "parallelize",
    "plan",
    "recompute",
    "save_checkpoint",
    "save_state_dict",
    "shard",
]
