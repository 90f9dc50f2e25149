"""The device matrix on which plans are searched: one axis per prime factor."""

from __future__ import annotations

from itertools import islice

from shardwright.core.layout.axes import axis_names, prime_factors
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.errors import LayoutError


def prime_mesh(devices: int) -> DeviceMatrix:
    """Make the device matrix with one axis per prime factor of `devices`, named a, b, …, z, aa, …

    Raises:
        LayoutError: if `devices` is less than 1.
    """
    if devices < 1:
        raise LayoutError(f"a device matrix cannot have {devices} devices\nuse at least one device")
    # The finest axes: every number of shards that divides the devices is a product of some of them.
    sizes = prime_factors(devices)
    return DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))))
