"""Exclude tensor subclasses from `torch.compile`."""

from __future__ import annotations

from torch import Tensor
from torch._dynamo.config import nontraceable_tensor_subclasses


def run_uncompiled_with(tensor_class: type[Tensor]) -> None:
    """Make `torch.compile` run functions eagerly if an argument is a `tensor_class`."""
    nontraceable_tensor_subclasses.add(tensor_class)
