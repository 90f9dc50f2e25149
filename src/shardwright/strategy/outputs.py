"""How a pinned operator leaves its outputs: a partial sum all-reduced, or reduce-scattered."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.errors import StrategyError
from shardwright.layout import Axes, TensorLayout
from shardwright.rules.rule import Cuts
from shardwright.strategy.entry import Entry, entries_text, entry_text
from shardwright.strategy.mesh import first_axes, placed
from shardwright.strategy.reading import Reading

OutputAxes = tuple[tuple[Axes, ...] | None, ...]
"""For each output the axes that cut each dimension; None where the operator is free."""


def outputs_of(reading: Reading, cuts: Cuts) -> OutputAxes | None:
    """In which layouts the operator is to leave its outputs; None if nothing is said.

    Each can be left as it is made; where it is made as a partial sum the axes of the sum are
    all-reduced, or reduce-scattered onto any dimensions, as their minor axes.

    Raises:
        StrategyError: if an output cannot be left so; lists how it can.
    """
    op, entries = reading.op, reading.strategy.outputs
    if entries is None:
        return None
    if len(entries) != len(op.outputs):
        raise reading.error(
            f"out_strategy {entries_text(entries)} has {len(entries)} entries for"
            f" {len(op.outputs)} outputs"
        )
    _, made = reading.rule.layouts(reading.mesh, cuts)
    return tuple(
        None if entry is None else _left(reading, index, entry, made[index])
        for index, entry in enumerate(entries)
    )


def _left(reading: Reading, index: int, entry: Entry, made: TensorLayout) -> tuple[Axes, ...]:
    shape = reading.op.outputs[index].shape
    exact = isinstance(entry, TensorLayout)
    parts = entry.shard_counts if isinstance(entry, TensorLayout) else entry
    assert parts is not None
    if len(parts) != len(shape):
        raise reading.error(
            f"output {index} has {len(shape)} dimensions, {list(shape)}, and"
            f" {entry_text(entry)} is for {len(parts)}"
        )
    if isinstance(entry, TensorLayout):
        wanted = placed(reading.op.name, entry, reading.mesh)
        left = wanted if _adds_minor_axes(wanted, made) else None
    else:
        left = _of_counts(parts, made)
    fits = all(size % count == 0 for size, count in zip(shape, parts, strict=True))
    if left is None or not fits:
        raise _impossible(reading, index, entry, made, exact)
    return left


def _adds_minor_axes(wanted: tuple[Axes, ...], made: TensorLayout) -> bool:
    """Whether `wanted` is what is made, plus axes of the partial sum after those of a dimension."""
    return all(
        axes[: len(before)] == before and made.partial.issuperset(axes[len(before) :])
        for axes, before in zip(wanted, made.axes, strict=True)
    )


def _of_counts(parts: tuple[int, ...], made: TensorLayout) -> tuple[Axes, ...] | None:
    free, left = sorted(made.partial), []
    for count, before, axes in zip(parts, made.shard_counts, made.axes, strict=True):
        more = None if count % before else first_axes(count // before, free, made.layout)
        if more is None:
            return None
        left.append((*axes, *more))
    return tuple(left)


def _impossible(
    reading: Reading, index: int, entry: Entry, made: TensorLayout, exact: bool
) -> StrategyError:
    names = "".join(made.alias_names[axis] for axis in sorted(made.partial))
    if made.partial:
        parts = made.layout.size(made.partial)
        how = f"{entry_text(made.shard_counts)} as a sum of {parts} terms over axes {names}"
        scattered = ", ".join(map(entry_text, _scattered(made, reading.op.outputs[index].shape)))
        valid = f"{entry_text(made.shard_counts)} (all-reduce)"
        valid += f", {scattered} (reduce-scatter)" if scattered else ""
        valid += ", the axes of the sum after those that are there" if exact else ""
    else:
        how = f"{entry_text(made.shard_counts)}, no sum"
        valid = str(made) if exact else entry_text(made.shard_counts)
    return reading.error(
        f"output {index} {list(reading.op.outputs[index].shape)} cannot be left as"
        f" {entry_text(entry)}; it is made as {how}; valid is {valid}"
    )


def _scattered(made: TensorLayout, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Counts when the whole sum is reduce-scattered onto one dimension that it divides."""
    terms, counts = made.layout.size(made.partial), made.shard_counts
    for dim, size in enumerate(shape):
        if size % (counts[dim] * terms) == 0:
            yield (*counts[:dim], counts[dim] * terms, *counts[dim + 1 :])
