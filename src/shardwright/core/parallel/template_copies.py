"""Copies of objects of the user in which a planned module is replaced by its template."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

from shardwright.core.capture.attributes import (
    plain_text,
)


class _RecordingDeepcopyMemo(dict[int, Any]):
    """A memo of `copy.deepcopy` that records whether an entry of `copies` was used."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        super().__init__(copies)
        self._copies, self.is_hit = copies, False

    def get(self, key: Any, default: Any = None) -> Any:
        # `deepcopy` looks up each object that it reaches by `get`.
        self.is_hit |= key in self._copies
        return super().get(key, default)


def replace_references_by_copies(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return `value`, or a deep copy if it refers to the planned module, as bound methods do; the
    copy refers to the template instead.

    Args:
        value: content of an attribute.
        copies: objects of the template, by id of the corresponding objects of the planned module.
    """
    if plain_text(value) or isinstance(value, Tensor):
        return value
    memo = _RecordingDeepcopyMemo(copies)
    try:
        copied = deepcopy(value, memo)
    except Exception:  # the user's objects may raise any error
        return value
    return copied if memo.is_hit else value
