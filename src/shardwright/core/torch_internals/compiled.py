"""Detect whether `torch.compile` traces the running code."""

from __future__ import annotations

import torch
from torch._guards import TracingContext


def is_compiling() -> bool:
    """Whether this thread traces a compiled or exported function.

    `torch.compiler.is_compiling()` is a flag of the process, also set while other threads trace.
    """
    # Dynamo takes both calls of `torch.compiler` for true; it cannot trace `TracingContext`.
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None
    )
