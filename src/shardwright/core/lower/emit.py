"""Generate the Python source of a program, line by line; a printed program is exactly the source
that runs.

Names of operators, axes and segments may come from a file. Only their letters, digits and
underscores become part of identifiers, and comments stay on one line, so that no file can inject
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
from shardwright.core.runtime.collective_errors import SOURCE_VARIABLE

NAMED_RANGE = "named_range"
"""Identifier, in generated source, of the context manager that labels a line in profiler traces."""

RecomputeFunction = Callable[..., Any]
"""Function that runs its first argument with activation checkpointing, like
`torch.utils.checkpoint.checkpoint`."""


@dataclass
class Source:
    """Source of a function under construction.

    Args:
        scope: objects by their global name in the source: operators, redistributions, constants.
        lines: the statements so far.
    """

    scope: dict[str, Any] = field(default_factory=lambda: {"torch": torch, "aten": torch.ops.aten})
    lines: list[Line] = field(default_factory=list)
    _used_names: set[str] = field(default_factory=set)

    def name(self, hint: str) -> str:
        """Reserve and return an unused variable name: `layers.0.mlp` → `layers_0_mlp`."""
        stem = re.sub(r"\W+", "_", hint).strip("_") or "value"
        # `0.weight` of an `nn.Sequential` is no identifier, nor is `lambda`.
        if stem[0].isdigit() or keyword.iskeyword(stem):
            stem = f"_{stem}"
        candidate, number = stem, 1
        while candidate in self._used_names or candidate in self.scope:
            candidate, number = f"{stem}_{number}", number + 1
        self._used_names.add(candidate)
        return candidate

    def refer(self, hint: str, target: Any) -> str:
        """Return the name of `target` in the scope; add `target` if it is missing.

        Args:
            hint: preferred name; characters that identifiers cannot have are replaced.
            target: the object.
        """
        hint = re.sub(r"\W+", "_", hint)
        candidate, number = hint, 1
        while True:
            if candidate in self.scope:
                # Equal layers share functions, so that their lines differ in variables only
                # (`regions.py`).
                if self.scope[candidate] is target:
                    return candidate
            elif candidate not in self._used_names:
                self.scope[candidate] = target
                return candidate
            candidate, number = f"{hint}_{number}", number + 1

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

    def nest_segments(self, outputs: Sequence[str], checkpoint: RecomputeFunction) -> list[Line]:
        """Return the lines of the function, with each recomputed segment as an inner function.

        Args:
            outputs: variables that the function returns.
            checkpoint: runs inner functions with activation checkpointing.
        """
        if all(line.segment is None for line in self.lines):
            return self.lines
        return nest_segments(
            self.lines, outputs, self.name, self.refer(checkpoint.__name__, checkpoint)
        )

    def compile(self, source: str, name: str) -> Callable[..., Any]:
        """Compile generated source; return the function `name`, which the source defines."""
        scope = {**self.scope, SOURCE_VARIABLE: source}
        # `runtime/collective_errors.py` recognizes frames of programs by this file name, and reads
        # their lines from `SOURCE_VARIABLE`.
        exec(compile(source, f"<{name}>", "exec"), scope)
        function: Callable[..., Any] = scope[name]
        return function


def expression(argument: Any, variable: Callable[[Value], str]) -> str:
    """Return an operator's argument as a Python expression.

    Args:
        argument: the argument; may contain graph values.
        variable: maps a graph value to the name of its variable.
    """
    if isinstance(argument, Value):
        return variable(argument)
    if isinstance(argument, list):
        return f"[{', '.join(expression(a, variable) for a in argument)}]"
    if isinstance(argument, tuple):
        inner = ", ".join(expression(a, variable) for a in argument)
        # Without the comma, a tuple of one element would be the element in parentheses.
        return f"({inner},)" if len(argument) == 1 else f"({inner})"
    if isinstance(argument, float) and not math.isfinite(argument):
        # `repr` of infinity is `inf`, a name that the text does not define.
        return f"float('{argument}')"
    if isinstance(argument, torch.device):
        # `repr` of a device is `device(...)`, without `torch`.
        return f"torch.device('{argument}')"
    return repr(argument)


@dataclass(frozen=True)
class Line:
    """One statement `names = expression`.

    Args:
        names: variables that are assigned.
        expression: Python expression of the right-hand side.
        reads: variables that the expression reads.
        comment: text of the comment above the line; empty for none.
        unpack: whether the expression returns a sequence with an element for each name.
        segment: name of the recomputed segment of the line; None without a segment.
        function, body: name and lines of the inner function that the line defines and calls; empty
            without an inner function.
        label: name of the line's range in profiler traces; empty for none.
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
    def statement(self) -> str:
        # `x, = f()` takes the element; `x = f()` would be the sequence.
        comma = "," if self.unpack and len(self.names) == 1 else ""
        range_prefix = f"with {NAMED_RANGE}({self.label!r}): " if self.label else ""
        return f"{range_prefix}{', '.join(self.names)}{comma} = {self.expression}"


