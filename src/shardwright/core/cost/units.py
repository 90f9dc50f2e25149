"""Numbers with units, as in cluster files: `80 GB`, `450 GB/s`, `3 us`."""

from __future__ import annotations

import math
import re
from typing import Any

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

BYTES = {f"{prefix}B": size for prefix, size in (_PREFIXES | _BINARY).items()}
BYTES_PER_SECOND = {f"{unit}/s": size for unit, size in BYTES.items()}
FLOPS = {f"{prefix}FLOP/s": size for prefix, size in _PREFIXES.items()}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
SHARE = {"": 1.0, "%": 0.01}

_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")


def parse_quantity(text_or_number: Any, units: dict[str, float]) -> float | None:
    """Parse a number with an optional unit, and return it in the base unit; None if invalid.

    Args:
        text_or_number: text such as `80 GB`, or a number in the base unit.
        units: factor of each valid unit to the base unit.

    >>> parse_quantity("80 GB", BYTES), parse_quantity("3 us", SECONDS), parse_quantity(0.5, SHARE)
    (80000000000.0, 3e-06, 0.5)
    >>> parse_quantity("80 GB", SECONDS)
    """
    # YAML reads `yes` and `on` as booleans, which are integers in Python.
    if isinstance(text_or_number, bool):
        return None
    if isinstance(text_or_number, (int, float)):
        # YAML reads `.inf` and `.nan` as floats.
        return float(text_or_number) if math.isfinite(text_or_number) else None
    match = _NUMBER.fullmatch(text_or_number) if isinstance(text_or_number, str) else None
    if match is None:
        return None
    number, unit = match.groups()
    if unit and unit not in units:
        return None
    try:
        size = float(number) * units.get(unit, 1.0)
    except ValueError:
        # Such as `1.2.3`, which the pattern accepts.
        return None
    # `1e400` overflows to infinity.
    return size if math.isfinite(size) else None
