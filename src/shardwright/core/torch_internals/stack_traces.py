"""The user's frames that `torch.fx` records for each operator, and TorchDynamo in its errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.export
import torch.fx.proxy
from torch.fx.proxy import TracerBase


class _UserFrames:
    """Replacement for `CapturedTraceback` that reads only the frames that are recorded.

    `torch.fx` symbolizes all frames of the stack for each operator, about a hundred in
    `torch.export`, and then drops nearly all: about a tenth of the time of an export.

    Args:
        is_users: function that returns whether a file name is of the user's code.
    """

    def __init__(self, is_users: Callable[[str], bool]) -> None:
        # Called for each frame of each operator.
        self.is_users = cache(is_users)

    def extract(self) -> _UserFrames:
        return self

    def summary(self) -> StackSummary:
        """Return the frames of functions called `forward`, outermost first, then the innermost
        frame of the user's code."""
        frames: list[FrameSummary] = []
        innermost: FrameSummary | None = None
        frame: FrameType | None = inspect.currentframe()
        # Frames further out call the model, or this package.
        while frame is not None and frame.f_code.co_filename != torch.export.__file__:
            code, line = frame.f_code, frame.f_lineno
            if innermost is None and self.is_users(code.co_filename):
                innermost = FrameSummary(code.co_filename, line, code.co_name)
            elif code.co_name == "forward":
                frames.append(FrameSummary(code.co_filename, line, code.co_name))
            frame = frame.f_back
        frames.reverse()
        return StackSummary.from_list([*frames, *([innermost] if innermost else ())])


@contextmanager
def innermost_frames_recorded(is_users: Callable[[str], bool]) -> Iterator[None]:
    """Context in which `torch.export` records the user's innermost frame for each operator.

    By default `torch.export` records the frames of functions called `forward` only.

    Args:
        is_users: function that returns whether a file name is of the user's code.
    """

    def all_frames(tracer: Any, summary: StackSummary) -> StackSummary:
        return summary

    with (
        patch.object(torch.fx.proxy, "CapturedTraceback", _UserFrames(is_users)),
        patch.object(TracerBase, TracerBase._filter_traceback_frames.__name__, all_frames),
    ):
        yield


def frames_in_trace(error: BaseException) -> Sequence[FrameSummary]:
    """Return the frames that TorchDynamo was tracing when it raised `error`, outermost first; empty
    for other errors. They are not in the traceback, as Dynamo does not execute them."""
    frames: StackSummary | None = getattr(error, "real_stack", None)
    return frames or ()
