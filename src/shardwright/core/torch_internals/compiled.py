"""What compiled functions do with tensors of subclasses."""

from __future__ import annotations

from torch import Tensor
from torch._dynamo.config import nontraceable_tensor_subclasses


def run_uncompiled_with(kind: type[Tensor]) -> None:
    """Lets compiled functions run as they are written where they get tensors of this class."""
    nontraceable_tensor_subclasses.add(kind)
