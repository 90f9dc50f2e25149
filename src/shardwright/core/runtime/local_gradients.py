"""Scale gradients at inputs and outputs of a model whose ranks pass local batches.

Inside the model gradients are those of the loss of the global batch. Outside, each rank computes
the loss of its local batch, and trains the mean of these losses over all ranks, as under
`DistributedDataParallel`. So the gradient of a local output is divided by the number of local
batches, and the gradient of a local input is multiplied by this number. An output that depends on
no sample, such as a temperature, is equal on all ranks, and the ranks' gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
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


def average_gradients(local: Sequence[Tensor], replicated: Sequence[Tensor]) -> list[Tensor]:
    """Return aliases of outputs, with which gradients of replicated outputs are averaged over all
    ranks.

    Args:
        local: local outputs with a gradient. Ranks reach the backward pass of all outputs together,
            so that a rank whose loss leaves a replicated output out takes part in its average.
        replicated: outputs with a gradient that are equal on all ranks.
    """
    function: Any = _AverageGradientsFunction
    return list(function.apply(len(replicated), *replicated, *local))


class _AverageGradientsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_replicated: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_replicated = num_replicated
        ctx.like = [torch.empty_like(t, device="meta") for t in tensors[:num_replicated]]
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        number, device = ctx.num_replicated, next(g.device for g in gradients if g is not None)
        means = [
            _mean_over_ranks(gradient, like, device)
            for gradient, like in zip(gradients[:number], ctx.like, strict=True)
        ]
        return None, *means, *gradients[number:]


def _mean_over_ranks(gradient: Tensor | None, like: Tensor, device: torch.device) -> Tensor | None:
    """Return the mean of a gradient over all ranks; None if it is None on all of them."""
    flat = torch.zeros(
        like.numel() + 1, device=device, dtype=torch.promote_types(like.dtype, torch.float32)
    )
    if gradient is not None:
        flat[:-1], flat[-1] = gradient.flatten(), 1
    dist.all_reduce(flat)
    if not flat[-1]:
        return None
    return (flat[:-1] / dist.get_world_size()).to(like.dtype).view(like.shape)
