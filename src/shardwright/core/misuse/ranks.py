"""Comparisons of all ranks: in which calls, and how all of them raise what one finds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import DataError

GRACE_SECONDS = 0.5
"""How long a rank that differs stays, so that all find it."""


def is_due(number: int, first: int, every: int) -> bool:
    """Whether a check looks at this call, counted from 1 on: one of the first, or of each so many
    later."""
    return number <= first or number % every == 0


@contextmanager
def found_by_all() -> Iterator[None]:
    """Holds a DataError back until other ranks have read what they compare, which would be lost if
    this process ended at once."""
    try:
        yield
    except DataError:
        time.sleep(GRACE_SECONDS)
        raise
