"""Two redistribution steps in a row become one, where one collective does both at no more bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import Any

from shardwright.core.layout.redistribution import joined_step
from shardwright.core.partition.transfer import Transfer

Routes = MutableMapping[Any, tuple[Transfer, ...]]


def join_transfers(
    transfers: Iterable[Transfer], routes: Iterable[Routes], fixed: Routes
) -> list[Transfer]:
    """Joins transfers whose intermediate layout nobody else reads; changes the routes in place.

    Args:
        transfers: all of them.
        routes: the ways on which they lie.
        fixed: routes with which others begin, which stay as they are.

    Returns:
        The transfers that are left.
    """
    transfers, routes = list(transfers), list(routes)
    followers = Counter(id(t.before) for t in transfers)
    read = {id(route[-1]) for each in routes for route in each.values() if route}
    read |= {id(t) for route in fixed.values() for t in route}
    joined: set[int] = set()
    for second in transfers:
        first = second.before
        if first is None or id(first) in read or followers[id(first)] > 1:
            continue
        value = second.value
        step = joined_step(first.step, second.step, value.shape, value.itemsize)
        if step is not None:
            second.step, second.before = step, first.before
            joined.add(id(first))
    if joined:
        for each in routes:
            for key, route in each.items():
                each[key] = tuple(t for t in route if id(t) not in joined)
    return [t for t in transfers if id(t) not in joined]
