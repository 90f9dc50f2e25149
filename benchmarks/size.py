"""How much a benchmark measures."""

from __future__ import annotations

import enum
from typing import TypeVar

T = TypeVar("T")


class Size(enum.Enum):
    """Two sizes of every benchmark.

    `DEFAULT` takes about two minutes and shows whether something has changed. `FULL` makes the
    tables of the documentation; goals that need all of its cases are checked only there.
    """

    DEFAULT = "default"
    FULL = "full"

    def of(self, default: T, *, full: T) -> T:
        """What to measure at this size."""
        return full if self is Size.FULL else default
