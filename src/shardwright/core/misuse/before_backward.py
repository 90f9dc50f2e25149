"""Reject derivatives of a planned model that are not computed by an ordinary backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.runtime.counted_calls import begin_backward
from shardwright.core.torch_internals.dispatch import in_backward_pass, in_transform
from shardwright.errors import PlanError


def refuse_transforms() -> None:
    """Reject a call under transforms: `torch.func`, forward-mode AD or `torch.jit.trace`.

    Raises:
        PlanError: if a transform is active.
    """
    if in_transform():
        raise PlanError(
            "a planned model was called under a transform of `torch.func` (`vmap`, `grad`, ...),"
            " forward-mode AD or `torch.jit.trace`, but its collectives support only one ordinary"
            " backward pass\n"
            "call the model inside `with sw.whole(net):`, or plan for one device"
        )


def refuse_other_draws() -> None:
    """Reject a call of a model with random operators in a backward pass.

    `torch.utils.checkpoint` around the model recomputes the model by a call in the backward pass,
    which would draw other random numbers than the forward pass.

    Raises:
        PlanError: if a backward pass is running.
    """
    if in_backward_pass():
        raise PlanError(
            "a backward pass recomputes a planned model, which would draw other random numbers"
            " than the forward pass\n"
            "remove `torch.utils.checkpoint` around the model, and mark modules to recompute with"
            " `sw.recompute` before `sw.plan`"
        )


def before_backward(outputs: Iterable[Any], checks: Iterable[Callable[[], None]]) -> None:
    """Register hooks on `outputs`, which run before the backward pass of the program communicates.

    The hooks reject `create_graph=True`, as the program's collectives are differentiable only once,
    and anomaly mode. The hooks also call `checks`, and convert a gradient that is a DTensor, e.g.
    from a penalty on parameters, to a full tensor.

    Args:
        outputs: the outputs of the program.
        checks: functions that raise an error if the backward pass must not run, called in order.
    """

    def enter(gradient: Tensor) -> Tensor | None:
        # Autograd enables gradients in a backward pass only for `create_graph=True`.
        if torch.is_grad_enabled():
            raise PlanError(
                "gradients of gradients (`create_graph=True`), as of a gradient penalty, are not"
                " supported on several devices\n"
                "compute them in `forward` (`torch.autograd.grad(..., create_graph=True)`, then"
                " the penalty as a part of the loss that it returns), or plan for one device"
            )
        # Its check for NaN would read pending results of collectives, which the program passes on
        # as gradients.
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise PlanError(
                "`torch.autograd.set_detect_anomaly` is not supported on several devices\n"
                "remove it, pass `check_nan=False`, or plan for one device; `train.non_finite`"
                " finds the operator that computes the first NaN or infinity"
            )
        # Before the first collective of the backward pass, so that a rank that runs it alone is
        # found.
        begin_backward()
        for check in checks:
            check()
        return gradient.full_tensor() if isinstance(gradient, DTensor) else None

    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(enter)  # type: ignore[no-untyped-call]
