"""Whether the ranks of several nodes are the same run, before anything is planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from shardwright.run.launch.process_group import DeviceChoice, World, check_same, device_fact


@contextmanager
def same_run(
    world: World, facts: Mapping[str, Any], timeout: timedelta, device: DeviceChoice = "auto"
) -> Iterator[None]:
    """Proves that the ranks of all nodes agree in `facts`, in the number of ranks on their node, in
    torch and in the type of their device. The ranks of one node do: their launcher is the same.

    Args:
        facts: names and values, as JSON knows them.
        timeout: how long to wait for the other ranks.
        device: as for `process_group`.

    Raises:
        ConfigError: on all ranks, with the first difference.
        CommunicationError: a rank did not come.
    """
    if world.local_size == world.size:
        yield
        return
    sizes = {"torch": torch.__version__, "ranks on the node": world.local_size}
    facts = {**sizes, "device": device_fact(world, device), **facts}
    # It ends with the process that serves it, and is needed again by the process group.
    store = check_same(world, facts, "same run", timeout)
    yield
    del store
