"""What happens where a backward pass enters the program of several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import PlanError


def before_backward(outputs: Iterable[Any], checks: Iterable[Callable[[], None]]) -> None:
    """Calls `checks` where a backward pass enters the program, and lets one with
    `create_graph=True` raise there, before anything is communicated.

    The collectives of a program are differentiable once: what came of a second pass would be wrong.
    """

    def check_single(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise PlanError(
                "a backward pass with create_graph=True: gradients of gradients (a penalty on"
                " gradients) are not supported on several devices; leave them out, or plan for one"
                " device"
            )
        for check in checks:
            check()

    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(check_single)  # type: ignore[no-untyped-call]
