"""Guards that TorchDynamo builds on the Python state that a captured call has read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

_GUARD_TEXT = re.compile(r"(.*?)\s+# (.*?)\s+# (?:.*/)?([^/]+:\d+) in \S+")
_LOCAL_VARIABLE = re.compile(r"L\['(\w+)'\]")


@dataclass(frozen=True, eq=False)
class Guards:
    """Guards on the Python state that a captured call has read.

    Args:
        scope: function that returns the arguments and closure variables of a call, by name.
        global_variables: global variables of the captured function.
        manager: Dynamo's guards.
        constants: values of Python numbers at capture, by Dynamo source.
        inputs: Dynamo sources of Python numbers that are inputs of the graph.
    """

    scope: Callable[..., Any]
    global_variables: dict[str, Any]
    manager: Any
    constants: Mapping[str, Any]
    inputs: frozenset[str]

    def hold(self, owner: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether all guards hold for a call, so that the captured graph is valid."""
        scope = self.scope(owner, args, kwargs)
        if not self.manager.guard_manager.check(scope):
            return False
        return self.unequal_to_guards(scope) is None

    def first_failing_guard(
        self, owner: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        """Return the first guard that fails for a call, as Python code, and the user's line;
        empty if all guards hold."""
        scope = self.scope(owner, args, kwargs)
        checks = self.manager.guard_manager.check_verbose(scope).verbose_code_parts
        if checks:
            return _describe_guard(str(checks[0]))
        source = self.unequal_to_guards(scope)
        return "" if source is None else _describe_guard(f"{source} == {self.constants[source]}")

    def changed_numbers(
        self, owner: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> frozenset[str]:
        """Return the Dynamo sources of Python numbers whose value, but not type, has changed since
        capture."""
        scope = self.names(self.scope(owner, args, kwargs))
        current = {source: evaluate_dynamo_source(source, scope) for source in self.constants}
        return frozenset(
            source
            for source, value in self.constants.items()
            if type(current[source]) is type(value)
            and (current[source] != value or _is_zero_of_other_sign(current[source], value))
        )

    def names(self, scope: Any) -> dict[str, Any]:
        """Return the local and global variables of a call under the names of Dynamo's sources."""
        return {"L": scope, "G": self.global_variables}

    @cached_property
    def compared_numbers(self) -> dict[str, tuple[float, CodeType]]:
        """The numbers that `unequal_to_guards` compares: value at capture and compiled source."""
        return {
            source: (value, compile(source, "<source>", "eval"))
            for source, value in self.constants.items()
            if (isinstance(value, float) and not value)
            or (source in self.inputs and isinstance(value, int) and not _exceeds_int64(value))
        }

    def unequal_to_guards(self, scope: Any) -> str | None:
        """Return the source of the first number for which Dynamo's guards hold, but the program is
        not valid; None if there is no such number.

        Guards compare numbers by `==`, but 0.0 and -0.0 differ. An operator reads an input as
        int64; a number that is larger at capture is read by Python code only.
        """
        if not self.compared_numbers:
            return None
        names = self.names(scope)
        for source, (value, code) in self.compared_numbers.items():
            number = evaluate_dynamo_source(code, names)
            if _is_zero_of_other_sign(number, value) or _exceeds_int64(number):
                return source
        return None


def _is_zero_of_other_sign(number: Any, value: float) -> bool:
    if not isinstance(number, float) or number or value:
        return False
    return math.copysign(1.0, number) != math.copysign(1.0, value)


def _exceeds_int64(number: Any) -> bool:
    return isinstance(number, int) and not -(2**63) <= number < 2**63


def _describe_guard(text: str) -> str:
    """Return a guard in the form `self.steps == 7` (train.py:12: `self.steps += 1`).

    Args:
        text: the guard as Dynamo prints it: its code, the user's line, and the last characters of
            the path of the user's file.
    """
    match = _GUARD_TEXT.fullmatch(text.strip())
    code, line, file = match.groups() if match else (text.strip(), "", "")
    code = _LOCAL_VARIABLE.sub(r"\1", code)
    return f"`{code}` ({file}: `{line}`)" if match else f"`{code}`"


def evaluate_dynamo_source(source: str | CodeType, scope: Mapping[str, Any]) -> Any:
    """Evaluate a Dynamo source such as `L["self"].scale`; None if evaluation raises."""
    try:
        # A copy, as `eval` adds `__builtins__` to the dictionary.
        return eval(source, dict(scope))
    # Attributes may be missing by now, and properties of the user raise anything.
    except Exception:
        return None
