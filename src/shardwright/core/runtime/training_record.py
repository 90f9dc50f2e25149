"""Record the clipping and optimizer steps of a rank between two calls of a planned model.

`core/misuse/training_guard.py` compares the records of all ranks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.runtime.devices import stages_of_plan

NUM_COLUMNS = 12
"""Number of 64-bit integers into which a `TrainingRecord` is packed."""

# Doubles travel by their bits, in a tensor of int64.
_NUMBERS, _INTEGERS = struct.Struct("<8d"), struct.Struct("<8q")

_MAX_STEPS = 2**20

GroupOptions = Mapping[str, Any]
"""The options of one parameter group, by name."""


@dataclass
class StageSteps:
    """Steps of optimizers over the parameters of one pipeline stage.

    Parameter groups of two stages need not correspond, as those of one layer each. But options that
    were equal when their optimizers were made stay equal on one device, unless groups of one stage
    already diverge. So each value is recorded by its first value.

    Args:
        steps: number of steps.
        optimizers: the optimizers for the parameters of a stage, while they exist.
        values: by (option, position of the step among those of its optimizer, first value): the
            value, or None if groups diverge.
        gradient_factors, update_factors: factors by which the user's code multiplied all gradients
            before a step, or updated all parameters without an optimizer
            (`core/misuse/manual_updates.py`); 0 for other changes.
    """

    steps: int = 0
    optimizers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    values: dict[tuple[str, int, float], float | None] = field(default_factory=dict)
    gradient_factors: list[float] = field(default_factory=list)
    update_factors: list[float] = field(default_factory=list)
    _positions: WeakKeyDictionary[Optimizer, int] = field(default_factory=WeakKeyDictionary)
    # Also those that have been freed since they made a step.
    _most_optimizers: int = 0

    def watch(self, optimizer: Optimizer) -> None:
        """Count an optimizer for the parameters of a stage, which may make steps."""
        self.optimizers.add(optimizer)
        self._most_optimizers = max(self._most_optimizers, len(self.optimizers))

    def add(
        self, optimizer: Optimizer, first: Sequence[GroupOptions], groups: Sequence[GroupOptions]
    ) -> None:
        """Record a step.

        Args:
            first: the groups' options when the optimizer was made.
            groups: the optimizer's parameter groups.
        """
        self.steps += 1
        self.watch(optimizer)
        position = self._positions[optimizer] = self._positions.get(optimizer, 0) + 1
        for first_options, group in zip(first, groups, strict=False):
            for name, first_value in first_options.items():
                key = name, position, first_value
                value = _compute_checksum(group.get(name))
                self.values[key] = value if self.values.get(key, value) == value else None

    def take(self) -> tuple[list[int], list[float]]:
        """Return (integers, numbers) of the steps, and begin anew."""
        integers, numbers = [self.steps + _MAX_STEPS * self._most_optimizers], list[float]()
        for is_rate in (True, False):
            values = {
                crc32(repr(key).encode()): value
                for key, value in self.values.items()
                if value is not None and (key[0] == "lr") is is_rate
            }
            integers.append(sum(values))
            # Weighted by key, so that exchanged values change the sum; rates are shown in errors.
            weighted = (v if is_rate else (1 + key / 2**32) * v for key, v in values.items())
            numbers.append(sum(weighted) / (max(1, len(values)) if is_rate else 1))
        for factors in (self.gradient_factors, self.update_factors):
            # 0 if there are none, or one of them is 0.
            numbers.append(math.prod(factors) if factors else 0.0)
            factors.clear()
        self.steps, self.values, self._positions = 0, {}, WeakKeyDictionary()
        self._most_optimizers = len(self.optimizers)
        return integers, numbers


def numeric_options(group: GroupOptions) -> dict[str, float]:
    """Return checksums of the options of a parameter group, by name."""
    return {
        name: _compute_checksum(value)
        for name, value in group.items()
        if name != "params" and value is not None
    }


@dataclass
class TrainingRecord:
    """Clipping and optimizer steps on this rank since the previous call of a planned model.

    Args:
        steps: number of steps of optimizers over planned parameters.
        learning_rate: sum of the learning rates of these steps' first parameter groups.
        options: checksum of all numeric options of these steps.
        max_norm: sum of the limits to which gradients were clipped.
        replicas: checksum of parameters of which all ranks have a replica (`misuse/replicas.py`),
            0 if it was not computed for this call; set by `unpack`.
        of_stage: steps over the parameters of one pipeline stage.
        stage_steps, stage_optimizers, stage_rate_keys, stage_option_keys, stage_learning_rate,
            stage_options, gradient_factor, update_factor: what a rank has sent of its `of_stage`;
            set by `unpack`. Keys are checksums of the keys of `StageSteps.values`, the factors
            products, 0 if unknown.
        has_gradients: 1 if the model has gradients at the call, to which the next backward pass
            adds; set by `unpack`.
    """

    steps: int = 0
    learning_rate: float = 0.0
    options: float = 0.0
    max_norm: float = 0.0
    has_gradients: int = 0
    replicas: float = 0.0
    of_stage: StageSteps = field(default_factory=StageSteps)
    stage_steps: int = 0
    stage_optimizers: int = 0
    stage_rate_keys: int = 0
    stage_option_keys: int = 0
    stage_learning_rate: float = 0.0
    stage_options: float = 0.0
    gradient_factor: float = 0.0
    update_factor: float = 0.0

    def take(self, has_gradients: bool, replicas: float = 0.0) -> list[int]:
        """Return the record as `NUM_COLUMNS` integers of 64 bits, and begin a new one."""
        integers, stage_numbers = self.of_stage.take()
        numbers = self.learning_rate, self.options, self.max_norm, replicas, *stage_numbers
        bits = _INTEGERS.unpack(_NUMBERS.pack(*numbers))
        columns = [2 * self.steps + has_gradients, *integers, *bits]
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


def _compute_group_checksum(group: GroupOptions) -> float:
    values = numeric_options(group).values()
    return sum(weight * value for weight, value in enumerate(values, 1))


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
    steps_and_gradients, steps_and_optimizers, rate_keys, option_keys, *bits = columns
    steps, has_gradients = divmod(steps_and_gradients, 2)
    optimizers, stage_steps = divmod(steps_and_optimizers, _MAX_STEPS)
    rate, options, max_norm, replicas, *of_stage = _NUMBERS.unpack(_INTEGERS.pack(*bits))
    of_all = steps, rate, options, max_norm, has_gradients, replicas, StageSteps()
    return TrainingRecord(*of_all, stage_steps, optimizers, rate_keys, option_keys, *of_stage)


# Cached, so that the hook is registered once per process.
@cache
def training_record() -> TrainingRecord:
    """Return the record of this process; the first call registers a hook on optimizer steps."""
    record = TrainingRecord()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        groups = [
            group for group in optimizer.param_groups if are_planned_for_all_ranks(group["params"])
        ]
        if groups:
            record.add_step(groups)

    register_optimizer_step_pre_hook(before_step)
    return record


def are_planned_for_all_ranks(parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters are of a model planned for all ranks of the process group, without
    pipeline stages."""
    first = next(iter(parameters), None)
    if not isinstance(first, DTensor) or stages_of_plan(first.device_mesh) != 1:
        return False
    # One rank may train a model of its own, which is planned for one device; without a process
    # group there is nothing to compare.
    return dist.is_initialized() and first.device_mesh.size() == dist.get_world_size()
