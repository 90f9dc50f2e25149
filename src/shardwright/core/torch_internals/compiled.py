"""Keep tensor subclasses out of compiled functions."""

from __future__ import annotations

from torch import Tensor
from torch._dynamo.config import nontraceable_tensor_subclasses


def run_uncompiled_with(tensor_class: type[Tensor]) -> None:
    """Make `torch.compile` fall back to eager mode for functions of tensors of `tensor_class`."""
    nontraceable_tensor_subclasses.add(tensor_class)
