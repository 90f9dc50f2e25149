"""Refuses gradients of gradients, which programs on several devices do not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import PlanError


def refuse_double_backward(outputs: Iterable[Any]) -> None:
    """Lets a backward pass with `create_graph=True` raise where it enters the program, before
    anything is communicated.

    The collectives of a program are differentiable once: what came of a second pass would be wrong.
    """
    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(_check_single)  # type: ignore[no-untyped-call]


def _check_single(gradient: Tensor) -> None:
    """Raises:
    PlanError: in a backward pass that is itself to be differentiated.
    """
    if torch.is_grad_enabled():
        raise PlanError(
            "a backward pass with create_graph=True: gradients of gradients (a penalty on"
            " gradients) are not supported on several devices; leave them out, or plan for one"
            " device"
        )
