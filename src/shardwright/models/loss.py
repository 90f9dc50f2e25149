"""The loss and the weight initialization of a causal language model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""The label of positions that do not contribute to the loss."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the logits of each position against the label of the next.

    The logits of the last position, which has no next one, are computed but ignored, so that the
    sequence length stays divisible.

    Args:
        logits: `[batch, positions, vocabulary]`; the loss is computed in at least single precision.
        labels: `[batch, positions]`, `IGNORED` for positions that do not contribute.
    """
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    scores = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(scores.flatten(0, 1), following.flatten(), ignore_index=IGNORED)


_DEVIATION = 0.02
"""Standard deviation of new weights, as in the published models."""


def draw_weights(net: nn.Module) -> None:
    """Initializes linear layers and embeddings with normal random weights and zero biases."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_DEVIATION)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
