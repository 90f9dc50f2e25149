"""Undoes what a traced call changes outside of the copy that is traced."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from shardwright.core.torch_internals.dynamo import ChangedObject
from shardwright.errors import CaptureError

_MISSING = object()


@contextmanager
def undone_effects(changes: Iterable[ChangedObject]) -> Iterator[None]:
    """A context at whose end objects are as they were at its start.

    Raises:
        CaptureError: for an object of a class whose state cannot be restored.
    """
    restore = [_snapshot(change) for change in changes]
    try:
        yield
    finally:
        for each in reversed(restore):
            each()


def _snapshot(change: ChangedObject) -> Callable[[], None]:
    """A function that restores an object."""
    if change.global_name is not None:
        return _snapshot_attributes(_namespace(change), (change.global_name,))
    contents = None if isinstance(change.value, type) else _snapshot_contents(change.value)
    attributes = None
    if change.attributes is not None:
        attributes = _snapshot_attributes(change.value, change.attributes)
    if contents is None and attributes is None:
        raise CaptureError(
            f"`forward` changes an object of class {type(change.value).__qualname__}, which cannot"
            " be undone after the trace: keep what changes in an attribute, a list or a dict"
        )

    def restore() -> None:
        for each in (contents, attributes):
            if each is not None:
                each()

    return restore


def _namespace(change: ChangedObject) -> Any:
    """The module of a global variable, or the dictionary of its variables."""
    if isinstance(change.value, str):
        return importlib.import_module(change.value)
    return change.value


_CONTAINERS: tuple[tuple[Any, Callable[..., None]], ...] = (
    (list, list.extend),
    (dict, dict.update),
    (set, set.update),
    (deque, deque.extend),
)
"""Classes of containers, with the method that fills one."""


def _snapshot_contents(value: Any) -> Callable[[], None] | None:
    """A function that restores the contents of a container; None for other objects."""
    # Methods of the base class: those of a subclass may do more than store.
    for cls, fill in _CONTAINERS:
        if isinstance(value, cls):
            return partial(_refill, value, cls.copy(value), cls.clear, fill)
    return None


def _refill(
    value: Any, contents: Any, clear: Callable[..., None], fill: Callable[..., None]
) -> None:
    clear(value)
    fill(value, contents)


def _snapshot_attributes(owner: Any, names: Iterable[str]) -> Callable[[], None]:
    if isinstance(owner, dict):
        before = {name: owner.get(name, _MISSING) for name in names}
    else:
        before = {name: getattr(owner, name, _MISSING) for name in names}

    def restore() -> None:
        for name, value in before.items():
            if isinstance(owner, dict):
                if value is _MISSING:
                    owner.pop(name, None)
                else:
                    owner[name] = value
            elif value is not _MISSING:
                setattr(owner, name, value)
            elif hasattr(owner, name):
                delattr(owner, name)

    return restore
