"""Schedule the checks that compare ranks, and let every rank see a difference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import DataError

GRACE_SECONDS = 0.5
"""Seconds that a rank waits before it raises an error that other ranks must find too."""


def is_due(number: int, first: int, period: int) -> bool:
    """Whether a periodic check runs in this call.

    Args:
        number: the number of the call, from 1.
        first: number of first calls that are all checked.
        period: calls from one later check to the next.
    """
    return number <= first or number % period == 0


@contextmanager
def delay_data_errors() -> Iterator[None]:
    """Delay a DataError, so that other ranks find it too.

    Their comparison would fail with an error of the network if this process ended at once.
    """
    try:
        yield
    except DataError:
        time.sleep(GRACE_SECONDS)
        raise
