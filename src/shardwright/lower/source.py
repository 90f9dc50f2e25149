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


@dataclass
class Line:
    """One statement `names = expression` with the variables that it reads; `unpack` where a
    sequence of tensors goes to the names."""

    names: tuple[str, ...]
    expression: str
    reads: tuple[str, ...]
    comment: str = ""
    unpack: bool = False

    @property
    def text(self) -> str:
        comma = "," if self.unpack and len(self.names) == 1 else ""
        return f"{', '.join(self.names)}{comma} = {self.expression}"


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
    ) -> None:
        self.lines.append(Line(tuple(names), expression, tuple(reads), comment, unpack))

    def text(self, header: str, returns: str, kept: Sequence[str]) -> str:
        """The whole function. Variables are deleted after their last use, except the `kept`, so
        that eager execution holds no activation longer than autograd does."""
        last = {name: i for i, line in enumerate(self.lines) for name in (*line.reads, *line.names)}
        text = [header]
        for number, line in enumerate(self.lines):
            if line.comment:
                text.append(f"    # {line.comment}")
            text.append(f"    {line.text}")
            used = dict.fromkeys((*line.reads, *line.names))
            done = [name for name in used if last[name] == number and name not in kept]
            if done:
                text[-1] += f"; del {', '.join(done)}"
        text.append(f"    return {returns}")
        return "\n".join(text) + "\n"

    def compile(self, text: str, name: str) -> Callable[..., Any]:
        """The function `name` that `text` defines."""
        scope = dict(self.scope)
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
