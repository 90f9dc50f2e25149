"""Python source text, line by line: what a program prints is what it runs.

Names of operators, axes and segments may come from a file. Only their letters, digits and
underscores become part of a name in the text, and a comment is one line, so that no file can put
code into a program.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.core.graph.graph import Value
from shardwright.core.runtime.collective_errors import TEXT

NAMED_RANGE = "named_range"
"""What puts a line into a range of a trace."""

Again = Callable[..., Any]
"""Runs a function with its arguments, and lets the backward pass run it again."""


@dataclass
class Source:
    """A function under construction.

    Args:
        scope: what its text refers to besides its arguments: operators, redistributions, constants.
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
        wanted = re.sub(r"\W+", "_", wanted)
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
        label: str = "",
    ) -> None:
        line = Line(tuple(names), expression, tuple(reads), comment, unpack, segment, label=label)
        self.lines.append(line)

    def nested(self, outputs: Sequence[str], again: Again) -> list[Line]:
        """The lines of the function, those of segments in functions inside.

        Args:
            outputs: the variables that it returns.
            again: runs the functions inside, so that the backward pass can run them again.
        """
        if all(line.segment is None for line in self.lines):
            return self.lines
        return nested(self.lines, outputs, self.name, self.refer(again.__name__, again))

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


@dataclass(frozen=True)
class Line:
    """One statement `names = expression`.

    Args:
        reads: the variables in the expression.
        unpack: whether the expression gives a sequence, one for each name.
        segment: the name of the segment that it is computed again with, if it is.
        function, body: of a call of a function inside the program, its name and its lines.
        label: the name of its range in a trace of a profiler; empty without one.
    """

    names: tuple[str, ...]
    expression: str
    reads: tuple[str, ...]
    comment: str = ""
    unpack: bool = False
    segment: str | None = None
    function: str = ""
    body: tuple[Line, ...] = ()
    label: str = ""

    @property
    def text(self) -> str:
        comma = "," if self.unpack and len(self.names) == 1 else ""
        within = f"with {NAMED_RANGE}({self.label!r}): " if self.label else ""
        return f"{within}{', '.join(self.names)}{comma} = {self.expression}"


def write_body(lines: Sequence[Line], outputs: Collection[str]) -> Iterator[str]:
    """The text of a function's body. Variables that it makes are deleted after their last use,
    except the `outputs`, so that eager execution holds no activation longer than autograd does."""
    assigned = {name for line in lines for name in line.names}
    last = {name: i for i, line in enumerate(lines) for name in (*line.reads, *line.names)}
    for number, line in enumerate(lines):
        if line.comment:
            yield f"    # {''.join(c if c.isprintable() else ' ' for c in line.comment)}"
        if line.body:
            yield f"    def {line.function}({', '.join(line.reads)}):"
            yield from (f"    {inner}" for inner in write_body(line.body, line.names))
            yield f"        return {', '.join(line.names)}"
        used = dict.fromkeys((*line.reads, *line.names))
        done = [n for n in used if n in assigned and last[n] == number and n not in outputs]
        yield f"    {line.text}" + (f"; del {', '.join(done)}" if done else "")


def nested(
    lines: Sequence[Line], outputs: Collection[str], name: Callable[[str], str], call: str
) -> list[Line]:
    """The lines of each segment joined to one that calls a function of them.

    Lines between those of a segment that are not of it go before it, or after it if they read what
    it makes.

    Args:
        outputs: variables that are read after the last line.
        name: gives a name like the given one that is not taken.
        call: what runs a function and lets the backward pass run it again.
    """
    last = {line.segment: number for number, line in enumerate(lines)}
    readers: dict[str, set[str | None]] = {n: {None} for n in outputs}
    for line in lines:
        for n in line.reads:
            readers.setdefault(n, set()).add(line.segment)
    result: list[Line] = []
    position = 0
    while position < len(lines):
        segment = lines[position].segment
        if segment is None:
            result.append(lines[position])
            position += 1
            continue
        before, inside, after = _apart(lines[position : last[segment] + 1], segment)
        function = name(f"compute_{segment}")
        result += [*before, _joined(inside, readers, function, call), *after]
        position = last[segment] + 1
    return result


def _apart(lines: Sequence[Line], segment: str) -> tuple[list[Line], list[Line], list[Line]]:
    """Those that come before a segment, its own, and those that read what it makes."""
    before: list[Line] = []
    inside: list[Line] = []
    after: list[Line] = []
    assigned: set[str] = set()
    for line in lines:
        assert line.segment in (None, segment), f"{line.segment} lies within {segment}"
        if line.segment is not None:
            inside.append(line)
        elif assigned.isdisjoint(line.reads):
            before.append(line)
            continue
        else:
            after.append(line)
        assigned.update(line.names)
    return before, inside, after


def _joined(
    inside: Sequence[Line], readers: Mapping[str, set[str | None]], function: str, call: str
) -> Line:
    """One line that calls a function of all those inside.

    Args:
        readers: by variable the segments that read it, None for what is in none.
    """
    own = {inside[0].segment}
    assigned = dict.fromkeys(n for line in inside for n in line.names)
    inputs = tuple(dict.fromkeys(n for line in inside for n in line.reads if n not in assigned))
    return Line(
        names=tuple(n for n in assigned if readers.get(n, own) - own),
        expression=f"{call}({', '.join([function, *inputs])})",
        reads=inputs,
        comment=f"{inside[0].segment}: recomputed in the backward pass",
        function=function,
        body=tuple(inside),
    )
