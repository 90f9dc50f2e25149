"""The loss of a causal language model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""The label of a position that does not count."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each position's logits against the next position's label.

    The last position has no next one. Its logits are computed and ignored, so that the sequence
    stays divisible.

    Args:
        logits: batch × positions × vocabulary; summed up in single precision at least.
        labels: batch × positions, `IGNORED` where a position does not count.
    """
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    scores = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(scores.flatten(0, 1), following.flatten(), ignore_index=IGNORED)


_DEVIATION = 0.02
"""Standard deviation of new weights, as in the published models."""


def draw_weights(net: nn.Module) -> None:
    """Draws the weights of linear layers and embeddings; biases start at zero."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_DEVIATION)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
