"""Internals of `torch.optim.Muon`, for a step on sharded matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch.optim import _muon

MuonStep = Callable[..., None]
"""Function that updates parameters in place. Arguments: lists of parameters, gradients and momenta,
all matrices; options of `Muon` as keywords."""


def orthogonalize(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Tensor:
    """Orthogonalize a full matrix by Newton-Schulz iterations in bfloat16.

    Args:
        update: matrix of shape (rows, columns).
        coefficients: coefficients of the quintic polynomial.
        steps: number of iterations.
        epsilon: lower bound of the norm by which `update` is divided.
    """
    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, epsilon)


def adjusted_rate(rate: float, adjustment: str | None, shape: Any) -> float:
    """Adjust the learning rate of `Muon` to the shape of a matrix.

    Args:
        rate: the learning rate.
        adjustment: the option `adjust_lr_fn` of `Muon`.
        shape: shape of the full matrix.
    """
    return _muon._adjust_lr(rate, adjustment, shape)


def replace_muon_step(step: Callable[..., None]) -> None:
    """Replace the update of all `Muon` optimizers. The change is permanent for the process; a
    second replacement is ignored.

    Args:
        step: called with PyTorch's `MuonStep`, followed by the arguments of a `MuonStep`.
    """
    original: Any = _muon._single_tensor_muon
    if not hasattr(original, "is_replacement"):
        replacement: Any = wraps(original)(partial(step, original))
        replacement.is_replacement = True
        # `torch.optim.Muon` looks the function up in its module in each step.
        _muon._single_tensor_muon = replacement
