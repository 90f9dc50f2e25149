"""The implementation of `torch.optim.Muon`, whose step is replaced for sharded matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch.optim import _muon

MuonStep = Callable[..., None]
"""Updates parameters by their gradients and momenta, three lists of matrices, with the options of
`Muon` as keywords."""


def orthogonalize(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Tensor:
    """Orthogonalize a full matrix by Newton-Schulz iterations in bfloat16."""
    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, epsilon)


def adjusted_rate(rate: float, adjustment: str | None, shape: Any) -> float:
    """Adjust the learning rate to the full shape of a matrix."""
    return _muon._adjust_lr(rate, adjustment, shape)


def replace_muon_step(step: Callable[..., None]) -> None:
    """Replace the step of all `Muon`s by `step(original, …)`. Permanent for the process; a second
    replacement is ignored."""
    original: Any = _muon._single_tensor_muon
    if not hasattr(original, "is_replacement"):
        replacement: Any = wraps(original)(partial(step, original))
        replacement.is_replacement = True
        _muon._single_tensor_muon = replacement
