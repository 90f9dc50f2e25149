"""What must hold around `torch.export`: no ambient modes, no custom backward, no log lines."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from shardwright.errors import CaptureError


@contextmanager
def isolated() -> Iterator[None]:
    """Captures the same graph whatever modes the caller is in."""
    with (
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        _custom_backward_refused(),
        _quiet(),
    ):
        yield


@contextmanager
def _custom_backward_refused() -> Iterator[None]:
    """Tracing sees the forward of an `autograd.Function` only, so its gradient would be lost.

    Reentrant checkpointing is such a function; what it calls is traced as if called directly.
    """
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        if cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"the autograd function `{cls.__qualname__}` has a backward of its own, which cannot "
            f"be captured. Write it with operators that autograd knows, or as an operator "
            f"(`torch.library.custom_op` with `register_autograd`)."
        )

    setattr(Function, "apply", classmethod(apply))  # noqa: B010
    try:
        yield
    finally:
        setattr(Function, "apply", original)  # noqa: B010


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps away what `torch.export` logs and prints about a failure: pages that hide the error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
