"""The schedule of periodic checks, and the delay of errors that all ranks must raise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import DataError

GRACE_SECONDS = 0.5
"""Seconds that a rank waits before an error, so that other ranks detect the same error."""


def is_due(number: int, num_first_calls: int, period: int) -> bool:
    """Whether a periodic check runs in call `number`.

    Args:
        number: the number of the call, from 1.
        num_first_calls: number of calls at the start of the run that are all checked.
        period: number of calls between later checks.
    """
    return number <= num_first_calls or number % period == 0


@contextmanager
def delay_data_errors() -> Iterator[None]:
    """Delay a `DataError` of the context by `GRACE_SECONDS`, so that other ranks detect it too.

    If this process ended at once, other ranks would fail with a network error instead.
    """
    try:
        yield
    except DataError:
        time.sleep(GRACE_SECONDS)
        raise
