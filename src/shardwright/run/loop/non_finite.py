"""Stop training or skip a step if a loss, a gradient or a parameter is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.core.checkpoint.state import device_of
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.runtime.accelerator import generator_states, set_generator_states
from shardwright.core.runtime.dtensor import detached_local
from shardwright.errors import NonFiniteError
from shardwright.run.loop.first_non_finite import (
    NO_FINDING,
    earliest_finding,
    first_non_finite,
    non_finite_value,
)

log = logging.getLogger(__name__)

NonFinite = Literal["stop", "skip"]
"""Policy for a step whose loss or gradient norm is not finite: stop the run, or skip the step."""


@dataclass
class NonFiniteGuard:
    """Guard that undoes steps whose loss or gradient norm is not finite.

    Loss and norm are reduced over all ranks, so all ranks undo the same steps.

    Args:
        net: the trained module.
        optimizer: the optimizer of `net`; an undone step clears its gradients.
        policy: whether an undone step stops the run or is skipped.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer
    policy: NonFinite
    _saved_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    _saved_generators: Mapping[str, Tensor] = field(default_factory=dict)

    def save_state(self) -> None:
        """Save the state that forward and backward change; must be called before each step."""
        # Copies, because `forward` updates these tensors in place.
        self._saved_tensors = {
            n: t.detach().clone() for n, t in _find_tensors_changed_by_forward(self.net).items()
        }
        if (
            not isinstance(self.net, ParallelModule)
            or not self.net.execution.devices.is_distributed
        ):
            # With several ranks each random operator has its own seed; a single device draws from
            # PyTorch's global generators.
            self._saved_generators = generator_states(device_of(self.net))

    def undo(self, batch: Sequence[Tensor], loss: float, norm: float, where: str) -> None:
        """Undo forward and backward of a step with a non-finite loss or gradient norm.

        Args:
            batch: the batch of the step, on the device of `net`.
            loss, norm: loss and global gradient norm of the step.
            where: description of the step, for messages.

        Raises:
            NonFiniteError: if the policy is `stop`, or parameters are not finite, so that every
                later step would fail too.
        """
        self._restore_state()
        problem = f"{where}: the loss is {loss:g}, the gradient norm {norm:g}"
        if self.policy == "skip":
            check_finite_state(self.net, self.optimizer, where)
            # All ranks skip the same step; one of them says so.
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning("%s; the step is skipped", problem)
            return
        cause = None
        if isinstance(self.net, ParallelModule):
            # The repeated step draws the same random numbers.
            self.net.execution.random_step -= 1
            cause = first_non_finite(self.net, batch)
            # The repeated step has changed the state again.
            self._restore_state()
        self.optimizer.zero_grad()
        raise NonFiniteError(
            f"{problem}; {cause or 'repeating the step gave finite values'}. No later checkpoint is"
            " saved\nset `train.non_finite: skip` to skip such steps"
        )

    def _restore_state(self) -> None:
        current = _find_tensors_changed_by_forward(self.net)
        for name, before in self._saved_tensors.items():
            detached_local(current[name]).copy_(detached_local(before))
        set_generator_states(self._saved_generators, device_of(self.net))
        self.optimizer.zero_grad()


def check_finite_state(net: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Check that trained parameters, buffers and optimizer state are finite.

    Args:
        where: description of the step, for messages.

    Raises:
        NonFiniteError: on every rank, if any rank has a non-finite tensor.
    """
    order, finding = NO_FINDING, ""
    for index, (name, tensor) in enumerate(_iterate_training_state(net, optimizer)):
        value = non_finite_value(detached_local(tensor))
        if value is not None:
            # The state has no order in time; across ranks, the lowest index decides.
            order, finding = index, f"{name} contains {value}"
            break
    problem = earliest_finding(net, order, finding)
    if problem is not None:
        raise NonFiniteError(
            f"{where}: {problem}, so no checkpoint of this step is saved\n"
            "lower the learning rate, or clip gradients with `optimizer.clip_norm`"
        )


def is_finite(loss: Tensor, norm: Tensor) -> tuple[bool, float, float]:
    """Return whether `loss` and `norm` are both finite, `loss`, and `norm`, as Python values."""
    # Stacked, so that the host waits for the device once, not twice.
    values: list[float] = torch.stack([loss.detach().double(), norm.detach().double()]).tolist()
    return all(map(math.isfinite, values)), values[0], values[1]


def _iterate_training_state(
    net: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    names: dict[Tensor, str] = {}
    for name, parameter in net.named_parameters():
        names[parameter] = name
        if parameter.requires_grad:
            yield f"parameter {name}", parameter
    for name, tensor in _find_tensors_changed_by_forward(net).items():
        yield f"buffer {name}", tensor
    for param, state in optimizer.state.items():
        for key, tensor in state.items():
            if isinstance(tensor, Tensor):
                yield f"optimizer state {key} of {names.get(param)}", tensor


def _find_tensors_changed_by_forward(net: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and parameters, by name, that the forward pass may change in place."""
    if not isinstance(net, ParallelModule):
        # Without a captured graph, only buffers may be known to change, as those of batch norm.
        return dict(net.named_buffers())
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    names = (value.name for value, _ in net.execution.partitioned.graph.updates)
    # A pipeline stage has only the tensors of its own chunks.
    return {name: state[name] for name in names if state.get(name) is not None}
