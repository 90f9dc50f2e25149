"""Reject derivatives of a planned model other than one ordinary backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals.dispatch import in_backward_pass, in_transform
from shardwright.errors import PlanError


def refuse_transforms() -> None:
    """Reject a call under `torch.func` transforms, forward-mode AD or `torch.jit.trace`.

    Raises:
        PlanError: if a transform is active.
    """
    if in_transform():
        raise PlanError(
            "a planned model was called under `vmap`, `grad` or another transform of `torch.func`,"
            " forward-mode AD or `torch.jit.trace`: its collectives have one derivative, in a"
            " backward pass\n"
            "call it inside `with shardwright.whole(net):`, or plan for one device"
        )


def refuse_other_draws() -> None:
    """Reject a call that recomputes a model with random operators in a backward pass.

    `torch.utils.checkpoint` around the model makes such calls.

    Raises:
        PlanError: if a backward pass is running: the call would draw other random numbers than
            the forward pass.
    """
    if in_backward_pass():
        raise PlanError(
            "a backward pass recomputes a planned model, which would draw other random numbers"
            " than the forward pass\n"
            "leave out `torch.utils.checkpoint` around it, and mark the modules to recompute with"
            " `shardwright.recompute` before `plan`"
        )


def before_backward(outputs: Iterable[Any], checks: Iterable[Callable[[], None]]) -> None:
    """Register hooks that run where a backward pass enters the program, before communication.

    The hooks reject `create_graph=True` and anomaly mode and call `checks`. The program's
    collectives are differentiable only once: a second derivative would be wrong. A gradient that
    is a DTensor, such as that of a penalty on parameters, is converted to a full tensor.

    Args:
        outputs: the outputs of the program.
        checks: functions that raise an error if the backward pass must not run, called in order.
    """

    def enter(gradient: Tensor) -> Tensor | None:
        if torch.is_grad_enabled():
            raise PlanError(
                "a backward pass with create_graph=True: gradients of gradients (a penalty on"
                " gradients) are not supported on several devices\n"
                "leave them out, or plan for one device"
            )
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise PlanError(
                "`torch.autograd.set_detect_anomaly` is not supported on several devices\n"
                "leave it out, pass `check_nan=False`, or plan for one device; `train.non_finite`"
                " finds the operator of a number that is not finite"
            )
        for check in checks:
            check()
        return gradient.full_tensor() if isinstance(gradient, DTensor) else None

    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(enter)  # type: ignore[no-untyped-call]
