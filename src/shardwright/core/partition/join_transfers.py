"""Join two consecutive redistribution steps into one collective that sends no more bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import Any

from shardwright.core.layout.redistribution import joined_step
from shardwright.core.partition.transfer import Transfer

Routes = MutableMapping[Any, tuple[Transfer, ...]]


def join_transfers(
    transfers: Iterable[Transfer], routes: Iterable[Routes], leading: Routes
) -> list[Transfer]:
    """Join transfers whose intermediate layout has no other reader; change `routes` in place.

    Args:
        transfers: all transfers of a program.
        routes: routes that contain them.
        leading: leading transfers of pinned outputs, which are not joined.

    Returns:
        The remaining transfers.
    """
    transfers, routes = list(transfers), list(routes)
    followers = Counter(id(t.previous) for t in transfers)
    read = {id(route[-1]) for each in routes for route in each.values() if route}
    read |= {id(t) for route in leading.values() for t in route}
    joined: set[int] = set()
    for second in transfers:
        first = second.previous
        # Another reader of the intermediate layout still needs the first step by itself.
        if first is None or id(first) in read or followers[id(first)] > 1:
            continue
        value = second.value
        step = joined_step(first.step, second.step, value.shape, value.itemsize)
        if step is not None:
            # In place: routes refer to the transfer, and a third step may be joined to it.
            second.step, second.previous = step, first.previous
            joined.add(id(first))
    if joined:
        for each in routes:
            for key, route in each.items():
                each[key] = tuple(t for t in route if id(t) not in joined)
    return [t for t in transfers if id(t) not in joined]
