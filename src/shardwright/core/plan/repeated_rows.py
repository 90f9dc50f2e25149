"""Fold the rows of repeated blocks: 80 equal layers become one row, across pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.core.plan.rows import CrossingRow, OperatorRow


@dataclass(frozen=True)
class Fold:
    """Rows of operators that differ only in layer numbers, pipeline stage and recomputation.

    Args:
        row: the first row, with the numbers of all rows in its name: `layers.{0..79}.mlp.up`.
        members: the rows of all operators.
        stages: indices of the pipeline stages that compute the operators, as text: `0..7`.
        recomputed: recomputation in the backward pass, as text: `recomputed` for all operators,
            `recomputed in 0..9` for blocks 0 to 9, empty for none.
    """

    row: OperatorRow
    members: tuple[OperatorRow, ...]
    stages: str
    recomputed: str

    @property
    def count(self) -> int:
        """Number of folded operators."""
        return len(self.members)


def fold_rows(
    rows: Sequence[OperatorRow], key: Callable[[OperatorRow], object] | None = None
) -> list[Fold]:
    """Fold equal rows, in the order of their first occurrence.

    Args:
        rows: the rows of a plan.
        key: function of a row; rows with equal keys and equal name patterns are folded. The default
            key is the operator, shapes, cuts, redistributions and whether the row is pinned.
    """
    groups: dict[object, list[OperatorRow]] = {}
    for row in rows:
        # Names must match whatever the key is, since the folded row has one name for all rows.
        group = (
            (_replace_numbers_by_wildcards(row.name), key(row))
            if key is not None
            else _make_default_fold_key(row)
        )
        groups.setdefault(group, []).append(row)
    return [
        _fold_equal_rows(grid)
        for members in groups.values()
        for grid in _split_into_complete_grids(members)
    ]


def _split_into_complete_grids(members: Sequence[OperatorRow]) -> Iterator[Sequence[OperatorRow]]:
    """Split rows of one name pattern into groups whose names can be written with ranges.

    `a.{0..1}.b.{0..1}` means four names, so a group needs all combinations of its numbers.
    """
    names = [row.name for row in members]
    positions = _find_differing_word_indices(names)
    # With one position, any numbers can be written as ranges.
    if len(positions) < 2 or _has_all_number_combinations(names):
        yield members
        return
    # Fixing the first number leaves fewer positions, of which all combinations may be present.
    by_first_number: dict[str, list[OperatorRow]] = {}
    for row in members:
        by_first_number.setdefault(row.name.split(".")[positions[0]], []).append(row)
    for rows in by_first_number.values():
        yield from _split_into_complete_grids(rows)


def _make_default_fold_key(row: OperatorRow) -> tuple[object, ...]:
    redistributions = tuple(
        (
            # Values of different layers differ in numbers only.
            re.sub(r"\d+", "*", redistribution.value),
            redistribution.steps,
            redistribution.forward_bytes,
            redistribution.backward_bytes,
        )
        for redistribution in row.redistributions
    )
    shapes = tuple(shape for _, shape, _ in row.inputs)
    # Stage and recomputation are not part of the key: folded rows list both.
    cuts = tuple(row.cuts.items())
    return (
        _replace_numbers_by_wildcards(row.name),
        row.operator,
        shapes,
        row.outputs,
        cuts,
        redistributions,
        row.pinned,
    )


def _fold_equal_rows(members: Sequence[OperatorRow]) -> Fold:
    names = [row.name for row in members]
    recomputed = [row.name for row in members if row.segment]
    recomputed_text = "recomputed" if recomputed else ""
    if 0 < len(recomputed) < len(members):
        where = f"{len(recomputed)} of {len(members)}"
        # With several numbers in a name, ranges of one of them would be ambiguous.
        if len(positions := _find_differing_word_indices(names)) == 1:
            where = format_ranges(int(name.split(".")[positions[0]]) for name in recomputed)
        recomputed_text = f"recomputed in {where}"
    stages = format_ranges({row.stage for row in members})
    return Fold(
        replace(members[0], name=join_names(names)), tuple(members), stages, recomputed_text
    )


def fold_crossings(rows: Sequence[CrossingRow]) -> list[tuple[str, CrossingRow]]:
    """Fold rows of point-to-point communication that differ only in stages and numbers in names.

    Returns:
        (stages as text, such as `each of stages 0..6 to the next`; folded row), in the order of
        first occurrence.
    """
    groups: dict[tuple[object, ...], list[CrossingRow]] = {}
    for row in rows:
        values = tuple(map(_replace_numbers_by_wildcards, row.values))
        # V-shaped schedules send back too: to the previous stage is another row than to the next.
        step = row.to_stage - row.stage
        groups.setdefault((step, values, row.forward_bytes, row.backward_bytes), []).append(row)
    folded = []
    for members in groups.values():
        names = map(join_names, zip(*(row.values for row in members), strict=True))
        folded.append(
            (_describe_crossing_stages(members), replace(members[0], values=tuple(names)))
        )
    return folded


def _describe_crossing_stages(members: Sequence[CrossingRow]) -> str:
    first, stages = members[0], {row.stage for row in members}
    if len(stages) == 1:
        return f"stage {first.stage} to stage {first.to_stage}"
    neighbor = "next" if first.to_stage > first.stage else "previous"
    return f"each of stages {format_ranges(stages)} to the {neighbor}"


def fold_names(names: Iterable[str]) -> list[str]:
    """Join names that differ only in numbers by `join_names`, in order of first occurrence."""
    # By name with wildcards for numbers.
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_replace_numbers_by_wildcards(name), []).append(name)
    return list(map(join_names, groups.values()))


def join_names(names: Sequence[str]) -> str:
    """Join names that differ only in numbers into one name with ranges.

    Names that lack some combination of their numbers are listed with commas instead.

    >>> join_names(["layers.0.add", "layers.1.add", "layers.3.add"])
    'layers.{0..1,3}.add'
    >>> join_names(["a.0.b.7", "a.0.b.8", "a.1.b.7", "a.1.b.8"])
    'a.{0..1}.b.{7..8}'
    """
    if len(
        {_replace_numbers_by_wildcards(name) for name in names}
    ) > 1 or not _has_all_number_combinations(names):
        return ", ".join(names)
    words = names[0].split(".")
    for position in _find_differing_word_indices(names):
        words[position] = f"{{{format_ranges({int(name.split('.')[position]) for name in names})}}}"
    return ".".join(words)


def split_module_path(name: str, max_splits: int = 0) -> list[str]:
    """Split a module path, whose numbers may be ranges, at its dots.

    Args:
        name: the module path.
        max_splits: maximum number of splits, as in `str.split`; 0 for no limit.

    >>> split_module_path("layers.{0..3}.add")
    ['layers', '{0..3}', 'add']
    """
    # Not at the dots of a range in braces.
    words = re.split(r"\.(?![^{}]*\})", name)
    if not 0 < max_splits < len(words) - 1:
        return words
    return [*words[:max_splits], ".".join(words[max_splits:])]


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers in ascending order, with consecutive numbers as ranges.

    >>> format_ranges([0, 1, 2, 3, 5])
    '0..3,5'
    """
    # Each run is its first and its last number.
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def _replace_numbers_by_wildcards(name: str) -> str:
    """Replace the numbers in a module path by wildcards: `layers.*.mlp.up`."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _has_all_number_combinations(names: Sequence[str]) -> bool:
    """Whether module paths that differ only in numbers contain all combinations of the numbers."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    # A full grid has as many names as the product of the distinct words per position.
    return prod(len(set(column)) for column in columns) == len(set(names))


def _find_differing_word_indices(names: Sequence[str]) -> list[int]:
    """Return the indices of the words in which `names`, module paths split at dots, differ."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return [position for position, column in enumerate(columns) if len(set(column)) > 1]
