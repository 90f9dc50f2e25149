"""Scale gradients at inputs and outputs of a model whose ranks pass local batches.

Inside the model gradients are those of the loss of the global batch. Outside, each rank computes
the loss of its local batch, and trains the mean of these losses over all ranks, as under
`DistributedDataParallel`. So the gradient of a local output is divided by the number of local
batches, and the gradient of a local input is multiplied by this number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return an alias of `tensor` whose gradient is multiplied by `factor` on its way to `tensor`.

    `tensor` itself is returned if no gradient is recorded or the factor is 1.
    """
    if factor == 1 or not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    scaled: Tensor = _ScaleGradientFunction.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradientFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        # Not a view, which could not be changed in place, but with the version counter of `tensor`.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
