"""Find the user's line at which a thread waits, and the exception that ends the process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import shorten
from types import FrameType

from shardwright.core.runtime.collective_errors import PROGRAM
from shardwright.core.torch_internals.distributed import has_all_ranks

WORLD_COLLECTIVES = {
    *("barrier", "monitored_barrier", "all_reduce", "reduce", "broadcast", "all_gather"),
    *("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "all_gather_object", "broadcast_object_list"),
}
"""Functions of `torch.distributed` in which every rank of a group waits for the others."""

LIBRARIES = re.compile(r"(torch|shardwright|contextlib|functools|threading|runpy|importlib)\b")
"""Pattern of names of library modules, whose stack frames are skipped to find the user's."""


def waiting_call_and_line(frame: FrameType | None) -> tuple[str, str]:
    """Return the function of `torch.distributed` in which a thread waits for other ranks, and the
    user's line with the call; empty strings if unknown."""
    waits_in = ""
    while frame is not None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module == "torch.distributed.distributed_c10d" and code.co_name in WORLD_COLLECTIVES:
            waits_in = code.co_name if has_all_ranks(frame.f_locals.get("group")) else ""
        elif code.co_filename != PROGRAM and not LIBRARIES.match(module):
            # Generated programs and libraries are skipped: the next frame is the user's.
            return waits_in, f"{Path(code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return waits_in, ""


def last_exception() -> str:
    """Return type and message of the exception that ends this process; empty if the process ends
    without an exception."""
    # The interpreter sets it for an uncaught exception, before exit handlers run.
    error = getattr(sys, "last_value", None)
    message = f"{type(error).__name__}: {error}".partition("\n")[0]
    return shorten(message, 200, placeholder=" …") if error is not None else ""
