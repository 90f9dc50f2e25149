"""Replacements for PyTorch functions that branch on values of tensors, without such branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.core.capture.ctc import static_ctc_loss
from shardwright.core.capture.flex_attention import FLEX_ATTENTION, static_flex_attention
from shardwright.core.torch_internals.operators import pack_padded_sequence
from shardwright.errors import CaptureError


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Compute `torch.bincount` for numbers below `minlength`; `scatter_add` raises an error for
    larger numbers.

    Returns:
        Counts `[minlength]`.
    """
    # Without `minlength` the number of counts depends on values, which the trace refuses.
    if minlength < 1 or input.ndim != 1:
        return torch.bincount(input, weights, minlength)
    # The dtypes of `torch.bincount`: float32 weights stay, and others are added up in float64.
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    zeros = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    return zeros.scatter_add(0, input.long(), weights)


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute `torch.nn.functional.gaussian_nll_loss` without its check for negative variances."""
    rows = input.shape[:-1]
    # PyTorch takes or refuses the other forms.
    if not isinstance(var, Tensor) or var.shape not in (input.shape, rows, (*rows, 1)):
        return functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape and var.shape == rows:
        var = var.unsqueeze(-1)
    # As in PyTorch, clamping changes the value of `var` but not its gradient.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * log(2 * pi) if full else 0.0)
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Compute `torch.cov` without its warning about too few degrees of freedom."""
    weighted = fweights is not None or aweights is not None
    # PyTorch checks the values of weights, and raises the errors.
    if weighted or input.ndim > 2 or not (input.is_floating_point() or input.is_complex()):
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    rows = rows - rows.mean(1, keepdim=True)
    return (rows @ rows.t().conj() / max(rows.shape[1] - correction, 0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Compute `torch.corrcoef` by `cov`, without branches on values."""
    products = cov(input)
    if input.is_complex() or products.ndim < 2:
        return torch.corrcoef(input)
    deviations = products.diag().sqrt()
    # Clipped as in PyTorch, because rounding may exceed 1.
    return (products / deviations[:, None] / deviations).clip(-1, 1)


def refuse_packing(*_: Any) -> Tensor:
    """Reject `pack_padded_sequence`, whose result has a size that depends on values.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        "`pack_padded_sequence` returns a tensor whose size depends on the lengths, which are"
        " unknown during capture\npass the padded sequences to the recurrent layer, select the last"
        " output of each sequence by `gather`, and mask the padding in the loss"
    )


STATIC: Mapping[Any, Callable[..., Any]] = {
    FLEX_ATTENTION: static_flex_attention,
    torch.bincount: bincount,
    Tensor.bincount: bincount,
    pack_padded_sequence: refuse_packing,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
    functional.ctc_loss: static_ctc_loss,
    functional.gaussian_nll_loss: gaussian_nll_loss,
}
