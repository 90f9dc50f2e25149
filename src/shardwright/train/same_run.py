"""Whether the ranks of several nodes are the same run, before anything is planned."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright.errors import ConfigError
from shardwright.runtime.collective_errors import CommunicationError
from shardwright.train.process_group import World, join_store, local_device

# Seconds for which rank 0, whose process may serve the store, waits for all to have read it.
FAREWELL = 10.0


@contextmanager
def same_run(world: World, facts: Mapping[str, Any], timeout: timedelta) -> Iterator[None]:
    """Proves that the ranks of all nodes agree in `facts`, in the number of ranks on their node, in
    torch and in the type of their device. The ranks of one node do: their launcher is the same.

    Args:
        facts: names and values, as JSON knows them.
        timeout: how long to wait for the other ranks.

    Raises:
        ConfigError: on all ranks, with the first difference.
        CommunicationError: a rank did not come.
    """
    if world.local_size == world.size:
        yield
        return
    sizes = {"torch": torch.__version__, "ranks on the node": world.local_size}
    facts = {**sizes, "device": local_device(world).type, **facts}
    try:
        # It ends with the process that serves it, and is needed again by the process group.
        store = join_store(world, timeout)
        shared = PrefixStore("same run", store)
        shared.set(f"rank {world.rank}", json.dumps([socket.gethostname(), facts]))
        if world.rank == 0:
            ranks = [json.loads(shared.get(f"rank {rank}")) for rank in range(world.size)]
            shared.set("difference", _difference(ranks))
        difference = shared.get("difference").decode()
        _wait_for_readers(shared, world)
    except RuntimeError as error:
        raise CommunicationError(
            f"not all {world.size} ranks came within {timeout.total_seconds():.0f} s"
        ) from error
    if difference:
        raise ConfigError(difference)
    yield


def _wait_for_readers(store: Store, world: World) -> None:
    """Counts this rank; on rank 0 returns once all have been counted."""
    read, deadline = store.add("read", 1), time.monotonic() + FAREWELL
    while world.rank == 0 and read < world.size and time.monotonic() < deadline:
        time.sleep(0.05)
        read = store.add("read", 0)


def _difference(ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """In words, the first fact in which a rank differs from rank 0; nothing if there is none.

    Args:
        ranks: the host and the facts of each.
    """
    first, expected = ranks[0]
    for rank, (host, facts) in enumerate(ranks):
        for name in [*expected, *facts]:
            here, there = (json.dumps(each.get(name)) for each in (facts, expected))
            if here != there:
                return (
                    f"{name}: {here} for rank {rank} on {host}, {there} for rank 0 on {first}; all"
                    " nodes of a run need the same"
                )
    return ""
