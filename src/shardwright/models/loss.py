"""Loss and weight initialization of causal language models."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""Label of positions that the loss ignores, PyTorch's default `ignore_index`."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross entropy of each position's logits and the next position's label.

    Args:
        logits: `[batch, positions, vocabulary]`; the loss is computed in at least float32.
        labels: `[batch, positions]`, `IGNORED` for positions that do not contribute.
    """
    # Padding the labels, instead of dropping the logits of the last position, keeps the sequence
    # length divisible by the number of shards.
    next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    # The sum of exponentials over the vocabulary loses digits in 16 bits.
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(logits.flatten(0, 1), next_labels.flatten(), ignore_index=IGNORED)


_INIT_STD = 0.02
"""Standard deviation of initial weights, as in the published models."""


def draw_weights(net: nn.Module) -> None:
    """Initialize linear layers and embeddings: weights from a normal distribution, zero biases."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
