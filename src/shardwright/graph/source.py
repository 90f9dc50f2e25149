"""The user's line: of an operator in the traced graph, and of an exception."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch
from torch import fx

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, _TORCH, "<"))


def _frame(node: fx.Node) -> tuple[str, int] | None:
    """The innermost frame outside of torch in which the operator was called."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [(file, int(line)) for file, line in frames if _is_users(file)]
    return users[-1] if users else None


def source_of(node: fx.Node) -> str:
    """`file.py:12`, or `""` where it is not known."""
    frame = _frame(node)
    return f"{Path(frame[0]).name}:{frame[1]}" if frame else ""


def _describe(file: str, line: int) -> str:
    return f"{file}:{line}: `{linecache.getline(file, line).strip()}`"


def line_of(node: fx.Node) -> str:
    """Where the user called the operator, with the text of the line, for error messages."""
    frame = _frame(node)
    return _describe(*frame) if frame else f"operator {node.target}"


def line_of_error(error: BaseException) -> str:
    """The user's innermost line in the traceback of an error or of what caused it."""
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        users = [f for f in frames if _is_users(f.filename) and f.lineno]
        if users:
            return _describe(users[-1].filename, users[-1].lineno or 0)
        cause = cause.__cause__ or cause.__context__
    return "the model"
