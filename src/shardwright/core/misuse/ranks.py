"""Schedule the checks that compare ranks, and let every rank see a difference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import DataError

GRACE_SECONDS = 0.5
"""Seconds that a rank waits before it raises an error that other ranks must find too."""


def is_due(number: int, first: int, every: int) -> bool:
    """Whether a periodic check runs in this call: the `first` calls, and later one of `every`.

    Args:
        number: the number of the call, from 1.
        first: number of first calls that are checked.
        every: period of the later checks.
    """
    return number <= first or number % every == 0


@contextmanager
def found_by_all() -> Iterator[None]:
    """Delay a DataError until other ranks have completed their comparison, which would fail if this
    process ended at once."""
    try:
        yield
    except DataError:
        time.sleep(GRACE_SECONDS)
        raise
