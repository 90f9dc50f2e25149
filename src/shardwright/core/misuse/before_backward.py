"""Which backward passes the program of several devices has, and what happens where one enters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals.dispatch import in_backward_pass, in_transform
from shardwright.errors import PlanError


def refuse_transforms() -> None:
    """Raises:
    PlanError: if a program would be called where other derivatives are taken than by a backward
        pass.
    """
    if in_transform():
        raise PlanError(
            "a planned model was called by `vmap`, `grad` or another transform of `torch.func`, in"
            " forward mode or by `torch.jit.trace`: its collectives have one derivative, in a"
            " backward pass; call it inside `with shardwright.whole(net):`, or plan for one device"
        )


def refuse_other_draws() -> None:
    """Raises:
    PlanError: if a backward pass calls, to compute again what has drawn random numbers.
    """
    if in_backward_pass():
        raise PlanError(
            "a backward pass computes a planned model again, which would draw other random numbers"
            " than before: leave out `torch.utils.checkpoint` around it, and mark what is to be"
            " recomputed by `shardwright.recompute` before `plan`"
        )


def before_backward(outputs: Iterable[Any], checks: Iterable[Callable[[], None]]) -> None:
    """Calls `checks` where a backward pass enters the program, and lets one with
    `create_graph=True`, or that looks for anomalies, raise there, before anything is communicated.

    The collectives of a program are differentiable once: what came of a second pass would be wrong.
    A gradient that is a DTensor, as one from a penalty on parameters, becomes the tensor that the
    program returned.
    """

    def enter(gradient: Tensor) -> Tensor | None:
        if torch.is_grad_enabled():
            raise PlanError(
                "a backward pass with create_graph=True: gradients of gradients (a penalty on"
                " gradients) are not supported on several devices; leave them out, or plan for one"
                " device"
            )
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise PlanError(
                "`torch.autograd.set_detect_anomaly` cannot look into gradients of several devices:"
                " leave it out, pass `check_nan=False`, or plan for one device; `train.non_finite`"
                " finds the operator of a number that is not finite"
            )
        for check in checks:
            check()
        return gradient.full_tensor() if isinstance(gradient, DTensor) else None

    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(enter)  # type: ignore[no-untyped-call]
