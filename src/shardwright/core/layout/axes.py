"""The axes of device matrices: sizes, names, prime factors. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, product
from math import prod

from shardwright.errors import LayoutError

Axes = tuple[int, ...]
"""Indices of axes of a device matrix, counted from the left, the most significant first."""

Shape = tuple[int, ...]
"""Sizes of a tensor's dimensions."""

MAX_DEVICES = 2**20
"""Maximum number of devices of a device matrix, whose ranks are listed in memory."""


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of `number`, ascending: 12 → (2, 2, 3), 1 → ()."""
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    # A remainder above 1 has no factor up to its square root: it is prime.
    return (*factors, number) if number > 1 else tuple(factors)


def axis_names() -> Iterator[str]:
    """Yield the default names of axes: a, b, …, z, aa, ab, …"""
    for length in count(1):
        yield from map("".join, product("abcdefghijklmnopqrstuvwxyz", repeat=length))


def common_length(first: Axes, second: Axes) -> int:
    """Return the number of leading axes that two lists of axes have in common."""
    length = 0
    while length < len(first) and length < len(second) and first[length] == second[length]:
        length += 1
    return length


def shard_index(axes: Axes, sizes: tuple[int, ...], coordinates: Mapping[int, int] | Axes) -> int:
    """Return the index of a device's shard along a dimension.

    Args:
        axes: the axes that shard the dimension.
        sizes: number of devices along each axis of the device matrix.
        coordinates: the device's coordinate on each axis.

    >>> shard_index((2, 0), sizes=(2, 3, 4), coordinates=(1, 0, 3))
    7
    """
    index = 0
    for axis in axes:
        # Mixed radix, the first axis being the most significant digit.
        index = index * sizes[axis] + coordinates[axis]
    return index


def common_axes(*device_matrices: tuple[int, ...]) -> tuple[int, ...]:
    """Return the prime sizes of the axes of the coarsest device matrix that refines all given ones.

    >>> common_axes((8,), (2, 4))
    (2, 2, 2)

    Raises:
        LayoutError: if the numbers of devices differ, or the axes of two matrices divide devices
            into groups that do not nest.
    """
    totals = sorted({prod(matrix) for matrix in device_matrices})
    if len(totals) > 1:
        raise LayoutError(
            f"device matrices {', '.join(map(str, device_matrices))} have different numbers of"
            f" devices: {', '.join(map(str, totals))}\nuse device matrices with equal numbers of"
            " devices"
        )
    # The strides of all axes, and the number of devices: there is a common axis between each two
    # consecutive strides.
    strides = {prod(m[i:]) for m in device_matrices for i in range(len(m) + 1)}
    inner, *outer = sorted(strides | {1})
    sizes: tuple[int, ...] = ()
    for stride in outer:
        # Strides of nested groups divide each other; those of (2, 3) and (3, 2) contain 2 and 3.
        if stride % inner:
            raise LayoutError(
                f"device matrices {', '.join(map(str, device_matrices))} have no common axes:"
                f" groups of {inner} and groups of {stride} neighboring devices do not nest\n"
                "use sizes of which one divides the other, such as (8,) and (2, 4)"
            )
        # Strides ascend from the innermost axis, so later factors go in front.
        sizes = prime_factors(stride // inner) + sizes
        inner = stride
    return sizes


INTERLEAVED = "interleaved_parallel"
"""Name of MindSpore's virtual last axis, which splits the shard of a device and has no devices."""


def axes_with_devices(
    sizes: tuple[int, ...], names: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Check sizes and names of axes, and return both without the virtual axis
    `interleaved_parallel`.

    Raises:
        LayoutError: if `sizes` is not a tuple of positive ints, `names` is not a tuple of distinct
            names, or their lengths differ.
    """
    _check_device_matrix(sizes)
    _check_alias_names(names)
    if len(sizes) != len(names):
        raise LayoutError(
            f"device_matrix {sizes} has {len(sizes)} axes, but alias_names {names} has {len(names)}"
            " names\ngive one name for each axis"
        )
    if INTERLEAVED in names[:-1]:
        raise LayoutError(
            f"alias_names {names}: {INTERLEAVED!r} must be the last axis\nmove it to the end"
        )
    # The virtual axis is the last and has no devices, so no coordinate changes without it.
    count = len(names) - (INTERLEAVED in names)
    return sizes[:count], names[:count]


def _check_device_matrix(sizes: object) -> None:
    if not isinstance(sizes, tuple):
        raise LayoutError(
            f"device_matrix must be a tuple of positive ints, not {sizes!r}\nuse for example (2, 4)"
        )
    for size in sizes:
        # In Python, True and False are ints.
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise LayoutError(
                f"device_matrix {sizes} contains {size!r}\nevery size must be an int of at least 1"
            )
    if prod(sizes) > MAX_DEVICES:
        raise LayoutError(
            f"device_matrix {sizes} has {prod(sizes)} devices\nuse at most {MAX_DEVICES} devices"
        )


def _check_alias_names(names: object) -> None:
    if not isinstance(names, tuple):
        raise LayoutError(
            f"alias_names must be a tuple of names, not {names!r}\nuse for example ('dp', 'tp')"
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise LayoutError(f"alias_names {names} contains {name!r}\nuse non-empty strings")
        if name == "None":
            raise LayoutError(
                "an axis is called 'None', the entry of a dimension that is not sharded\n"
                "use another name, such as 'dp'"
            )
        if names.count(name) > 1:
            raise LayoutError(f"alias_names {names} contains {name!r} twice\nuse different names")


def check_ranks(ranks: object, devices: int) -> None:
    """Raise a LayoutError unless `ranks` is a tuple of distinct ranks, one for each device."""
    if not isinstance(ranks, tuple) or not all(isinstance(rank, int) for rank in ranks):
        raise LayoutError(
            f"rank_list must be a tuple of ints, not {ranks!r}\nuse for example (0, 1, 2, 3)"
        )
    if len(ranks) != devices or len(set(ranks)) != devices or min(ranks) < 0:
        raise LayoutError(
            f"rank_list {ranks} must contain {devices} different ranks\n"
            "use one rank for each device, or omit `rank_list` for the ranks 0, 1, 2, ..."
        )
