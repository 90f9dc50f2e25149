"""Record the clipping and optimizer steps of a rank between two calls of a planned model.

`core/misuse/training_guard.py` compares the records of all ranks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.runtime.devices import stages_of_plan

NUM_COLUMNS = 4
"""Number of 64-bit integers into which a `TrainingRecord` is packed."""

# Doubles travel by their bits, in a tensor of int64.
_NUMBERS, _INTEGERS = struct.Struct("<3d"), struct.Struct("<3q")


@dataclass
class TrainingRecord:
    """Clipping and optimizer steps on this rank since the previous call of a planned model.

    Args:
        steps: number of steps of optimizers over planned parameters.
        learning_rate: sum of the learning rates of these steps' first parameter groups.
        options: checksum of all numeric options of these steps.
        max_norm: sum of the limits to which gradients were clipped.
        has_gradients: 1 if the model has gradients at the call, to which the next backward pass
            adds; set by `unpack`.
    """

    steps: int = 0
    learning_rate: float = 0.0
    options: float = 0.0
    max_norm: float = 0.0
    has_gradients: int = 0

    def take(self, has_gradients: bool) -> list[int]:
        """Return the record as `NUM_COLUMNS` integers of 64 bits, and begin a new one."""
        numbers = self.learning_rate, self.options, self.max_norm
        columns = [2 * self.steps + has_gradients, *_INTEGERS.unpack(_NUMBERS.pack(*numbers))]
        self.steps, self.learning_rate, self.options, self.max_norm = 0, 0.0, 0.0, 0.0
        return columns

    def add_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Record a step of an optimizer.

        Args:
            groups: the optimizer's parameter groups with planned parameters.
        """
        self.steps += 1
        self.learning_rate += _compute_checksum(groups[0].get("lr"))
        # Weighted by position, so that options exchanged between two groups change the checksum.
        for weight, group in enumerate(groups, 1):
            self.options += weight * _compute_group_checksum(group)


def _compute_group_checksum(group: Mapping[str, Any]) -> float:
    total, weight = 0.0, 1
    for name, value in group.items():
        if name != "params" and value is not None:
            total += weight * _compute_checksum(value)
            weight += 1
    return total


def _compute_checksum(option: Any) -> float:
    """Return a checksum of an optimizer's option: a weighted sum of its finite numbers."""
    if isinstance(option, int | float):
        # A sum with NaN would differ from itself on every rank.
        return float(option) if math.isfinite(option) else 0.0
    if isinstance(option, list | tuple):
        return sum(weight * _compute_checksum(value) for weight, value in enumerate(option, 1))
    # On an accelerator, reading a number would wait for the device.
    if isinstance(option, Tensor) and option.numel() == 1 and option.device.type == "cpu":
        return _compute_checksum(option.item())
    return 0.0


def unpack(columns: Sequence[int]) -> TrainingRecord:
    """Return the `TrainingRecord` that `TrainingRecord.take` packed into integers."""
    steps_and_gradients, *numbers = columns
    steps, has_gradients = divmod(steps_and_gradients, 2)
    rate, options, max_norm = _NUMBERS.unpack(_INTEGERS.pack(*numbers))
    return TrainingRecord(steps, rate, options, max_norm, has_gradients)


# Cached, so that the hook is registered once per process.
@cache
def training_record() -> TrainingRecord:
    """Return the record of this process; the first call registers a hook on optimizer steps."""
    record = TrainingRecord()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        groups = [
            group for group in optimizer.param_groups if _are_planned_parameters(group["params"])
        ]
        if groups:
            record.add_step(groups)

    register_optimizer_step_pre_hook(before_step)
    return record


def _are_planned_parameters(parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters are of a model planned for all ranks of the process group, without
    pipeline stages."""
    first = next(iter(parameters), None)
    if not isinstance(first, DTensor) or stages_of_plan(first.device_mesh) != 1:
        return False
    # One rank may train a model of its own, which is planned for one device; without a process
    # group there is nothing to compare.
    return dist.is_initialized() and first.device_mesh.size() == dist.get_world_size()
