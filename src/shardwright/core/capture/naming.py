"""Names of operators, derived from the modules that call the operators, and lines of operators in
the user's code."""

from __future__ import annotations

import dis
import linecache
import operator
import os
import re
import sys
import sysconfig
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.fx_nodes import module_path
from shardwright.core.graph.custom_ops import (
    batch_norm_train,
    embedding_bag,
    experts,
    instance_norm_train,
    padded_convolution,
)
from shardwright.core.graph.local_map import is_module_call
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.stack_traces import frames_in_trace
from shardwright.errors import CaptureError, printable

aten = torch.ops.aten

MAIN = (
    experts,
    aten.linear.default,
    aten.matmul.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    padded_convolution,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.embedding.default,
    embedding_bag,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.batch_norm.default,
    batch_norm_train,
    instance_norm_train,
)
"""Operators that may be named like their leaf module, in descending priority."""


def local_operator_name(target: Any) -> str:
    """Return the name of an operator in its module: `linear` for `aten.linear.default`."""
    if isinstance(target, OpOverload):
        return schema_of(target).name.split("::")[-1].strip("_")
    return str(getattr(target, "__name__", target))


def name_operators(graph: fx.Graph, leaves: frozenset[str]) -> dict[fx.Node, str]:
    """Return a unique name for each operator of the graph; `getitem` is not an operator.

    The main operator of a leaf module has the path of the module as its name; so does an operator
    that replaces the children of its module (`experts`, `local_map`). Other operators are named
    `path.operator`, `path.operator_1`, …. The path of a second call is `path@2`. The addition of a
    bias is `<name of the operator>.bias`.

    Args:
        leaves: paths of the modules without children.
    """
    calls: dict[tuple[str, int], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            calls[module_path(node)].append(node)
    names: dict[fx.Node, str] = {}
    used: Counter[str] = Counter()
    for (module, number), nodes in calls.items():
        path = module if number == 1 else f"{module}@{number}"
        # A module with children is more than its main operator, unless that replaces the children.
        is_one_operator = module in leaves or any(
            _replaces_calls_of_children(node.target) for node in nodes
        )
        main = _find_main_operator(nodes) if module and is_one_operator else None
        for node in nodes:
            product = node.meta.get("bias_of")
            if node is main:
                name = path
            # A product precedes its bias in the graph, so it already has a name.
            elif product in names:
                name = f"{names[product]}.bias"
            else:
                name = ".".join(filter(None, (path, local_operator_name(node.target))))
            names[node] = _make_unique_name(name, used)
    return names


def _replaces_calls_of_children(target: object) -> bool:
    """Whether an operator replaces the calls of the children of its module."""
    return target is experts or is_module_call(target)


def _make_unique_name(name: str, used: Counter[str]) -> str:
    """Return `name` if it is unused, otherwise `name` with the next unused number, as in
    `path.add_1`."""
    candidate = name
    # A loop, because `add_1` may itself be the name of a module or of an earlier operator.
    while candidate in used:
        candidate = f"{name}_{used[name]}"
        used[name] += 1
    used[candidate] += 1
    return candidate


def _find_main_operator(nodes: list[fx.Node]) -> fx.Node | None:
    candidates = [node for node in nodes if "bias_of" not in node.meta]
    for target in MAIN:
        for node in candidates:
            if node.target is target:
                return node
    # Other modules, such as activations, are named after the operator that computes their result.
    return candidates[-1] if candidates else None


# With the separator, since `torch` is a prefix of the folder `torchvision` too.
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARIES = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')


def _is_user_file(file: str) -> bool:
    # Generated code has no file: `<string>`, or `<eval_with_key>` of `torch.fx`.
    return not file.startswith((_OURS, _TORCH, "<"))


def is_users_function(file: str) -> bool:
    """Return whether a file is user code, not part of an installed library or of Python."""
    return _is_user_file(file) and not file.startswith(_LIBRARIES)


def _find_user_frame(node: fx.Node) -> tuple[str, int] | None:
    """Return file and line of the innermost user frame in the call stack of an operator."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [(file, int(line)) for file, line in frames if _is_user_file(file)]
    # Stack traces list the outermost frame first.
    return users[-1] if users else None


def source_of(node: fx.Node) -> str:
    """Return the user's line that calls an operator, as `file.py:12`; `""` if unknown."""
    frame = _find_user_frame(node)
    return f"{printable(Path(frame[0]).name, lines=False)}:{frame[1]}" if frame else ""


def _format_line(file: str, line: int) -> str:
    return f"{file}:{line}: `{linecache.getline(file, line).strip()}`"


NO_LINE = "the model"
"""Text that replaces the user's line in an error that was raised outside of user code."""


def line_of(node: fx.Node) -> str:
    """Return the user's line that calls an operator, with its source text, for error messages."""
    frame = _find_user_frame(node)
    return _format_line(*frame) if frame else f"operator {node.target}"


def line_of_error(error: BaseException) -> str:
    """Return the innermost user line in the traceback of an error or of its causes.

    Returns `NO_LINE` if no traceback contains user code.
    """
    cause: BaseException | None = error
    # The error that wraps others was raised by the capture; its causes were raised in `forward`.
    while cause is not None:
        frames = [*traceback.extract_tb(cause.__traceback__), *frames_in_trace(cause)]
        users = [f for f in frames if _is_user_file(f.filename) and f.lineno]
        if users:
            return _format_line(users[-1].filename, users[-1].lineno or 0)
        cause = cause.__cause__ or cause.__context__
    return NO_LINE


def line_of_function(function: Any) -> str:
    """Return the location where a user function is defined, as `(file.py:12)`; `""` for library
    functions."""
    code = getattr(function, "__code__", None)
    if code is None or not _is_user_file(code.co_filename):
        return ""
    return f"({Path(code.co_filename).name}:{code.co_firstlineno})"


class LocatedError(CaptureError):
    """Return a CaptureError whose message begins with the user's line."""


def find_user_frame() -> FrameType | None:
    """Return the innermost frame of user code on the call stack; None if user code is not
    running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def current_line() -> str:
    """Return the innermost user line on the call stack; `""` if user code is not running."""
    frame = find_user_frame()
    return _format_line(frame.f_code.co_filename, frame.f_lineno) if frame else ""


_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL"}
_CHANGES = {"STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR", "STORE_ATTR"}
_METHODS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "next"),
    *("pop", "popitem", "popleft", "put", "remove", "reverse", "rotate", "send", "set"),
    *("setdefault", "sort", "update"),
}


def line_that_changes(codes: Iterable[CodeType], path: str) -> str:
    """Return the first line, in the given functions, that seems to change an object.

    Args:
        path: the object as the user writes it, such as `stats['calls']`.

    Returns:
        The line with its source text; `""` if no line seems to change the object.
    """
    lines: dict[tuple[str, int], list[dis.Instruction]] = defaultdict(list)
    for code in codes:
        # `__init__` creates the attributes; what changes them in each call is elsewhere.
        if _is_user_file(code.co_filename) and code.co_name != "__init__":
            for instruction in dis.get_instructions(code):
                position = instruction.positions
                if position is not None and position.lineno is not None:
                    lines[code.co_filename, position.lineno].append(instruction)
    # The innermost name first: of `stats['calls']` that is `calls`, then `stats`.
    for name in reversed(re.findall(r"[A-Za-z_]\w*", path)):
        # An assignment by name is better evidence than a call of a method such as `update`.
        for seems_to_change in (_assigns_name, _changes_contents):
            for location, instructions in lines.items():
                if seems_to_change(instructions, name):
                    return _format_line(*location)
    return ""


def located(codes: Iterable[CodeType], path: str, message: str) -> CaptureError:
    """Return a CaptureError that begins with the line that changes the object `path`, if that line
    is found."""
    line = line_that_changes(codes, path)
    return LocatedError(f"{line}: {message}") if line else CaptureError(message)


def _assigns_name(instructions: Iterable[dis.Instruction], name: str) -> bool:
    return any(i.opname in _STORES and i.argval == name for i in instructions)


def _changes_contents(instructions: Iterable[dis.Instruction], name: str) -> bool:
    named = {i.argval for i in instructions if isinstance(i.argval, str)}
    # `add_` and other in-place methods of tensors, but not `__len__`.
    in_place = any(each.endswith("_") and not each.endswith("__") for each in named)
    changes = in_place or named & _METHODS or any(i.opname in _CHANGES for i in instructions)
    return name in named and bool(changes)
