"""Lines of a program, and those that the backward pass runs again as functions inside it.

# layers.0: computed again in the backward pass
def compute_layers_0(x, layers_0_weight):
    layers_0 = aten.linear.default(x, layers_0_weight)
    layers_0_act = aten.gelu.default(layers_0)
    return layers_0_act
layers_0_act = recompute(compute_layers_0, x, layers_0_weight)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One statement `names = expression`.

    Args:
        reads: the variables in the expression.
        unpack: whether the expression gives a sequence, one for each name.
        segment: the name of the segment that it is computed again with, if it is.
        function, body: of a call of a function inside the program, its name and its lines.
    """

    names: tuple[str, ...]
    expression: str
    reads: tuple[str, ...]
    comment: str = ""
    unpack: bool = False
    segment: str | None = None
    function: str = ""
    body: tuple[Line, ...] = ()

    @property
    def text(self) -> str:
        comma = "," if self.unpack and len(self.names) == 1 else ""
        return f"{', '.join(self.names)}{comma} = {self.expression}"


def written(lines: Sequence[Line], kept: Collection[str]) -> Iterator[str]:
    """The text of a function's body. Variables that it makes are deleted after their last use,
    except the `kept`, so that eager execution holds no activation longer than autograd does."""
    made = {name for line in lines for name in line.names}
    last = {name: i for i, line in enumerate(lines) for name in (*line.reads, *line.names)}
    for number, line in enumerate(lines):
        if line.comment:
            yield f"    # {line.comment}"
        if line.body:
            yield f"    def {line.function}({', '.join(line.reads)}):"
            yield from (f"    {inner}" for inner in written(line.body, line.names))
            yield f"        return {', '.join(line.names)}"
        used = dict.fromkeys((*line.reads, *line.names))
        done = [n for n in used if n in made and last[n] == number and n not in kept]
        yield f"    {line.text}" + (f"; del {', '.join(done)}" if done else "")


def nested(
    lines: Sequence[Line], kept: Collection[str], name: Callable[[str], str], call: str
) -> list[Line]:
    """The lines of each segment joined to one that calls a function of them.

    Lines between those of a segment that are not of it go before it, or after it if they read what
    it makes.

    Args:
        kept: variables that are read after the last line.
        name: gives a name like the given one that is not taken.
        call: what runs a function and lets the backward pass run it again.
    """
    last = {line.segment: number for number, line in enumerate(lines)}
    result: list[Line] = []
    position = 0
    while position < len(lines):
        segment = lines[position].segment
        if segment is None:
            result.append(lines[position])
            position += 1
            continue
        before, inside, after = _apart(lines[position : last[segment] + 1], segment)
        read = {n for line in lines if line.segment != segment for n in line.reads}
        function = name(f"compute_{segment}")
        result += [*before, _joined(inside, read | set(kept), function, call), *after]
        position = last[segment] + 1
    return result


def _apart(lines: Sequence[Line], segment: str) -> tuple[list[Line], list[Line], list[Line]]:
    """Those that come before a segment, its own, and those that read what it makes."""
    before: list[Line] = []
    inside: list[Line] = []
    after: list[Line] = []
    made: set[str] = set()
    for line in lines:
        assert line.segment in (None, segment), f"{line.segment} lies within {segment}"
        if line.segment is not None:
            inside.append(line)
        elif made.isdisjoint(line.reads):
            before.append(line)
            continue
        else:
            after.append(line)
        made.update(line.names)
    return before, inside, after


def _joined(inside: Sequence[Line], read: Collection[str], function: str, call: str) -> Line:
    made = dict.fromkeys(n for line in inside for n in line.names)
    given = tuple(dict.fromkeys(n for line in inside for n in line.reads if n not in made))
    return Line(
        names=tuple(n for n in made if n in read),
        expression=f"{call}({', '.join([function, *given])})",
        reads=given,
        comment=f"{inside[0].segment}: computed again in the backward pass",
        function=function,
        body=tuple(inside),
    )
