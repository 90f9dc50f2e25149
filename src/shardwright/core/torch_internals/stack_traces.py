"""Record the source lines of functions that a `forward` calls, such as a loss function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any
from unittest.mock import patch

import torch.export
from torch.fx.proxy import TracerBase


@contextmanager
def innermost_frames_recorded(is_users: Callable[[str], bool]) -> Iterator[None]:
    """Context in which `torch.export` records the user's innermost frame for each operator.

    By default `torch.export` records the frames of functions called `forward` only.

    Args:
        is_users: function that returns whether a file name is of the user's code.
    """
    filter_frames = TracerBase._filter_traceback_frames

    def with_innermost(tracer: Any, summary: StackSummary) -> StackSummary:
        frames = filter_frames(tracer, summary)
        # From the innermost frame outwards, which is the last of a summary.
        for frame in reversed(summary):
            if frame.filename == torch.export.__file__:
                break  # Frames further out call the model, or this package.
            if is_users(frame.filename):
                others = (each for each in frames if each is not frame)
                return StackSummary.from_list([*others, frame])
        return frames

    with patch.object(TracerBase, "_filter_traceback_frames", with_innermost):
        yield
