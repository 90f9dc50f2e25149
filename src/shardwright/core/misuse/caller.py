"""Find the line of the user's program that called a library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch.optim import Optimizer

LIBRARIES = frozenset(
    {
        *("accelerate", "lightning", "peft", "safetensors", "shardwright", "torch", "transformers"),
        *("typing_extensions", *sys.stdlib_module_names),
    }
)
"""Packages whose frames are not the user's code."""


def user_line() -> str:
    """Return the innermost calling line outside of `LIBRARIES` as ` (file:line)`, or ""."""
    for frame in _iterate_caller_frames():
        if _get_frame_module_name(frame).partition(".")[0] not in LIBRARIES:
            return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
    return ""


def is_called_by(*modules: str) -> bool:
    """Whether a function of `modules`, packages or modules, is on the call stack."""
    # With a dot at the end, so that `torch` does not match `torchvision`.
    names = tuple(f"{module}." for module in modules)
    return any(
        f"{_get_frame_module_name(frame)}.".startswith(names) for frame in _iterate_caller_frames()
    )


def optimizer_among_callers() -> Optimizer | None:
    """Return the optimizer whose method is innermost on the call stack, or None."""
    for frame in _iterate_caller_frames():
        # The first local variable of a method is its `self`.
        variables = frame.f_code.co_varnames
        if variables and isinstance(first := frame.f_locals.get(variables[0]), Optimizer):
            return first
    return None


def _iterate_caller_frames() -> Iterator[FrameType]:
    # Not `inspect.stack`, which reads the source files of all frames.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _get_frame_module_name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
