"""Restoration of Python objects that a traced call changes."""

from __future__ import annotations

import gc
import importlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from shardwright.core.torch_internals.dynamo_side_effects import ChangedObject
from shardwright.errors import CaptureError

_MISSING = object()


@contextmanager
def undone_effects(changes: Iterable[ChangedObject]) -> Iterator[None]:
    """Return a context that restores changed objects on exit.

    Args:
        changes: objects that the call changes.

    Raises:
        CaptureError: if the state of an object of this class cannot be restored.
    """
    restore = [_make_restorer(change) for change in changes]
    try:
        yield
    finally:
        for each in reversed(restore):
            each()


def find_tensors(changes: Iterable[ChangedObject]) -> frozenset[int]:
    """Return the `id()`s of the tensors that changed objects refer to, directly or through other
    objects, except modules, classes and functions."""
    pending: list[Any] = []
    for change in changes:
        if change.global_name is not None:
            pending.append(_get_attribute(_get_namespace(change), change.global_name))
            continue
        pending += [_get_attribute(change.value, name) for name in change.attributes or ()]
        if isinstance(change.value, tuple(cls for cls, _ in _CONTAINERS)):
            pending.append(change.value)
    visited: dict[int, Any] = {}
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        # Kept alive, so that no other object gets the same id.
        visited[id(value)] = value
        if not isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType)):
            pending += gc.get_referents(value)
    return frozenset(key for key, value in visited.items() if isinstance(value, Tensor))


def _get_attribute(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)


def _make_restorer(change: ChangedObject) -> Callable[[], None]:
    """Return a function that restores the current state of an object.

    Raises:
        CaptureError: if the state of objects of this class cannot be restored.
    """
    if change.global_name is not None:
        return _make_attribute_restorer(_get_namespace(change), (change.global_name,))
    contents = None if isinstance(change.value, type) else _make_contents_restorer(change.value)
    attributes = None
    if change.attributes is not None:
        attributes = _make_attribute_restorer(change.value, change.attributes)
    if contents is None and attributes is None:
        raise CaptureError(
            f"`forward` changes an object of class {type(change.value).__qualname__}, which cannot"
            " be undone after the trace\nstore the changing state in an attribute, a list or a dict"
        )

    def restore() -> None:
        for each in (contents, attributes):
            if each is not None:
                each()

    return restore


def _get_namespace(change: ChangedObject) -> Any:
    """Return the Python module or the dictionary that contains the changed variables."""
    if isinstance(change.value, str):
        return importlib.import_module(change.value)
    return change.value


_CONTAINERS: tuple[tuple[Any, Callable[..., None]], ...] = (
    (list, list.extend),
    # Before its base class `dict`, whose methods bypass the order.
    (OrderedDict, OrderedDict.update),
    (dict, dict.update),
    (set, set.update),
    (deque, deque.extend),
)
"""Container classes, with the method that adds elements."""


def _make_contents_restorer(value: Any) -> Callable[[], None] | None:
    """Return a function that restores the contents of a container; None for other objects."""
    # Methods of the base class, since a subclass may override them with side effects.
    for cls, _ in _CONTAINERS:
        if isinstance(value, cls):
            # `OrderedDict.copy` calls the constructor of a subclass.
            contents = dict(cls.items(value)) if issubclass(cls, dict) else cls.copy(value)
            return partial(replace_contents, value, contents)
    return None


def replace_contents(value: Any, contents: Any) -> None:
    """Replace the elements of a list, dict, set or deque by `contents`.

    The methods of a subclass are not called.
    """
    cls, fill = next(each for each in _CONTAINERS if isinstance(value, each[0]))
    cls.clear(value)
    fill(value, contents)


def _make_attribute_restorer(owner: Any, names: Iterable[str]) -> Callable[[], None]:
    # The global variables of a Python module, by the `__dict__` of the module.
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
