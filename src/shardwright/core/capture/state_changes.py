"""Recorded contents of Python objects, and their changes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import CellType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.core.capture.state_contents import (
    ADVANCING,
    MISSING,
    STATE,
    Attribute,
    Parts,
    is_same,
)

CONTAINERS = (CellType, list, deque, dict, set)
_ORDERED = (list, tuple, set, frozenset, deque)
INDEXED = (*_ORDERED, dict, CellType)


class StateLocation(NamedTuple):
    """Location of an object in the Python state that a module can reach, for error messages.

    Args:
        description: description of the location, with `{}` in place of `path`.
        path: the object as the user writes it.
    """

    description: str
    path: str = ""

    def inside(self, key: Hashable, indexed: bool) -> StateLocation:
        """Return the location of the element or attribute `key` of the object here.

        Args:
            indexed: whether the object is written with brackets, `path[key]`.
        """
        if key == STATE:
            return self
        if isinstance(key, Attribute):
            key, indexed = key.name, False
        path = (
            f"{self.path}[{_format_key(key)}]"
            if indexed
            else f"{self.path}.{key}".removeprefix(".")
        )
        return StateLocation(self.description, path)

    def __str__(self) -> str:
        return self.description.replace("{}", repr(self.path), 1)


def _format_key(key: Hashable) -> str:
    """Format a key or an index of a container; a module is represented by its class."""
    value = key() if isinstance(key, weakref.ReferenceType) else key
    return type(value).__name__ if isinstance(value, nn.Module) else repr(key)


class Change(NamedTuple):
    """A difference between the recorded and the current state of an object.

    Args:
        location: location of the changed object.
        value: the current object.
        adds: whether the earlier value was missing or None, for example a new cache entry.
        advances: whether the changed object is an iterator or a generator.
    """

    location: StateLocation
    value: Any
    adds: bool
    advances: bool = False


@dataclass(frozen=True, eq=False)
class RecordedContents:
    """Contents of an object when they were recorded, and the function that reads them."""

    value: Any
    location: StateLocation
    read: Callable[[Any], Parts]
    contents: Parts


def changes_of(
    holder: RecordedContents, is_equal: Callable[[Tensor, Tensor], bool]
) -> Iterator[Change]:
    """Yield the differences between the recorded and the current contents of an object.

    Args:
        is_equal: returns whether two tensors are known to have equal values.
    """
    before, now = holder.contents, holder.read(holder.value)
    for key in {**before, **now}:
        old, new = before.get(key, MISSING), now.get(key, MISSING)
        if not is_same(old, new, is_equal):
            location = holder.location
            # An index says little, as an insertion changes the indices of all that follow.
            if not isinstance(holder.value, _ORDERED) or isinstance(key, Attribute):
                location = location.inside(key, isinstance(holder.value, INDEXED))
            # By identity: an array compares its elements.
            added = (old is None or old is MISSING) and new is not MISSING
            yield Change(location, new, added, isinstance(holder.value, ADVANCING))
