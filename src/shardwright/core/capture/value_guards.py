"""Value checks that only raise or warn, such as `if labels.max() >= n: raise ValueError`.

Values are unknown during capture, so a program cannot branch on them. If one side of a branch
raises or only warns, the other side is captured. If it only clamps a tensor, both are.
"""

from __future__ import annotations

import ast
import linecache
import logging
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.overrides import TorchFunctionMode

from shardwright.core.capture.clamping_branches import (
    CLAMPING,
    ClampingBranch,
    TakenBranches,
    find_clamping_branches,
)
from shardwright.core.torch_internals.modules import detects_causal_mask
from shardwright.core.torch_internals.operators import assert_tensor

log = logging.getLogger(__name__)

TESTS = (torch.equal, torch.allclose, Tensor.equal, Tensor.allclose, Tensor.__bool__)
"""Functions that convert tensors to a Python bool."""

WARNINGS = {"warn", "warning", "warning_once", "warning_advice", "info", "debug", "print"}
"""Names of functions without an effect on the results of a model."""


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

LEAVES = ast.Return, ast.Break, ast.Continue


class GuardedNumber:
    """Number that `Tensor.item` returns in a value check; its comparisons make the check pass.

    Args:
        passing: result of each comparison.
    """

    def __init__(self, passing: bool) -> None:
        self._passing = passing

    def _passing_result(self, other: object) -> bool:
        return self._passing

    __lt__ = __le__ = __gt__ = __ge__ = _passing_result
    __eq__ = __ne__ = _passing_result
    # A lookup in a dictionary would branch on the value.
    __hash__ = None  # type: ignore[assignment]


class PassedGuards(TorchFunctionMode):
    """Mode in which value checks that only raise or warn are assumed to pass during a trace, and
    branches that only clamp are selected by their conditions."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = TakenBranches()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            self._taken.check_selected()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is assert_tensor and isinstance(args[0], Tensor):
            return None
        if func in TESTS or func is Tensor.item:
            frame = _find_caller(sys._getframe(1))
            if frame is not None and frame.f_code is detects_causal_mask:
                return False  # Attention then reads the mask instead of assuming that it is causal.
            position = frame and _find_source_position(frame, is_jump=func is Tensor.__bool__)
            passing = position and _find_passing_value(position, compared=func is Tensor.item)
            if position and passing is not None:
                log.info("%s:%d is taken to pass, as it only guards", position.file, position.line)
                return GuardedNumber(passing) if func is Tensor.item else passing
            if position and frame and func is Tensor.__bool__:
                taken = self._take_clamping_branch(frame, position, args[0])
                if taken is not None:
                    return taken
        result = func(*args, **(kwargs or {}))
        if func in CLAMPING and (frame := _find_caller(sys._getframe(1))) is not None:
            taken_branch = self._taken.pop(frame.f_code, frame.f_lineno)
            if taken_branch is not None:
                branch, condition = taken_branch
                return branch.select(condition, result, **_bind_clamp(*args, **(kwargs or {})))
        return result

    def _take_clamping_branch(
        self, frame: FrameType, position: _SourcePosition, condition: Tensor
    ) -> bool | None:
        """Return the bool for the condition with which the branch at `position` is taken; None if
        it does not only clamp."""
        for branch in _find_clamping_branches_of_file(position.file):
            if position.is_in(branch.test) and branch.clamps_tensor(frame.f_locals):
                taken = _find_operand_value(branch.test, True, position, compared=False)
                self._taken.take(
                    frame.f_code, branch, condition if taken else condition.logical_not()
                )
                return taken
        return None


class _SourcePosition(NamedTuple):
    """Source position of the running instruction: file, lines and columns."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def is_in(self, node: ast.expr) -> bool:
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        inside: bool = begin <= (self.line, self.column)
        return inside and (self.end_line, self.end_column) <= (end[0] or 0, end[1] or 0)


def _find_caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not a `__torch_function__`."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def _find_source_position(frame: FrameType, is_jump: bool) -> _SourcePosition | None:
    """Return the source position of the expression that a frame evaluates; None if unknown.

    Args:
        is_jump: whether the frame executes a conditional jump, so that the expression belongs to
            the preceding instruction.
    """
    # `co_positions` has an entry for each code unit of 2 bytes, and `f_lasti` is in bytes.
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2 - is_jump, None), ())
    return _make_source_position(frame.f_code.co_filename, position)


def _make_source_position(file: str, position: Sequence[int | None]) -> _SourcePosition | None:
    """Return the position of an instruction in a file; None if it is unknown.

    Args:
        position: as `dis.Positions`; may be empty.
    """
    line, end_line, column, end_column = position or (None,) * 4
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return _SourcePosition(file, line, column, end_line, end_column)


def decide_branch(file: str, positions: Sequence[int | None]) -> bool | None:
    """Return the value of a condition with which a value check passes.

    Args:
        positions: source positions of the condition, as `dis.Positions`.

    Returns:
        None if the condition is not part of a value check.
    """
    position = _make_source_position(file, positions)
    return position and _find_passing_value(position, compared=False)


