"""The process group and the device of a launched rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwright.core.agreement.store import check_same_facts
from shardwright.core.runtime.accelerator import (
    CPU,
    backend_of,
    device_of_rank,
    hardware_of,
    use_device,
)
from shardwright.core.runtime.collective_errors import naming_redistributions
from shardwright.errors import CommunicationError, ConfigError

TIMEOUT = timedelta(minutes=10)

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
        fact = device_fact(world, device)
        hardware = None if fact.startswith("none") else hardware_of(local_device(world, device))
        store = _agreed_store(world, {"device": fact}, "devices", timeout, hardware)
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


@contextmanager
def same_run(
    world: World, facts: Mapping[str, Any], timeout: timedelta, device: DeviceChoice = "auto"
) -> Iterator[None]:
    """Proves that the ranks of all nodes agree in `facts`, in the number of ranks on their node, in
    torch and in the type of their device, before anything is planned. The ranks of one node do:
    their launcher is the same.

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
    store = _agreed_store(world, facts, "same run", timeout)
    yield
    del store


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


def _agreed_store(
    world: World,
    facts: Mapping[str, Any],
    purpose: str,
    timeout: timedelta,
    own: str | None = None,
) -> Store:
    """The store of the processes, once all ranks have been found to agree; see `check_same_facts`.

    Args:
        purpose: a name of this comparison.
        timeout: how long to wait for the other ranks.

    Raises:
        ConfigError: on all ranks, with the first difference.
        CommunicationError: a rank did not come.
    """
    try:
        joined = join_store(world, timeout)
        check_same_facts(PrefixStore(purpose, joined), world.rank, world.size, facts, own)
    except RuntimeError as error:
        raise CommunicationError(
            f"not all {world.size} ranks came within {timeout.total_seconds():.0f} s"
        ) from error
    return joined
