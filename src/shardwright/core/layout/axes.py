"""The axes of device matrices: sizes, names, prime factors. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, product
from math import prod

from shardwright.errors import LayoutError

Axes = tuple[int, ...]
"""Axes of a device matrix, counted from the left, the most significant first."""

Shape = tuple[int, ...]
"""Sizes of a tensor's dimensions."""

MAX_DEVICES = 2**20
"""Of a device matrix, whose ranks are listed."""


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors of `number`, ascending: 12 → (2, 2, 3), 1 → ()."""
    factors, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return (*factors, number) if number > 1 else tuple(factors)


def axis_names() -> Iterator[str]:
    """a, b, …, z, aa, ab, …"""
    for length in count(1):
        yield from map("".join, product("abcdefghijklmnopqrstuvwxyz", repeat=length))


def common_length(mine: Axes, other: Axes) -> int:
    """How many axes two lists have in common at their beginning."""
    length = 0
    while length < len(mine) and length < len(other) and mine[length] == other[length]:
        length += 1
    return length


def block_number(axes: Axes, sizes: tuple[int, ...], place: Mapping[int, int] | Axes) -> int:
    """Which of the blocks into which `axes` cut a dimension the device at `place` holds, a
    coordinate for each axis.

    >>> block_number((2, 0), sizes=(2, 3, 4), place=(1, 0, 3))
    7
    """
    number = 0
    for axis in axes:
        number = number * sizes[axis] + place[axis]
    return number


def common_axes(*device_matrices: tuple[int, ...]) -> tuple[int, ...]:
    """The axes in which all these device matrices can be expressed, each a prime factor.

    >>> common_axes((8,), (2, 4))
    (2, 2, 2)

    Raises:
        LayoutError: if they are not of equally many devices, or groups of them do not nest.
    """
    totals = sorted({prod(matrix) for matrix in device_matrices})
    if len(totals) > 1:
        raise LayoutError(
            f"device matrices {', '.join(map(str, device_matrices))} are of different numbers of"
            f" devices: {', '.join(map(str, totals))}"
        )
    edges = {prod(m[i:]) for m in device_matrices for i in range(len(m) + 1)}
    inner, *outer = sorted(edges | {1})
    sizes: tuple[int, ...] = ()
    for edge in outer:
        if edge % inner:
            raise LayoutError(
                f"device matrices {', '.join(map(str, device_matrices))} have no common axes:"
                f" groups of {inner} and groups of {edge} neighboring devices do not nest"
            )
        sizes = prime_factors(edge // inner) + sizes
        inner = edge
    return sizes


INTERLEAVED = "interleaved_parallel"
"""The name of a last axis that cuts a tensor into parts that stay on one device."""


def axes_with_devices(
    sizes: tuple[int, ...], names: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes and names of the axes of a device matrix, without an interleaved one.

    Raises:
        LayoutError: if these are not tuples of positive ints and of distinct names, one for each.
    """
    _check_sizes(sizes)
    _check_names(names)
    if len(sizes) != len(names):
        raise LayoutError(
            f"device_matrix {sizes} has {len(sizes)} axes but alias_names {names} names"
            f" {len(names)}; give one name for each axis"
        )
    if INTERLEAVED in names[:-1]:
        raise LayoutError(f"alias_names {names}: {INTERLEAVED!r} must be the last axis")
    count = len(names) - (INTERLEAVED in names)
    return sizes[:count], names[:count]


def _check_sizes(sizes: object) -> None:
    if not isinstance(sizes, tuple):
        raise LayoutError(f"device_matrix must be a tuple of positive ints, not {sizes!r}")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise LayoutError(f"device_matrix {sizes} holds {size!r}; every size is an int >= 1")
    if prod(sizes) > MAX_DEVICES:
        raise LayoutError(f"device_matrix {sizes} has more than {MAX_DEVICES} devices")


def _check_names(names: object) -> None:
    if not isinstance(names, tuple):
        raise LayoutError(f"alias_names must be a tuple of names, not {names!r}")
    for name in names:
        if not isinstance(name, str) or not name:
            raise LayoutError(f"alias_names {names} holds {name!r}; every name is a non-empty str")
        if name == "None":
            raise LayoutError("no axis may be called 'None': that says that a dimension is whole")
        if names.count(name) > 1:
            raise LayoutError(f"alias_names {names} holds {name!r} twice; names must differ")


def check_ranks(ranks: object, devices: int) -> None:
    if not isinstance(ranks, tuple) or not all(isinstance(rank, int) for rank in ranks):
        raise LayoutError(f"rank_list must be a tuple of ints, not {ranks!r}")
    if len(ranks) != devices or len(set(ranks)) != devices or min(ranks) < 0:
        raise LayoutError(
            f"rank_list {ranks} must hold {devices} different ranks, one for each device"
        )
