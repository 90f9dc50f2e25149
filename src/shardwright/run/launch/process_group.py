"""The process group and the device of a launched rank."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwright.core.runtime.accelerator import (
    CPU,
    backend_of,
    device_of_rank,
    hardware_of,
    use_device,
)
from shardwright.core.runtime.collective_errors import CommunicationError, naming_redistributions
from shardwright.errors import ConfigError

TIMEOUT = timedelta(minutes=10)

# Seconds for which rank 0, whose process may serve the store, waits for all to have read it.
FAREWELL = 10.0

DeviceChoice = Literal["auto", "cpu"]
"""Where ranks compute: on the accelerators of their machines where there are any, or on the CPU."""


@dataclass(frozen=True)
class World:
    """The environment that a launcher (torchrun or ours) sets up for a process.

    Args:
        rank, size: among all processes.
        local_rank, local_size: among those of this machine.
        restarts: number of restarts after failures so far.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int = 0

    @staticmethod
    def from_environment() -> World:
        """The world of this process; a world of size 1 if it was not started by a launcher."""
        if not is_launched():
            return World(rank=0, size=1, local_rank=0, local_size=1)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        return World(rank, size, local_rank, local_size, restarts)


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_device(world: World, choice: DeviceChoice = "auto") -> torch.device:
    """The accelerator of this process, or the CPU, where that is the choice or there is no other.

    Raises:
        ConfigError: this machine has fewer accelerators than ranks.
    """
    return CPU if choice == "cpu" else device_of_rank(world.local_rank, world.local_size)


@contextmanager
def process_group(
    world: World, timeout: timedelta = TIMEOUT, device: DeviceChoice = "auto"
) -> Iterator[torch.device]:
    """Joins the default process group, with the default backend of this process's device.

    A world of size 1 needs no group, and creates none.

    Args:
        timeout: collectives that wait longer fail, because other ranks have died or are stuck.
        device: `cpu`, or by default the accelerator of the local rank where there are any.

    Yields:
        The device of this process.

    Raises:
        ConfigError: on all ranks, if some have no accelerator or another kind than others, or two
            have the same.
        CommunicationError: if another rank is gone or stuck; the message names the redistribution,
            or who else waited for it.
    """
    if world.size == 1:
        own = local_device(world, device)
        use_device(own)
        yield own
        return
    _die_with_launcher()
    with naming_redistributions():
        store = _check_devices(world, device, timeout)
        own = local_device(world, device)
        use_device(own)
        dist.init_process_group(
            backend_of(own),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=None if own.type == "cpu" else own,
        )
        yield own
    # Not after an error: this would block while other ranks wait in a collective.
    dist.destroy_process_group()


def _die_with_launcher() -> None:
    """Has the kernel kill this process when the elastic agent that started it is gone: nobody else
    would end it if the others continue."""
    if dist.is_torchelastic_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def join_store(world: World, timeout: timedelta) -> Store:
    """The store through which the processes find each other: their launcher's, or rank 0's.

    The launcher's survives restarts, so each start has its own prefix and sees no earlier keys.
    """
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    store.set_timeout(timeout)
    # Nodes that came later have seen fewer restarts than others; their launchers keep no store.
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return PrefixStore(f"restart {world.restarts if kept else 0} of {world.size} ranks", store)


def device_fact(world: World, choice: DeviceChoice) -> str:
    """The type of this rank's device, or why it has none, for other ranks to compare."""
    try:
        return local_device(world, choice).type
    except ConfigError as error:
        return f"none: {error}"


def check_same(
    world: World,
    facts: Mapping[str, Any],
    purpose: str,
    timeout: timedelta,
    own: str | None = None,
) -> Store:
    """Compares facts about all ranks; every rank must call this.

    Args:
        facts: names and values, as JSON knows them.
        purpose: a name of this comparison.
        timeout: how long to wait for the other ranks.
        own: what no other rank of the machine may have.

    Returns:
        The store of the processes, which may end with rank 0's.

    Raises:
        ConfigError: on all ranks, with the first difference.
        CommunicationError: a rank did not come.
    """
    try:
        joined = join_store(world, timeout)
        store = PrefixStore(purpose, joined)
        store.set(f"rank {world.rank}", json.dumps([socket.gethostname(), facts, own]))
        if world.rank == 0:
            texts = store.multi_get([f"rank {rank}" for rank in range(world.size)])
            ranks = [json.loads(text) for text in texts]
            store.set("difference", _difference(ranks) or _used_twice(ranks))
        difference = store.get("difference").decode()
        _wait_for_readers(store, world)
    except RuntimeError as error:
        raise CommunicationError(
            f"not all {world.size} ranks came within {timeout.total_seconds():.0f} s"
        ) from error
    if difference:
        raise ConfigError(difference)
    return joined


def _check_devices(world: World, choice: DeviceChoice, timeout: timedelta) -> Store:
    """Compares the devices of all ranks; as `check_same`."""
    fact = device_fact(world, choice)
    hardware = None if fact.startswith("none") else hardware_of(local_device(world, choice))
    return check_same(world, {"device": fact}, "devices", timeout, hardware)


def _wait_for_readers(store: Store, world: World) -> None:
    """Counts this rank; on rank 0 returns once all have been counted."""
    read, deadline = store.add("read", 1), time.monotonic() + FAREWELL
    while world.rank == 0 and read < world.size and time.monotonic() < deadline:
        time.sleep(0.01)
        read = store.add("read", 0)


def _difference(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """In words, the first fact in which a rank differs from rank 0; nothing if there is none.

    Args:
        ranks: the host, the facts, and what is its own, of each.
    """
    first, expected, _ = ranks[0]
    for rank, (host, facts, _) in enumerate(ranks):
        for name in [*expected, *facts]:
            here, there = (json.dumps(each.get(name)) for each in (facts, expected))
            if here != there:
                return (
                    f"{name}: {here} for rank {rank} on {host}, {there} for rank 0 on {first}; all"
                    " ranks of a run need the same"
                )
    return ""


def _used_twice(ranks: Sequence[tuple[str, Mapping[str, Any], str | None]]) -> str:
    """In words, the first accelerator that two ranks have; nothing if there is none."""
    users: dict[tuple[str, str], int] = {}
    for rank, (host, _, own) in enumerate(ranks):
        first = rank if own is None else users.setdefault((host, own), rank)
        if first != rank:
            return f"ranks {first} and {rank} on {host} have the same device: {own}"
    return ""
