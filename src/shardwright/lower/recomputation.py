"""Runs a function and lets the backward pass run it again, instead of keeping what it makes.

PyTorch's `checkpoint` keeps what the function is given. The backward pass runs it once more, up to
the last tensor that autograd needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`. Random operators inside must draw the same numbers by themselves."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_drawing(function: Callable[..., Any], *args: Any) -> Any:
    """Likewise where operators inside draw from PyTorch's own generator: its state is restored."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)