def _find_passing_value(position: _SourcePosition, compared: bool) -> bool | None:
    """Return the bool for the expression at `position` that makes a value check pass.

    Returns None if the expression is not part of a value check.

    Args:
        compared: whether the expression must be one side of a comparison.
    """
    for test, passing in _find_guards_of_file(position.file):
        if position.is_in(test):
            return _find_operand_value(test, passing, position, compared)
    return None


@lru_cache(maxsize=64)
def _find_guards_of_file(file: str) -> Sequence[tuple[ast.expr, bool]]:
    """Return the value checks of a file: (syntax tree of the condition, bool with which the check
    passes)."""
    tree = _parse_file(file)
    guards = list(_find_guards(tree))
    if file == constraints.__file__:
        # A constraint returns at the first property that a value lacks, and its caller raises.
        guards += [(node.test, False) for node in ast.walk(tree) if isinstance(node, ast.If)]
    return tuple(guards)


@lru_cache(maxsize=64)
def _find_clamping_branches_of_file(file: str) -> Sequence[ClampingBranch]:
    return tuple(find_clamping_branches(_parse_file(file)))


def _bind_clamp(input: Tensor, min: Any = None, max: Any = None) -> dict[str, Any]:
    """Return the arguments of a function that clamps, by name."""
    return {"x": input, "min": min, "max": max}


@lru_cache(maxsize=64)
def _parse_file(file: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    # The file may have been edited after its import.
    except SyntaxError:
        return ast.Module([], [])


def tests_length_for_zero(frame: FrameType | None) -> bool:
    """Whether a frame executes a call of `len` and only reads whether the result is 0, as in
    `if len(rows) == 0`."""
    position = frame and _find_source_position(frame, is_jump=False)
    if not position:
        return False
    for parent in ast.walk(_parse_file(position.file)):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, ast.Call) and _is_length_at(child, position):
                return _tests_for_zero(parent, child)
    return False


def _is_length_at(call: ast.Call, position: _SourcePosition) -> bool:
    is_length = isinstance(call.func, ast.Name) and call.func.id == "len"
    begin, end = (call.lineno, call.col_offset), (call.end_lineno, call.end_col_offset)
    return is_length and (begin, end) == (
        (position.line, position.column),
        (position.end_line, position.end_column),
    )


def _tests_for_zero(parent: ast.AST, call: ast.Call) -> bool:
    if isinstance(parent, (ast.If, ast.While, ast.IfExp)):
        return parent.test is call
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, ast.Not)
    if not isinstance(parent, ast.Compare) or len(parent.ops) > 1:
        return False
    is_left, compare = parent.left is call, _COMPARISONS.get(type(parent.ops[0]))
    other = parent.comparators[0] if is_left else parent.left
    if compare is None or not isinstance(other, ast.Constant) or not isinstance(other.value, int):
        return False
    limit = other.value
    numbers = (n for n in (1, 2, limit - 1, limit, limit + 1, sys.maxsize) if n > 0)
    return len({compare(n, limit) if is_left else compare(limit, n) for n in numbers}) == 1


def _find_guards(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers)
    caught = {id(node) for each in tries for s in each.body for node in ast.walk(s)}
    for node in ast.walk(tree):
        if id(node) in caught:
            continue  # The handler of the error is part of the model.
        if isinstance(node, ast.Assert):
            yield node.test, True
        elif isinstance(node, ast.If) and _only_raises_or_warns(node.body):
            yield node.test, False
        elif isinstance(node, ast.If) and _only_raises_or_warns(node.orelse):
            yield node.test, True


def _only_raises_or_warns(body: Sequence[ast.stmt]) -> bool:
    """Whether a block of statements ends with `raise`, or only warns, logs or prints."""
    if body and isinstance(body[-1], ast.Raise):
        # A `return` or `break` ahead of the `raise` is a result of the model.
        return not any(isinstance(node, LEAVES) for s in body for node in ast.walk(s))
    return bool(body) and all(
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).rpartition(".")[2] in WARNINGS
        for statement in body
    )


def _find_operand_value(
    test: ast.expr, passing: bool, at: _SourcePosition, compared: bool
) -> bool | None:
    """Return the bool for one operand that makes a condition equal to `passing`.

    Args:
        test: syntax tree of the condition.
        passing: bool of the condition with which the check passes.
        at: source position of the operand.
        compared: whether the operand must be one side of a comparison.

    Returns:
        None if the condition has no operand at this position.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _find_operand_value(test.operand, not passing, at, compared)
    if isinstance(test, ast.BoolOp):
        # With each operand equal to `passing`, both `and` and `or` are `passing`.
        inside = next((value for value in test.values if at.is_in(value)), None)
        return None if inside is None else _find_operand_value(inside, passing, at, compared)
    if compared:
        # `GuardedNumber` can only be compared, so `item()` must be a side by itself.
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
        return passing if any(at.is_in(s) and isinstance(s, ast.Call) for s in sides) else None
    return passing
