"""The device matrix on which plans are searched."""

from __future__ import annotations

from itertools import islice

from shardwright.core.layout.axes import axis_names, prime_factors
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.errors import LayoutError


def prime_mesh(devices: int) -> DeviceMatrix:
    """The device matrix on which plans are made: one axis for each prime factor of `devices`.

    Axes are called a, b, …, z, aa, ab, …

    Raises:
        LayoutError: if there is not one device at least.
    """
    if devices < 1:
        raise LayoutError(f"a device matrix needs one device at least, not {devices}")
    sizes = prime_factors(devices)
    return DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))))
