"""Operators of equal blocks as one: 80 layers read like one, on however many stages they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.plan.rows import CrossingRow, OperatorRow


@dataclass(frozen=True)
class Fold:
    """Operators that differ only in one number of their names, in their stage, and in whether they
    are computed again.

    Args:
        row: the first, with the numbers of all in its name: `layers.{0..79}.mlp.up`.
        stages: those that compute them, `0..7`.
        again: which of them are computed again in the backward pass: `again`, `again in 0..9`, or
            nothing.
    """

    row: OperatorRow
    stages: str
    again: str


def folded(rows: Sequence[OperatorRow]) -> list[Fold]:
    """Equal rows as one each, in the order of their first."""
    groups: dict[tuple[object, ...], list[OperatorRow]] = {}
    for row in rows:
        groups.setdefault(_alike(row), []).append(row)
    found = []
    for members in groups.values():
        if len(_varying([row.name for row in members])) > 1:
            found += [_fold([row]) for row in members]
        else:
            found.append(_fold(members))
    return found


def _alike(row: OperatorRow) -> tuple[object, ...]:
    """What rows of one fold have in common."""
    conversions = tuple(
        (re.sub(r"\d+", "*", c.value), c.steps, c.forward_bytes, c.backward_bytes)
        for c in row.conversions
    )
    shapes = tuple(shape for _, shape, _ in row.inputs)
    cuts = tuple(row.cuts.items())
    return _pattern(row.name), row.operator, shapes, row.outputs, cuts, conversions, row.pinned


def _fold(members: Sequence[OperatorRow]) -> Fold:
    names = [row.name for row in members]
    again = [row.name for row in members if row.segment]
    said = "again" if again else ""
    if 0 < len(again) < len(members):
        (place,) = _varying(names)
        said = f"again in {ranges(int(name.split('.')[place]) for name in again)}"
    stages = ranges({row.stage for row in members})
    return Fold(replace(members[0], name=join_names(names)), stages, said)


@dataclass(frozen=True)
class FoldedCrossing:
    """What goes from each of several stages to its neighbor, alike.

    Args:
        way: between which stages.
        values: their names.
        forward_bytes, backward_bytes: of one of them, as in `CrossingRow`.
    """

    way: str
    values: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int


def folded_crossings(rows: Sequence[CrossingRow]) -> list[FoldedCrossing]:
    """Equal crossings as one each, in the order of their first."""
    groups: dict[tuple[object, ...], list[CrossingRow]] = {}
    for row in rows:
        values = tuple(map(_pattern, row.values))
        step = row.to_stage - row.stage
        groups.setdefault((step, values, row.forward_bytes, row.backward_bytes), []).append(row)
    return [
        FoldedCrossing(
            _way(members),
            tuple(
                join_names(names) for names in zip(*(row.values for row in members), strict=True)
            ),
            members[0].forward_bytes,
            members[0].backward_bytes,
        )
        for members in groups.values()
    ]


def _way(members: Sequence[CrossingRow]) -> str:
    first, stages = members[0], {row.stage for row in members}
    if len(stages) == 1:
        return f"stage {first.stage} to {first.to_stage}"
    neighbor = "the next" if first.to_stage > first.stage else "the one before"
    return f"each of stages {ranges(stages)} to {neighbor}"


def folded_names(names: Iterable[str]) -> list[str]:
    """Names that differ in one number as one each, in the order of their first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return list(map(join_names, groups.values()))


def join_names(names: Sequence[str]) -> str:
    """Names that differ in one number as one name: `layers.{0..3}.add`; others one after the other.

    >>> join_names(["layers.0.add", "layers.1.add", "layers.3.add"])
    'layers.{0..1,3}.add'
    """
    if len({_pattern(name) for name in names}) > 1 or len(_varying(names)) > 1:
        return ", ".join(names)
    parts = names[0].split(".")
    for place in _varying(names):
        parts[place] = f"{{{ranges(int(name.split('.')[place]) for name in names)}}}"
    return ".".join(parts)


def ranges(numbers: Iterable[int]) -> str:
    """
    >>> ranges([0, 1, 2, 3, 5])
    '0..3,5'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in found)


def _pattern(name: str) -> str:
    """A name with the numbers taken out: `layers.*.mlp.up`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _varying(names: Sequence[str]) -> list[int]:
    """In which of their parts names of one pattern differ."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return [place for place, column in enumerate(columns) if len(set(column)) > 1]
