"""Find the factors by which the user's code scales gradients, or updates parameters, of a stage.

With pipeline stages, a loop over all parameters that sums their norms, in order to scale gradients
or updates, computes the norm of one stage. The number may pass through Python, so only its use can
be seen: all gradients of a stage times one factor, or an update by all gradients times one factor.
`training_guard` compares the factors of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardwright.core.misuse.ranks import is_due
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.runtime.training_record import training_record

FIRST_STEPS, PERIOD = 10, 100
"""Number of training steps at the start of a run that are all compared, and the number of steps
between later comparisons."""

MAX_TENSORS, MAX_ELEMENTS = 8, 16
"""Number of tensors, and of elements of each, that are compared."""

TOLERANCE = 1e-2
"""Largest norm of what is left without the common factor, relative to the norm of the whole;
differences of parameters are rounded."""


class ManualUpdates:
    """Comparison of the gradients and parameters of a stage before and after the user's code.

    Args:
        parameters: the parameters of this rank's stage.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._trained = list(parameters)
        self._steps = 0
        # Parameters with gradients, and samples of both at the end of the last training step.
        self._compared: list[nn.Parameter] = []
        self._gradients = self._values = torch.empty(0)

    def after_backward(self) -> None:
        """Record gradients and parameters at the end of a training step."""
        self._steps += 1
        self._compared = []
        if is_due(self._steps, FIRST_STEPS, PERIOD):
            self._compared = [p for p in self._trained if _is_dense(p.grad)][:MAX_TENSORS]
            self._gradients = _sample([p.grad for p in self._compared])
            self._values = _sample(self._compared)

    def before_step(self) -> None:
        """Record the factor of the gradients at the beginning of an optimizer step."""
        if self._compared and all(_is_dense(p.grad) for p in self._compared):
            scaled = _sample([p.grad for p in self._compared])
            factors = training_record().of_stage.gradient_factors
            factors.append(_find_common_factor(self._gradients, scaled))
        self._compared = []

    def before_call(self) -> None:
        """Record the factor of an update without an optimizer, before a training step."""
        if self._compared:
            update = _sample(self._compared) - self._values
            factors = training_record().of_stage.update_factors
            factors.append(_find_common_factor(self._gradients, update))
        self._compared = []


@cache
def manual_updates() -> WeakKeyDictionary[nn.Module, ManualUpdates]:
    """Return the `ManualUpdates` of each planned model in pipeline stages of this process."""
    return WeakKeyDictionary()


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided


def _sample(tensors: Sequence[Tensor | None]) -> Tensor:
    local = [detached_local(tensor) for tensor in tensors if tensor is not None]
    samples = [tensor.flatten()[:MAX_ELEMENTS].double() for tensor in local]
    return torch.cat(samples).cpu() if samples else torch.empty(0, dtype=torch.float64)


def _find_common_factor(gradients: Tensor, multiple: Tensor) -> float:
    """Return the factor by which `multiple` is a multiple of `gradients`; 0 if there is none."""
    square = gradients @ gradients
    factor = multiple @ gradients / square
    remainder = (multiple - factor * gradients).norm()
    # Negated, so that NaN has none.
    if not remainder <= TOLERANCE * multiple.norm():
        return 0.0
    return float(factor)
