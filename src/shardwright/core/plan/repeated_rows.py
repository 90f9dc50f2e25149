"""Repeated blocks as one row: 80 layers read like one, however many stages they are on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.core.plan.rows import CrossingRow, OperatorRow


@dataclass(frozen=True)
class Fold:
    """Operators that differ only in numbers of their names, in their stage, and in whether they are
    recomputed.

    Args:
        row: the first, with the numbers of all in its name: `layers.{0..79}.mlp.up`.
        members: all of them.
        stages: the stages that compute them, `0..7`.
        recomputed: which of them are recomputed in the backward pass: `recomputed`,
            `recomputed in 0..9`, or empty.
    """

    row: OperatorRow
    members: tuple[OperatorRow, ...]
    stages: str
    recomputed: str

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.members)


def fold_rows(
    rows: Sequence[OperatorRow], alike: Callable[[OperatorRow], object] | None = None
) -> list[Fold]:
    """Equal rows as one each, in the order of their first.

    Args:
        alike: what rows of one fold have in common beside the pattern of their names; by default
            all that a plan says of them.
    """
    groups: dict[object, list[OperatorRow]] = {}
    for row in rows:
        key = (_pattern(row.name), alike(row)) if alike is not None else _alike(row)
        groups.setdefault(key, []).append(row)
    return [_fold(grid) for members in groups.values() for grid in _grids(members)]


def _grids(members: Sequence[OperatorRow]) -> Iterator[Sequence[OperatorRow]]:
    """Rows of one pattern in groups whose names have all combinations of their numbers."""
    names = [row.name for row in members]
    places = _varying(names)
    if len(places) < 2 or _is_grid(names):
        yield members
        return
    outer: dict[str, list[OperatorRow]] = {}
    for row in members:
        outer.setdefault(row.name.split(".")[places[0]], []).append(row)
    for inner in outer.values():
        yield from _grids(inner)


def _alike(row: OperatorRow) -> tuple[object, ...]:
    """What rows of one fold have in common."""
    redistributions = tuple(
        (re.sub(r"\d+", "*", c.value), c.steps, c.forward_bytes, c.backward_bytes)
        for c in row.redistributions
    )
    shapes = tuple(shape for _, shape, _ in row.inputs)
    cuts = tuple(row.cuts.items())
    return _pattern(row.name), row.operator, shapes, row.outputs, cuts, redistributions, row.pinned


def _fold(members: Sequence[OperatorRow]) -> Fold:
    names = [row.name for row in members]
    recomputed = [row.name for row in members if row.segment]
    mark = "recomputed" if recomputed else ""
    if 0 < len(recomputed) < len(members):
        where = f"{len(recomputed)} of {len(members)}"
        if len(places := _varying(names)) == 1:
            where = ranges(int(name.split(".")[places[0]]) for name in recomputed)
        mark = f"recomputed in {where}"
    stages = ranges({row.stage for row in members})
    return Fold(replace(members[0], name=join_names(names)), tuple(members), stages, mark)


def fold_crossings(rows: Sequence[CrossingRow]) -> list[tuple[str, CrossingRow]]:
    """Equal crossings as one each, in the order of their first, after the stages as text."""
    groups: dict[tuple[object, ...], list[CrossingRow]] = {}
    for row in rows:
        values = tuple(map(_pattern, row.values))
        step = row.to_stage - row.stage
        groups.setdefault((step, values, row.forward_bytes, row.backward_bytes), []).append(row)
    folded = []
    for members in groups.values():
        names = map(join_names, zip(*(row.values for row in members), strict=True))
        folded.append((_stages(members), replace(members[0], values=tuple(names))))
    return folded


def _stages(members: Sequence[CrossingRow]) -> str:
    first, stages = members[0], {row.stage for row in members}
    if len(stages) == 1:
        return f"stage {first.stage} to stage {first.to_stage}"
    neighbor = "next" if first.to_stage > first.stage else "previous"
    return f"each of stages {ranges(stages)} to the {neighbor}"


def fold_names(names: Iterable[str]) -> list[str]:
    """Names that differ in one number as one each, in the order of their first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return list(map(join_names, groups.values()))


def join_names(names: Sequence[str]) -> str:
    """Names with all combinations of their numbers as one name; others one after the other.

    >>> join_names(["layers.0.add", "layers.1.add", "layers.3.add"])
    'layers.{0..1,3}.add'
    >>> join_names(["a.0.b.7", "a.0.b.8", "a.1.b.7", "a.1.b.8"])
    'a.{0..1}.b.{7..8}'
    """
    if len({_pattern(name) for name in names}) > 1 or not _is_grid(names):
        return ", ".join(names)
    words = names[0].split(".")
    for place in _varying(names):
        words[place] = f"{{{ranges({int(name.split('.')[place]) for name in names})}}}"
    return ".".join(words)


def module_words(name: str, most: int = 0) -> list[str]:
    """The parts of a module path whose numbers may be ranges; with `most` only so many before the
    last, which has the rest.

    >>> module_words("layers.{0..3}.add")
    ['layers', '{0..3}', 'add']
    """
    words = re.split(r"\.(?![^{}]*\})", name)
    return [*words[:most], ".".join(words[most:])] if 0 < most < len(words) - 1 else words


def ranges(numbers: Iterable[int]) -> str:
    """
    >>> ranges([0, 1, 2, 3, 5])
    '0..3,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def _pattern(name: str) -> str:
    """A name with its numbers as wildcards: `layers.*.mlp.up`."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _is_grid(names: Sequence[str]) -> bool:
    """Whether names of one pattern have all combinations of their numbers, each once."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return prod(len(set(column)) for column in columns) == len(set(names))


def _varying(names: Sequence[str]) -> list[int]:
    """The positions in their dotted paths at which names of one pattern differ."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return [place for place, column in enumerate(columns) if len(set(column)) > 1]
