"""What users say of an operator: an entry for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.errors import StrategyError
from shardwright.layout.layout import Layout, TensorLayout

Entry = tuple[int, ...] | TensorLayout | None
"""What is said of one tensor: counts, a layout, or nothing."""


@dataclass(frozen=True)
class OperatorStrategy:
    """How one operator is to be cut.

    Args:
        inputs: an entry for each tensor input, in the order of the operator.
        outputs: an entry for each output; None leaves them as they are made.

    Raises:
        StrategyError: if an entry is none: no tuple, not positive, a layout that is a partial sum.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...] | None = None

    def __post_init__(self) -> None:
        check_entries("in_strategy", self.inputs)
        if self.outputs is not None:
            check_entries("out_strategy", self.outputs)
        said = (*self.inputs, *(self.outputs or ()))
        if all(entry is None for entry in said) and self.inputs:
            raise StrategyError(
                f"in_strategy {entries_text(self.inputs)} says nothing; give an entry other than"
                " None for one input at least"
            )

    def __str__(self) -> str:
        text = entries_text(self.inputs)
        return text if self.outputs is None else f"{text} → {entries_text(self.outputs)}"

    @property
    def layouts(self) -> Iterator[TensorLayout]:
        """The layouts among its entries."""
        for entry in (*self.inputs, *(self.outputs or ())):
            if isinstance(entry, TensorLayout):
                yield entry

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: counts as lists, layouts as their dicts."""
        return {
            "inputs": [_entry_data(entry) for entry in self.inputs],
            "outputs": None if self.outputs is None else [_entry_data(e) for e in self.outputs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OperatorStrategy:
        outputs = data["outputs"]
        return cls(
            tuple(_entry(entry) for entry in data["inputs"]),
            None if outputs is None else tuple(_entry(entry) for entry in outputs),
        )


def _entry_data(entry: Entry) -> Any:
    if isinstance(entry, TensorLayout):
        return entry.to_dict()
    return None if entry is None else list(entry)


def _entry(data: Any) -> Entry:
    if isinstance(data, Mapping):
        return TensorLayout.from_dict(data)
    return None if data is None else tuple(data)


def check_entries(what: str, entries: Any) -> None:
    """Raises:
    StrategyError: if `entries` is no tuple of entries.
    """
    if not isinstance(entries, tuple):
        raise StrategyError(
            f"{what} must be a tuple with one entry for each tensor, not {entries!r}"
        )
    for entry in entries:
        if isinstance(entry, int):
            raise StrategyError(
                f"{what} {entries!r} holds {entry!r}; an entry is a tuple of counts, one for each"
                f" dimension, a TensorLayout, or None. For one tensor write ({entries!r},)"
            )
        check_entry(what, entry)


def check_entry(what: str, entry: Any) -> None:
    """Raises:
    StrategyError: if `entry` is neither a tuple of positive counts, nor a layout, nor None.
    """
    if entry is None:
        return
    if isinstance(entry, TensorLayout):
        if entry.partial or entry.varying:
            raise StrategyError(
                f"{what}: the layout {entry} is a partial sum; say only which axes cut dimensions"
            )
        return
    if isinstance(entry, Layout):
        raise StrategyError(
            f"{what}: {entry} lays out no tensor; call it with one entry for each dimension:"
            " layout('dp', 'None')"
        )
    if not isinstance(entry, tuple):
        raise StrategyError(
            f"{what} holds {entry!r}; an entry is a tuple of counts, one for each dimension,"
            " a TensorLayout, or None"
        )
    for count in entry:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise StrategyError(
                f"{what} holds {entry!r} with {count!r}; every count is an int of at least 1,"
                " the number of equal parts of one dimension"
            )


def entry_text(entry: Entry) -> str:
    """`(2,4)`, `(8,)`, `()`, `None`, or the names of a layout's axes."""
    if isinstance(entry, tuple):
        return f"({','.join(map(str, entry))}{',' if len(entry) == 1 else ''})"
    return str(entry)


def entries_text(entries: Iterable[Entry]) -> str:
    texts = [entry_text(entry) for entry in entries]
    return f"({','.join(texts)}{',' if len(texts) == 1 else ''})"
