"""Tests of values on which only an error or a warning depends, as `if labels.max() >= n: raise`.

Values are unknown during capture, so a program cannot branch on them. Where one side of a branch
raises, the captured model is the other side.
"""

from __future__ import annotations

import ast
import linecache
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.core.torch_internals.modules import detects_causal_mask
from shardwright.core.torch_internals.operators import assert_tensor

log = logging.getLogger(__name__)

TESTS = (torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, Tensor.__bool__)
"""What gives a Python truth value of tensors."""

WARNINGS = {"warn", "warning", "warning_once", "warning_advice", "info", "debug", "print"}
"""Functions without an effect on what a model computes."""


LEAVES = ast.Return, ast.Break, ast.Continue


class GuardedNumber:
    """The value of a tensor that is compared in a guard: each comparison gives what the guard needs
    to pass."""

    def __init__(self, passing: bool) -> None:
        self._passing = passing

    def _compared(self, other: object) -> bool:
        return self._passing

    __lt__ = __le__ = __gt__ = __ge__ = _compared
    __eq__ = __ne__ = _compared
    __hash__ = None  # type: ignore[assignment]


class PassedGuards(TorchFunctionMode):
    """Lets value checks whose only effect is to raise pass while a model is traced."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is assert_tensor and isinstance(args[0], Tensor):
            return None
        if func in TESTS or func is Tensor.item:
            frame = _caller(sys._getframe(1))
            if frame is not None and frame.f_code is detects_causal_mask:
                return False  # Then the mask itself is read.
            place = frame and _position(frame, is_jump=func is Tensor.__bool__)
            passing = place and _passing(place, compared=func is Tensor.item)
            if place and passing is not None:
                log.info("%s:%d is taken to pass, as it only guards", place.file, place.line)
                return GuardedNumber(passing) if func is Tensor.item else passing
        return func(*args, **(kwargs or {}))


class _Position(NamedTuple):
    """Where the running instruction is in its file."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def is_in(self, node: ast.expr) -> bool:
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        inside: bool = begin <= (self.line, self.column)
        return inside and (self.end_line, self.end_column) <= (end[0] or 0, end[1] or 0)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside of modes for functions."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def _position(frame: FrameType, is_jump: bool) -> _Position | None:
    """Of what a frame computes.

    Args:
        is_jump: whether it jumps on a value, which the instruction before has computed.
    """
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2 - is_jump, None), ())
    line, end_line, column, end_column = position or (None,) * 4
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return _Position(frame.f_code.co_filename, line, column, end_line, end_column)


def _passing(place: _Position, compared: bool) -> bool | None:
    """What a test at `place` must give for its guard to pass; None if it guards nothing.

    Args:
        compared: whether the place must be one side of a comparison.
    """
    for test, passing in _guards(place.file):
        if place.is_in(test):
            return _operand(test, passing, place, compared)
    return None


@lru_cache(maxsize=64)
def _guards(file: str) -> Sequence[tuple[ast.expr, bool]]:
    """The conditions of a file on which only an error or a warning depends, and when there is
    none."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(_guards_in(tree))


def _guards_in(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers)
    caught = {id(node) for each in tries for s in each.body for node in ast.walk(s)}
    for node in ast.walk(tree):
        if id(node) in caught:
            continue  # What follows the error is part of the model.
        if isinstance(node, ast.Assert):
            yield node.test, True
        elif isinstance(node, ast.If) and _only_complains(node.body):
            yield node.test, False
        elif isinstance(node, ast.If) and _only_complains(node.orelse):
            yield node.test, True


def _only_complains(body: Sequence[ast.stmt]) -> bool:
    """Whether statements end in an error, or are warnings."""
    if body and isinstance(body[-1], ast.Raise):
        return not any(isinstance(node, LEAVES) for s in body for node in ast.walk(s))
    return bool(body) and all(
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).rpartition(".")[2] in WARNINGS
        for statement in body
    )


def _operand(test: ast.expr, passing: bool, place: _Position, compared: bool) -> bool | None:
    """What the operand of `test` at `place` must give for all of it to be `passing`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operand(test.operand, not passing, place, compared)
    if isinstance(test, ast.BoolOp):
        inside = next((value for value in test.values if place.is_in(value)), None)
        return None if inside is None else _operand(inside, passing, place, compared)
    if compared:
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
        return passing if any(place.is_in(s) and isinstance(s, ast.Call) for s in sides) else None
    return passing
