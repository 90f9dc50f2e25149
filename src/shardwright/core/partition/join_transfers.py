"""Join two consecutive redistribution steps into one collective that sends no more bytes."""

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
    """Join transfers whose intermediate layout has no other consumer; changes `routes` in place.

    Args:
        transfers: all transfers of a program.
        routes: mappings to the routes that consist of these transfers.
        fixed: leading transfers of pinned outputs, which are not joined.

    Returns:
        The transfers that remain.
    """
    transfers, routes = list(transfers), list(routes)
    num_next = Counter(id(t.previous) for t in transfers)
    final = {id(route[-1]) for each in routes for route in each.values() if route}
    final |= {id(t) for route in fixed.values() for t in route}
    joined: set[int] = set()
    for second in transfers:
        first = second.previous
        # Another consumer of the intermediate layout still needs the first step by itself.
        if first is None or id(first) in final or num_next[id(first)] > 1:
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
