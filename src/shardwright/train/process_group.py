"""The process group and the device of a launched rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwright.runtime.collective_errors import naming_redistributions

TIMEOUT = timedelta(minutes=10)


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


def local_device(world: World) -> torch.device:
    """The accelerator of this process; the CPU if there are fewer accelerators than processes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < world.local_size:
        return torch.device("cpu")
    return torch.device(accelerator.type, world.local_rank)


@contextmanager
def process_group(world: World, timeout: timedelta = TIMEOUT) -> Iterator[torch.device]:
    """Joins the default process group, with the default backend of this process's device.

    A world of size 1 needs no group, and creates none.

    Args:
        timeout: collectives that wait longer fail, because other ranks have died or are stuck.

    Yields:
        The device of this process.

    Raises:
        CommunicationError: if another rank is gone or stuck; the message names the redistribution,
            or who else waited for it.
    """
    device = local_device(world)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if world.size == 1:
        yield device
        return
    _die_with_launcher()
    with naming_redistributions():
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            store=join_store(world, timeout),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
        yield device
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
