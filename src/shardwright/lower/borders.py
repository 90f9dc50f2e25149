"""Where values cross from one part of a model to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Border(torch.autograd.Function):
    """Passes tensors on as tensors of their own, and their gradients back in one piece each."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.others = len(tensors) - count
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = (None if g is None else g.contiguous() for g in gradients)
        return None, *whole, *(None,) * ctx.others


def border(tensors: Sequence[Tensor], follows: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """The tensors, ready to be sent or received.

    Args:
        follows: what all of them depend on in the eyes of autograd, with no gradient. A backward
            pass in two halves, first of inputs and then of parameters, sees only parameters whose
            results meet what depends on an input; so each result is made to depend on one.
    """
    with_gradient = [tensor for tensor in tensors if tensor.requires_grad]
    passed = iter(())
    if with_gradient:
        passed = iter(_Border.apply(len(with_gradient), *with_gradient, *follows))  # type: ignore[no-untyped-call]
    return tuple((next(passed) if t.requires_grad else t.detach()).contiguous() for t in tensors)
