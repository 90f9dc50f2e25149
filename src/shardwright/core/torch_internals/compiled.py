"""`torch.compile`: whether it traces the running code, and what it leaves uncompiled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.config import nontraceable_tensor_subclasses
from torch._guards import TracingContext


def is_compiling() -> bool:
    """Whether this thread traces a compiled or exported function.

    `torch.compiler.is_compiling()` is a flag of the process, also set while other threads trace.
    """
    # Dynamo takes both calls of `torch.compiler` for true; it cannot trace `TracingContext`.
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None
    )


def run_uncompiled_with(tensor_class: type[Tensor]) -> None:
    """Make `torch.compile` run functions eagerly if an argument is a `tensor_class`."""
    nontraceable_tensor_subclasses.add(tensor_class)
