"""What training does when a loss, a gradient or a parameter is not finite."""

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
from shardwright.core.runtime.dtensor import own_tensor
from shardwright.errors import NonFiniteError
from shardwright.run.loop.first_non_finite import (
    NOWHERE,
    earliest,
    first_non_finite,
    kind_of,
)

log = logging.getLogger(__name__)

NonFinite = Literal["stop", "skip"]
"""After a step whose loss or gradient norm is not finite: end the run, or go on without it."""


@dataclass
class NonFiniteSteps:
    """Takes back steps whose loss or gradient norm is not finite, on all ranks alike.

    Args:
        policy: whether the run then ends.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer
    policy: NonFinite
    _before: Mapping[str, Tensor] = field(default_factory=dict)
    _generators: Mapping[str, Tensor] = field(default_factory=dict)

    def remember(self) -> None:
        """Keeps what a step changes before the optimizer does; to be called before each step."""
        self._before = {n: t.detach().clone() for n, t in _changed_by_forward(self.net).items()}
        if not isinstance(self.net, ParallelModule) or not self.net.execution.devices.several:
            # Several ranks seed each operator; one draws from PyTorch's own generators.
            self._generators = generator_states(device_of(self.net))

    def take_back(self, batch: Sequence[Tensor], loss: float, norm: float, where: str) -> None:
        """Undoes a step before its optimizer's, for which the loss or the norm is not finite.

        Args:
            where: which step it is.

        Raises:
            NonFiniteError: if the run is to end, or parameters are not finite, so that no step can
                be.
        """
        self._restore()
        problem = f"{where}: the loss is {loss:g}, the gradient norm {norm:g}"
        if self.policy == "skip":
            check_finite_state(self.net, self.optimizer, where)
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning("%s; the step is skipped", problem)
            return
        cause = None
        if isinstance(self.net, ParallelModule):
            self.net.execution.random_step -= 1
            cause = first_non_finite(self.net, batch)
            self._restore()
        self.optimizer.zero_grad()
        raise NonFiniteError(
            f"{problem}; {cause or 'nothing else is, when the step is run again'}. No later"
            " checkpoint is saved; train.non_finite: skip leaves such steps out"
        )

    def _restore(self) -> None:
        now = _changed_by_forward(self.net)
        for name, before in self._before.items():
            own_tensor(now[name]).copy_(own_tensor(before))
        set_generator_states(self._generators, device_of(self.net))
        self.optimizer.zero_grad()


def check_finite_state(net: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raises:
    NonFiniteError: on every rank, if what training has changed is not finite on some.
    """
    order, text = NOWHERE, ""
    for place, (name, tensor) in enumerate(_trained(net, optimizer)):
        kind = kind_of(own_tensor(tensor))
        if kind is not None:
            order, text = place, f"{name} holds {kind}"
            break
    problem = earliest(net, order, text)
    if problem is not None:
        raise NonFiniteError(
            f"{where}: {problem}. No checkpoint is saved of it; lower the learning rate, or clip"
            " gradients with optimizer.clip_norm"
        )


def is_finite(loss: Tensor, norm: Tensor) -> tuple[bool, float, float]:
    """Whether both are, and their values, for which the device is waited for once."""
    pair: list[float] = torch.stack([loss.detach().double(), norm.detach().double()]).tolist()
    return all(map(math.isfinite, pair)), pair[0], pair[1]


def _trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    names: dict[Tensor, str] = {}
    for name, parameter in net.named_parameters():
        names[parameter] = name
        if parameter.requires_grad:
            yield f"parameter {name}", parameter
    for name, tensor in _changed_by_forward(net).items():
        yield f"buffer {name}", tensor
    for trained, state in optimizer.state.items():
        for key, tensor in state.items():
            if isinstance(tensor, Tensor):
                yield f"{key} of the optimizer for {names.get(trained)}", tensor


def _changed_by_forward(net: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters changed without autograd, to which `forward` gives new values."""
    if not isinstance(net, ParallelModule):
        return dict(net.named_buffers())
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    names = (value.name for value, _ in net.execution.partitioned.graph.updates)
    return {name: state[name] for name in names if state.get(name) is not None}
