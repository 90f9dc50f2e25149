"""Tensor subclasses in compiled functions."""

from __future__ import annotations

from torch import Tensor
from torch._dynamo.config import nontraceable_tensor_subclasses


def run_uncompiled_with(kind: type[Tensor]) -> None:
    """Let `torch.compile` fall back to eager mode for functions of tensors of this class."""
    nontraceable_tensor_subclasses.add(kind)
