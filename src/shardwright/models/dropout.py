"""Dropout in decoders of `transformers`, whose configurations have it only for attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def add_dropout(net: nn.Module, probability: float) -> None:
    """Add dropout to the token embedding and to the output of each residual branch, in place.

    Names of modules and parameters stay, so that checkpoints without dropout can be loaded.

    Args:
        net: a decoder with an MLP in each block, as experts have no module for their output.
        probability: dropout probability.
    """
    # A list, because the loop replaces modules.
    for name, module in list(net.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Embedding):
            setattr(net.get_submodule(parent), attribute, _DropoutEmbedding(module, probability))
        elif isinstance(module, nn.Linear) and attribute in ("o_proj", "down_proj"):
            setattr(net.get_submodule(parent), attribute, _DropoutLinear(module, probability))


class _DropoutEmbedding(nn.Embedding):
    """`embedding` with dropout of its output."""

    def __init__(self, embedding: nn.Embedding, probability: float) -> None:
        # On the meta device, as the existing weight takes the place of the new one.
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = embedding.weight
        self.probability = probability

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), self.probability, self.training)


class _DropoutLinear(nn.Linear):
    """`linear` with dropout of its output, after its bias."""

    def __init__(self, linear: nn.Linear, probability: float) -> None:
        # See `_DropoutEmbedding`.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.probability = probability

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input), self.probability, self.training)
