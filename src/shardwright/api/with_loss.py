"""A model and its loss as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class WithLoss(nn.Module):
    """A model and its loss as one module: `forward(x, y) = loss_fn(net(x), y)`."""

    def __init__(self, net: nn.Module, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss_fn = loss_fn

    def forward(self, x: Any, y: Any) -> Tensor:
        return self.loss_fn(self.net(x), y)
