"""The loss functions that a configuration can name."""

from __future__ import annotations

from torch import Tensor, nn


class MeanAbsoluteError(nn.Module):
    """Mean of |output - target|; a target such as [batch] is compared with outputs [batch, 1]."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.l1_loss(output, target.to(output.dtype).view(output.shape))


class MeanSquaredError(nn.Module):
    """Mean of (output - target)²; a target such as [batch] is compared with outputs [batch, 1]."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.to(output.dtype).view(output.shape))


LOSSES: dict[str, type[nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "mae": MeanAbsoluteError,
    "mse": MeanSquaredError,
}
