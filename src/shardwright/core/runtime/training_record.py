"""Record what a rank does with a planned model between two calls: losses, clipping, optimizers.

`core/misuse/training_guard.py` compares the records of all ranks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.core.runtime.devices import stages_of_plan

MAX_ELEMENTS = 2**13
"""Number of equidistant elements from which a checksum is computed, at least; a large gradient has
up to twice as many."""

NUM_COLUMNS = 5
"""Number of 64-bit integers of a record; see `unpack`."""

MAX_FLOAT32 = 3e38
"""Limit of the absolute values that are compared between ranks; larger values and NaN are not."""

_PAIR, _INTEGER = struct.Struct("<2f"), struct.Struct("<q")
_NUMBERS, _INTEGERS = struct.Struct("<3d"), struct.Struct("<3q")


@dataclass
class TrainingRecord:
    """Record of losses, clipping and optimizer steps on this rank since its last call of a planned
    model.

    Args:
        absolute, weighted: sum of absolute values, and position-weighted sum, of the CPU gradients
            that backward passes receive for the model's outputs.
        on_device: both sums for gradients on an accelerator, without waiting for them; shape (2,),
            float32; None without such gradients.
        steps: number of steps of optimizers over planned parameters.
        learning_rate: sum of the learning rates of these steps' first parameter groups.
        options: checksum of all numeric options of these steps.
        max_norm: sum of the limits to which gradients were clipped.
    """

    absolute: float = 0.0
    weighted: float = 0.0
    on_device: Tensor | None = None
    steps: int = 0
    learning_rate: float = 0.0
    options: float = 0.0
    max_norm: float = 0.0

    def watch(self, output: Tensor, name: str) -> None:
        """Record the gradient of `output` in later backward passes; the output's name is ignored.
        """
        if output.requires_grad:
            output.register_hook(self._add_gradient)  # type: ignore[no-untyped-call]

    def take(self) -> tuple[list[int], list[Tensor]]:
        """Return the record as `NUM_COLUMNS` integers of 64 bits, and begin a new one.

        Returns:
            The integers, and the first one as a scalar tensor if it is on an accelerator.
        """
        sums = _finite_float32(self.absolute), _finite_float32(self.weighted)
        numbers = self.learning_rate, self.options, self.max_norm
        (bits,) = _INTEGER.unpack(_PAIR.pack(*sums))
        columns = [bits, self.steps, *_INTEGERS.unpack(_NUMBERS.pack(*numbers))]
        device_sums = self.on_device
        self.absolute = self.weighted = self.learning_rate = self.options = self.max_norm = 0.0
        self.steps, self.on_device = 0, None
        return columns, [] if device_sums is None else [device_sums.view(torch.int64)[0]]

    def _add_gradient(self, gradient: Tensor | None) -> None:
        if gradient is None:  # A loss that does not depend on this output.
            return
        if gradient.device.type != "cpu":
            with torch.no_grad():
                sums = _checksums(gradient.detach())
                self.on_device = sums if self.on_device is None else self.on_device + sums
        elif gradient.numel() == 1 and gradient.is_floating_point():
            value = gradient.item()
            self.absolute, self.weighted = self.absolute + abs(value), self.weighted + value
        else:
            with torch.no_grad():
                absolute, weighted = _checksums(gradient.detach()).tolist()
            self.absolute, self.weighted = self.absolute + absolute, self.weighted + weighted

    def add_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Record a step of an optimizer.

        Args:
            groups: the optimizer's parameter groups with planned parameters.
        """
        self.steps += 1
        self.learning_rate += _checksum_of(groups[0].get("lr"))
        for weight, group in enumerate(groups, 1):
            self.options += weight * _checksum_of_options(group)


def _finite_float32(number: float) -> float:
    return number if abs(number) < MAX_FLOAT32 else 0.0


def _checksums(gradient: Tensor) -> Tensor:
    numbers = gradient.to_dense() if gradient.is_sparse else gradient
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    flat = numbers.reshape(-1)
    flat = flat[:: max(1, len(flat) // MAX_ELEMENTS)].float()
    weights = torch.arange(len(flat), device=flat.device, dtype=torch.float32).cos()
    return torch.stack([flat.abs().sum(), flat @ weights])


def _checksum_of_options(group: Mapping[str, Any]) -> float:
    total, weight = 0.0, 1
    for name, value in group.items():
        if name != "params" and value is not None:
            total += weight * _checksum_of(value)
            weight += 1
    return total


def _checksum_of(option: Any) -> float:
    """Return a checksum of the finite numbers in an option of an optimizer."""
    if isinstance(option, int | float):
        return float(option) if math.isfinite(option) else 0.0
    if isinstance(option, list | tuple):
        return sum(weight * _checksum_of(value) for weight, value in enumerate(option, 1))
    # On an accelerator, reading a number would wait for the device.
    if isinstance(option, Tensor) and option.numel() == 1 and option.device.type == "cpu":
        return _checksum_of(option.item())
    return 0.0


def unpack(columns: Sequence[int]) -> TrainingRecord:
    """Return the record packed into integers by `TrainingRecord.take`."""
    gradients, steps, *numbers = columns
    absolute, weighted = _PAIR.unpack(_INTEGER.pack(gradients))
    rate, options, max_norm = _NUMBERS.unpack(_INTEGERS.pack(*numbers))
    return TrainingRecord(absolute, weighted, None, steps, rate, options, max_norm)


@cache
def training_record() -> TrainingRecord:
    """Return the record of this process; the first call hooks into the steps of all optimizers."""
    record = TrainingRecord()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        groups = [group for group in optimizer.param_groups if _has_planned(group["params"])]
        if groups:
            record.add_step(groups)

    register_optimizer_step_pre_hook(before_step)
    return record


def _has_planned(parameters: Sequence[Tensor]) -> bool:
    """Whether the first parameter belongs to a planned model without pipeline stages; with stages,
    ranks have different parameters."""
    first = next(iter(parameters), None)
    return isinstance(first, DTensor) and stages_of_plan(first.device_mesh) == 1
