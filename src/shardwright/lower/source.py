"""Python source text, line by line: what a program prints is what it runs."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.graph.graph import Value
from shardwright.lower.lines import Line, nested, written
from shardwright.lower.waiting import TEXT

Again = Callable[..., Any]
"""Runs a function with its arguments, and lets the backward pass run it again."""


@dataclass
class Source:
    """A function under construction.

    Args:
        scope: what its text refers to besides its arguments: operators, conversions, constants.
    """

    scope: dict[str, Any] = field(default_factory=lambda: {"torch": torch, "aten": torch.ops.aten})
    lines: list[Line] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def name(self, wanted: str) -> str:
        """A variable name that is not taken: `layers.0.mlp` → `layers_0_mlp`."""
        stem = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        if stem[0].isdigit() or keyword.iskeyword(stem):
            stem = f"_{stem}"
        found, number = stem, 1
        while found in self._taken or found in self.scope:
            found, number = f"{stem}_{number}", number + 1
        self._taken.add(found)
        return found

    def refer(self, wanted: str, thing: Any) -> str:
        """The name under which the text reaches `thing`; one name for one thing."""
        for number in range(len(self.scope) + 1):
            found = wanted if number == 0 else f"{wanted}_{number}"
            if found in self.scope:
                if self.scope[found] is thing:
                    return found
            elif found not in self._taken:
                self.scope[found] = thing
                return found
        raise AssertionError("there are more names than things")

    def add(
        self,
        names: Sequence[str],
        expression: str,
        reads: Sequence[str],
        comment: str = "",
        unpack: bool = False,
        segment: str | None = None,
    ) -> None:
        line = Line(tuple(names), expression, tuple(reads), comment, unpack, segment)
        self.lines.append(line)

    def text(self, header: str, returns: str, kept: Sequence[str], again: Again) -> str:
        """The whole function.

        Args:
            returns, kept: what it returns, and the variables in that.
            again: runs the functions inside, so that the backward pass can run them again.
        """
        lines = self.lines
        if any(line.segment is not None for line in lines):
            lines = nested(lines, kept, self.name, self.refer(again.__name__, again))
        return "\n".join([header, *written(lines, kept), f"    return {returns}"]) + "\n"

    def compile(self, text: str, name: str) -> Callable[..., Any]:
        """The function `name` that `text` defines."""
        scope = {**self.scope, TEXT: text}
        exec(compile(text, f"<{name}>", "exec"), scope)
        function: Callable[..., Any] = scope[name]
        return function


def expression(argument: Any, variable: Callable[[Value], str]) -> str:
    """An argument of an operator as Python text, values as their variables."""
    if isinstance(argument, Value):
        return variable(argument)
    if isinstance(argument, list):
        return f"[{', '.join(expression(a, variable) for a in argument)}]"
    if isinstance(argument, tuple):
        inner = ", ".join(expression(a, variable) for a in argument)
        return f"({inner},)" if len(argument) == 1 else f"({inner})"
    if isinstance(argument, float) and not math.isfinite(argument):
        return f"float('{argument}')"
    if isinstance(argument, torch.device):
        return f"torch.device('{argument}')"
    return repr(argument)
