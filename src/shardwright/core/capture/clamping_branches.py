"""Branches on values that only clamp a tensor, such as the guards against overflow in models of
`transformers`:

    if not torch.isfinite(x).all():
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-limit, max=limit)

A trace takes the branch, and the condition selects its result. The condition is not needed if the
limits are those of the dtype: clamping finite numbers then changes nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CaptureError

CLAMPING = (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)

_CLAMPS = re.compile(r"(\w+) = (?:torch\.(?:clamp|clip)\(\1, |\1\.(?:clamp|clip)\()")
_ASSIGNS = re.compile(r"(\w+) = ")
_FUNCTIONS_OF_NUMBERS = {"finfo", "float", "min", "max"}


@dataclass(frozen=True)
class ClampingBranch:
    """An `if` without `else` whose body only clamps one tensor.

    Args:
        name: name of the tensor.
        test: syntax tree of the condition, without earlier operands of `and`, which Python knows.
        lines: lines of the last statement, which clamps.
        tests_finite: whether the tensor is finite if the branch is not taken.
    """

    name: str
    test: ast.expr
    lines: range
    tests_finite: bool

    def clamps_tensor(self, variables: Mapping[str, Any]) -> bool:
        """Whether the branch calls PyTorch's functions, given the variables of its function by
        name: an object of the user's may have a method of the same name."""
        tensor = variables.get(self.name)
        return isinstance(tensor, Tensor) and type(tensor).clamp is Tensor.clamp

    def select(self, condition: Tensor, clamped: Tensor, x: Tensor, min: Any, max: Any) -> Tensor:
        """Return the tensor after the branch.

        Args:
            condition: whether the branch is taken.
            clamped: `x` clamped to `min` and `max`.
        """
        largest = torch.finfo(x.dtype).max if x.is_floating_point() else float("inf")
        below = min is None or (isinstance(min, (int, float)) and min <= -largest)
        above = max is None or (isinstance(max, (int, float)) and max >= largest)
        keeps_finite_numbers = below and above
        if self.tests_finite and keeps_finite_numbers:
            return clamped
        return torch.where(condition, clamped, x)


def find_clamping_branches(tree: ast.AST) -> Iterator[ClampingBranch]:
    """Yield the branches in a syntax tree whose bodies only clamp a tensor."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from _find_branches_of_function(function)


def _find_branches_of_function(function: ast.FunctionDef) -> Iterator[ClampingBranch]:
    branches = [n for n in ast.walk(function) if isinstance(n, ast.If) and _only_clamps(n)]
    inside = {id(n) for each in branches for s in each.body for n in ast.walk(s)}
    names = (n for n in ast.walk(function) if isinstance(n, ast.Name) and id(n) not in inside)
    read_elsewhere = {name.id for name in names}
    for branch in branches:
        *limits, last = branch.body
        # Limits that are read elsewhere would depend on the branch.
        if read_elsewhere.isdisjoint(map(_find_assigned_name, limits)):
            lines = range(last.lineno, (last.end_lineno or last.lineno) + 1)
            name = _find_assigned_name(last)
            test = _last_operand(branch.test)
            yield ClampingBranch(name, test, lines, _tests_finite(test, name))


def _find_assigned_name(statement: ast.stmt) -> str:
    match = _ASSIGNS.match(ast.unparse(statement))
    return match[1] if match else ""


def _only_clamps(branch: ast.If) -> bool:
    """Whether a branch computes limits from numbers, and then clamps a tensor."""
    *limits, last = branch.body
    if branch.orelse or not _CLAMPS.match(ast.unparse(last)):
        return False
    if any(isinstance(n, ast.BoolOp) for n in ast.walk(_last_operand(branch.test))):
        return False
    if not isinstance(last, ast.Assign) or not isinstance(last.value, ast.Call):
        return False
    values = [last.value, *(each.value for each in limits if isinstance(each, ast.Assign))]
    calls = [n for value in values for n in ast.walk(value) if isinstance(n, ast.Call)]
    called = {ast.unparse(each.func).rpartition(".")[2] for each in calls if each is not last.value}
    return called <= _FUNCTIONS_OF_NUMBERS and all(map(_find_assigned_name, limits))


def _last_operand(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return test.values[-1]
    return test


def _tests_finite(test: ast.expr, name: str) -> bool:
    finite = (f"not torch.isfinite({name}).all()", f"torch.isinf({name}).any()")
    return ast.unparse(test) in finite


class TakenBranches:
    """The clamping branches that a trace takes."""

    def __init__(self) -> None:
        self._conditions: dict[CodeType, tuple[ClampingBranch, Tensor]] = {}

    def take(self, code: CodeType, branch: ClampingBranch, condition: Tensor) -> None:
        """Record that a function takes a branch if `condition` is true."""
        self._conditions[code] = branch, condition

    def pop(self, code: CodeType, line: int) -> tuple[ClampingBranch, Tensor] | None:
        """Return the branch, and its condition, that a function takes at a line that clamps."""
        branch, condition = self._conditions.get(code, (None, None))
        if branch is None or condition is None or line not in branch.lines:
            return None
        del self._conditions[code]
        return branch, condition

    def check_selected(self) -> None:
        """Check that each branch has been selected by its condition.

        Raises:
            CaptureError: if a branch was taken, but no function that clamps was called.
        """
        for code, (branch, _) in self._conditions.items():
            raise CaptureError(
                f"{code.co_filename}:{branch.lines.start}: the branch depends on the value of a"
                f" tensor, and does not clamp {branch.name!r} by a function of PyTorch\n"
                "compute both sides, and select the result by `torch.where`"
            )
