"""Name the redistribution in which communication failed or timed out.

The generated source of a program names each redistribution and the operator that reads its result.
The source line is in the traceback of an error or, in the backward pass, in the autograd context.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from traceback import walk_tb
from types import FrameType

from shardwright.core.partition.parameter_buckets import Bucket
from shardwright.core.torch_internals.compiled import is_compiling
from shardwright.errors import CommunicationError

PROGRAM = "<program>"
"""File name of compiled programs, by which their stack frames are recognized."""

SOURCE_VARIABLE = "__program__"
"""Name of the global variable that holds the generated source of a compiled program."""

MAX_NAMES = 4
"""Maximum number of a bucket's parameters that an error lists."""

MAX_LINE_LENGTH = 120
"""Maximum number of characters of a program line in an error."""

MAX_FRAMES = 6
"""Maximum number of stack frames from `program_line` to the program that called it."""


@dataclass(frozen=True)
class ProgramLine:
    """A line of the generated source of a program.

    Args:
        source: the generated source of the program.
        line: the number of the line in `source`, from 1.
    """

    source: str
    line: int

    def __str__(self) -> str:
        lines = [line.strip() for line in self.source.splitlines()]
        # Without the `del` that frees variables after their last use.
        shown = shorten(
            lines[self.line - 1].partition("; del ")[0], MAX_LINE_LENGTH, placeholder=" …"
        )
        return (
            f"`{shown}` (line {self.line} of the program{self._describe_operator_of_line(lines)})"
        )

    @property
    def computes(self) -> bool:
        """Whether the line calls an operator: the comment above it names one, not a bucket."""
        # Lowering writes the name of an operator, or the number of a bucket, above each line.
        above = self.source.splitlines()[self.line - 2].strip()
        return above.startswith("# ") and not above.startswith("# bucket ")

    def _describe_operator_of_line(self, lines: list[str]) -> str:
        """Return the operator of this line; for a redistribution, the operator that reads its
        result.

        Args:
            lines: the stripped lines of the program.
        """
        first = self.line - 2
        started = _STARTED.match(lines[self.line - 1])
        # Other operators stand between the start and the finish, whose consumer comes next.
        if started is not None:
            finish = f"finish_{started[2]}({started[1]})"
            first = next((n for n, line in enumerate(lines) if finish in line), first)
        for line in lines[first:]:
            if line.startswith("# "):
                return f", {re.split('[:;]', line.removeprefix('# '))[0]}"
        return ""


def program_line() -> ProgramLine | None:
    """Return the current line of the calling program; None outside programs and in
    `torch.compile`."""
    if is_compiling():
        return None
    # Not `inspect.stack`, which reads source files: this runs in every redistribution.
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_filename == PROGRAM:
            return ProgramLine(frame.f_globals[SOURCE_VARIABLE], frame.f_lineno)
        frame = frame.f_back
    return None


@contextmanager
def naming_redistributions(call: str = "") -> Iterator[None]:
    """Context that converts errors of collectives to errors that name the redistribution.

    Args:
        call: the user's call that contains the collective, with its line; the error names this call
            if the collective belongs to no redistribution.

    Raises:
        CommunicationError: in place of the collective's own error.
    """
    try:
        yield
    except RuntimeError as error:
        # Pipeline schedules wrap the error of the collective.
        root_cause: BaseException = error
        # The innermost cause has the traceback that leads to the collective.
        while root_cause.__cause__ is not None:
            root_cause = root_cause.__cause__
        description = _describe_failed_collective(root_cause, call)
        if description is None:
            raise
        # Gloo's messages begin with a position in its own source.
        reason = re.sub(r"^\[[^\]]*\] ", "", str(root_cause)).partition("\n")[0]
        raise CommunicationError(
            f"communication failed in {description}, as another rank has ended or does not "
            f"respond: {reason}\nsee the logs of the other ranks for the first error; without one,"
            " make the same calls on all ranks"
        ) from error


def _describe_failed_collective(error: BaseException, call: str) -> str | None:
    """Describe the collective that raised `error`; None if no collective raised it.

    Args:
        call: description of a collective that belongs to no redistribution; empty for the function
            that called `torch.distributed`.
    """
    frames = list(walk_tb(error.__traceback__))
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    # Ranks compare calls outside of programs, so no frame names a redistribution.
    if modules[-1] == _GUARD_MODULE:
        return "the comparison of the ranks' calls"
    if not (
        _COLLECTIVE_MODULES.intersection(modules) or modules[-1].startswith("torch.distributed.")
    ):
        return None
    # A backward pass compares gradients before it enters a program.
    if _GRADIENT_GUARD_MODULE in modules:
        return "the comparison of the ranks' gradients of outputs"
    # From the outermost frame to the innermost: a redistribution, then its bucket.
    descriptions = []
    for frame, line in frames:
        # Autograd's engine calls backward functions from C++, so the program has no frame there.
        call_site = getattr(frame.f_locals.get("ctx"), "call_site", None)
        if isinstance(call_site, ProgramLine) and frame.f_code.co_name == "backward":
            descriptions.append(f"the gradient of {call_site}")
        elif frame.f_code.co_filename == PROGRAM:
            descriptions.append(str(ProgramLine(frame.f_globals[SOURCE_VARIABLE], line)))
        bound = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == _BUCKETS_MODULE and bound is not None:
            descriptions.append(_describe_bucket(bound.bucket))
    if not descriptions and _STAGE_MODULES.intersection(modules):
        descriptions = ["an exchange between pipeline stages"]
    # Other errors of torch.distributed, such as a wrong argument, are not communication failures.
    if not descriptions and PEER_FAILURE.search(str(error)):
        descriptions = [call or _describe_caller_of_collective(frames)]
    # Without duplicates: methods of a bucket that call each other have a frame each.
    return ", ".join(dict.fromkeys(descriptions)) or None


def _describe_caller_of_collective(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Describe the innermost function outside PyTorch that called `torch.distributed`."""
    for frame, line in reversed(frames):
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if module.startswith("shardwright.core.checkpoint.checkpoint"):
            return "saving or loading a checkpoint"
        if not module.startswith(("torch.", "concurrent.", "shardwright.core.torch_internals.")):
            return f"`{code.co_name}` ({code.co_filename}, line {line})"
    return "a collective"


def _describe_bucket(bucket: Bucket) -> str:
    names = [member.value.name for member in bucket.members]
    shown = ", ".join(names[:MAX_NAMES]) + (" …" if len(names) > MAX_NAMES else "")
    return f"bucket {bucket.number} of {shown}"


_BUCKETS_MODULE = "shardwright.core.runtime.buckets"
_COLLECTIVE_MODULES = {
    "shardwright.core.runtime.collectives",
    "shardwright.core.runtime.overlap",
    _BUCKETS_MODULE,
}
_GUARD_MODULE = "shardwright.core.misuse.batch_guard"
_GRADIENT_GUARD_MODULE = "shardwright.core.misuse.gradient_guard"
_STARTED = re.compile(r"(\w+) = start_([a-z]\w+)\(")
PEER_FAILURE = re.compile("clos|connect|peer|pipe|reset|time(d |-)?out|time limit", re.IGNORECASE)
"""Pattern of errors of gloo and of stores about a process that has ended or does not respond."""
_STAGE_MODULES = {
    "shardwright.core.parallel.pipeline_stage",
    "shardwright.core.parallel.stage_module",
    "shardwright.core.parallel.pipeline_execution",
}
