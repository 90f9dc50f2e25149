"""New weights of the modules of this package; `transformers` draws its own in the same way."""

from __future__ import annotations

from torch import nn

_DEVIATION = 0.02
"""Standard deviation of new weights, as in the published models."""


def draw_weights(net: nn.Module) -> None:
    """Draws the weights of linear layers and embeddings; biases start at zero."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_DEVIATION)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
