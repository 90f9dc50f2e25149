"""Join two consecutive redistribution steps into one collective that sends no more bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import Any

from shardwright.core.layout.redistribution import joined_step
from shardwright.core.partition.transfer import Transfer

Routes = MutableMapping[Any, tuple[Transfer, ...]]
"""Transfers, in order, that bring a value to the layout in which it is read or returned; the key is
the consumer or the returned value."""


def join_transfers(
    transfers: Iterable[Transfer], routes: Iterable[Routes], pinned_routes: Routes
) -> list[Transfer]:
    """Join consecutive transfers whose intermediate layout has no other consumer.

    Args:
        transfers: all transfers of a program.
        routes: mappings whose values are routes of these transfers; changed in place.
        pinned_routes: leading transfers of each pinned output, which are not joined.

    Returns:
        The remaining transfers; a joined pair is one transfer.
    """
    transfers, routes = list(transfers), list(routes)
    num_successors = Counter(id(t.previous) for t in transfers)
    # The last transfer of a route is read by its consumer.
    final_transfers = {id(route[-1]) for each in routes for route in each.values() if route}
    final_transfers |= {id(t) for route in pinned_routes.values() for t in route}
    joined_transfers: set[int] = set()
    for second in transfers:
        first = second.previous
        # Another consumer of the intermediate layout still needs the first step separately.
        if first is None or id(first) in final_transfers or num_successors[id(first)] > 1:
            continue
        value = second.value
        step = joined_step(first.step, second.step, value.shape, value.itemsize)
        if step is not None:
            # In place, as routes and later transfers refer to the object.
            second.step, second.previous = step, first.previous
            joined_transfers.add(id(first))
    if joined_transfers:
        for each in routes:
            for key, route in each.items():
                each[key] = tuple(t for t in route if id(t) not in joined_transfers)
    return [t for t in transfers if id(t) not in joined_transfers]