def write_body(lines: Sequence[Line], outputs: Collection[str]) -> Iterator[str]:
    """Yield the source lines of the body of a function.

    Variables other than `outputs` are deleted after their last use, so that eager execution keeps
    no activation alive longer than autograd does.
    """
    assigned = {name for line in lines for name in line.names}
    # Number of the last line that uses each variable: later lines overwrite earlier ones.
    last = {name: i for i, line in enumerate(lines) for name in (*line.reads, *line.names)}
    for number, line in enumerate(lines):
        # One line, so that a name from a file cannot end the comment and inject code.
        if line.comment:
            yield f"    # {''.join(c if c.isprintable() else ' ' for c in line.comment)}"
        if line.body:
            yield f"    def {line.function}({', '.join(line.reads)}):"
            yield from (f"    {inner}" for inner in write_body(line.body, line.names))
            yield f"        return {', '.join(line.names)}"
        # Results that nothing reads are deleted at once, such as the indices of a max pooling.
        used = dict.fromkeys((*line.reads, *line.names))
        # Only variables that these lines assign: arguments of an inner function belong to its
        # caller.
        finished = [n for n in used if n in assigned and last[n] == number and n not in outputs]
        yield f"    {line.statement}" + (f"; del {', '.join(finished)}" if finished else "")


def nest_segments(
    lines: Sequence[Line], outputs: Collection[str], name: Callable[[str], str], runner: str
) -> list[Line]:
    """Return `lines` with each recomputed segment replaced by a call of an inner function.

    Lines without a segment between lines of a segment move before the segment or, if they depend on
    its results, after the segment.

    Args:
        lines: the lines of a function.
        outputs: variables that are read after the last line.
        name: reserves and returns an unused name.
        runner: name of the function that runs inner functions with activation checkpointing.
    """
    # Number of the last line of each segment: later lines overwrite earlier ones.
    last = {line.segment: number for number, line in enumerate(lines)}
    # An inner function returns only variables read outside: others are recomputed, not saved.
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
        # A segment becomes one function, so other lines between its first and last line must move.
        before, inside, after = _split_at_segment(lines[position : last[segment] + 1], segment)
        function = name(f"compute_{segment}")
        result += [*before, _make_segment_call(inside, readers, function, runner), *after]
        position = last[segment] + 1
    return result


def _split_at_segment(
    lines: Sequence[Line], segment: str
) -> tuple[list[Line], list[Line], list[Line]]:
    """Return (lines before a segment, lines of the segment, lines after it).

    Lines between lines of the segment move to before it or, if they depend on it, to after it.
    """
    before: list[Line] = []
    inside: list[Line] = []
    after: list[Line] = []
    assigned: set[str] = set()
    for line in lines:
        # The inner function of one segment cannot contain lines of another.
        assert line.segment in (None, segment), f"{line.segment} is nested in {segment}"
        if line.segment is not None:
            inside.append(line)
        # Independent lines move before the segment: gathers and starts of collectives, whose
        # overlap would be lost after the segment.
        elif assigned.isdisjoint(line.reads):
            before.append(line)
            continue
        else:
            after.append(line)
        assigned.update(line.names)
    return before, inside, after


def _make_segment_call(
    body: Sequence[Line], readers: Mapping[str, set[str | None]], function: str, runner: str
) -> Line:
    """Return a line that defines and calls the inner function of a recomputed segment.

    Args:
        body: the lines of the segment.
        readers: segments that read each variable; None for readers outside segments.
        function: name of the inner function.
        runner: name of the function that runs inner functions with activation checkpointing.
    """
    own_segment = {body[0].segment}
    assigned = dict.fromkeys(n for line in body for n in line.names)
    # As arguments, since a checkpoint saves the arguments of its function for the recomputation.
    inputs = tuple(dict.fromkeys(n for line in body for n in line.reads if n not in assigned))
    return Line(
        # A variable that nothing reads belongs to the segment alone, and is not returned.
        names=tuple(n for n in assigned if readers.get(n, own_segment) - own_segment),
        expression=f"{runner}({', '.join([function, *inputs])})",
        reads=inputs,
        comment=f"{body[0].segment}: recomputed in the backward pass",
        function=function,
        body=tuple(body),
    )
