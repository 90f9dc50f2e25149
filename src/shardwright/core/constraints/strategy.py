"""Represent and validate the sharding strategy of one operator: one entry per tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.errors import StrategyError

Entry = tuple[int, ...] | TensorLayout | None
"""Sharding of one tensor: a shard count per dimension, a layout, or None if it follows from the
other tensors' entries."""


@dataclass(frozen=True)
class OperatorStrategy:
    """The requested sharding of one operator.

    Args:
        inputs: one entry per tensor input, in the order of the operator's arguments.
        outputs: one entry per output; None for the sharding in which the operator computes them.

    Raises:
        StrategyError: if an entry is not a tuple of positive ints, a layout or None, if a layout is
            a partial sum, or if all entries are None.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...] | None = None

    def __post_init__(self) -> None:
        check_entries("in_strategy", self.inputs)
        if self.outputs is not None:
            check_entries("out_strategy", self.outputs)
        entries = (*self.inputs, *(self.outputs or ()))
        # An operator without tensor inputs has no entries, and may be pinned as replicated.
        if all(entry is None for entry in entries) and self.inputs:
            raise StrategyError(
                f"in_strategy {entries_text(self.inputs)} shards no tensor\n"
                "give at least one input an entry other than None, such as ((2,4),(1,4))"
            )

    def __str__(self) -> str:
        inputs, outputs = entries_text(self.inputs), self.outputs
        return inputs if outputs is None else f"{inputs} → {entries_text(outputs)}"

    @property
    def layouts(self) -> Iterator[TensorLayout]:
        """Yield the entries that are layouts, inputs before outputs."""
        for entry in (*self.inputs, *(self.outputs or ())):
            if isinstance(entry, TensorLayout):
                yield entry

    def to_dict(self) -> dict[str, Any]:
        """Return the strategy as JSON data: counts as lists, layouts as dicts."""
        return {
            "inputs": [_encode_entry(entry) for entry in self.inputs],
            "outputs": None if self.outputs is None else [_encode_entry(e) for e in self.outputs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OperatorStrategy:
        outputs = data["outputs"]
        return cls(
            tuple(_decode_entry(entry) for entry in data["inputs"]),
            None if outputs is None else tuple(_decode_entry(entry) for entry in outputs),
        )


def _encode_entry(entry: Entry) -> Any:
    if isinstance(entry, TensorLayout):
        return entry.to_dict()
    return None if entry is None else list(entry)


def _decode_entry(data: Any) -> Entry:
    if isinstance(data, Mapping):
        return TensorLayout.from_dict(data)
    # JSON reads tuples as lists, and an entry must be a tuple.
    return None if data is None else tuple(data)


def check_entries(option: str, entries: Any) -> None:
    """Check that `entries` is a tuple of valid strategy entries.

    Args:
        option: name of the option that has the entries, for errors.
        entries: one entry per tensor.

    Raises:
        StrategyError: if `entries` is not a tuple of valid entries.
    """
    if not isinstance(entries, tuple):
        raise StrategyError(
            f"{option} must be a tuple with one entry per tensor, not {entries!r}\n"
            "use for example ((2, 4), (1, 4))"
        )
    for entry in entries:
        # Shard counts of one tensor, where one entry per tensor belongs.
        if isinstance(entry, int):
            raise StrategyError(
                f"{option} {entries!r} has the int {entry!r} as the entry of a tensor\n"
                "write an entry as a tuple with one shard count per dimension, a TensorLayout, or"
                f" None; for a single tensor write ({entries!r},)"
            )
        check_entry(option, entry)


def check_entry(option: str, entry: Any) -> None:
    """Check that `entry` is a valid sharding of one tensor.

    Args:
        option: name of the option that has the entry, for errors.
        entry: the sharding of one tensor.

    Raises:
        StrategyError: if `entry` is neither a tuple of positive ints, nor a layout, nor None, or is
            the layout of a partial sum.
    """
    if entry is None:
        return
    if isinstance(entry, TensorLayout):
        if entry.partial or entry.varying:
            raise StrategyError(
                f"{option}: the layout {entry} is a partial sum\n"
                "remove `partial` and `varying`: a strategy can only shard dimensions"
            )
        return
    # A `Layout` shards a tensor only when it is called with an axis for each dimension.
    if isinstance(entry, Layout):
        raise StrategyError(
            f"{option}: {entry} is a Layout, not a TensorLayout\n"
            "call the layout with the axes of each dimension: layout('dp', 'None')"
        )
    if not isinstance(entry, tuple):
        raise StrategyError(
            f"{option} contains {entry!r}\n"
            "use as an entry a tuple with one shard count per dimension, such as (2, 4), a"
            " TensorLayout, or None"
        )
    for count in entry:
        # `True` is an instance of `int`.
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise StrategyError(
                f"{option}: {entry!r} contains {count!r}\n"
                "use shard counts that are ints of at least 1, such as (2, 4)"
            )


def entry_text(entry: object) -> str:
    """Return an entry as text: `(2,4)`, `(8,)`, `()`, `None`, or the axis names of a layout or
    mapping."""
    if isinstance(entry, tuple):
        return f"({','.join(map(str, entry))}{',' if len(entry) == 1 else ''})"
    return str(entry)


def entries_text(entries: Iterable[object]) -> str:
    """Return a tuple of entries as text: `((2,4),None)`."""
    entry_texts = [entry_text(entry) for entry in entries]
    return f"({','.join(entry_texts)}{',' if len(entry_texts) == 1 else ''})"
