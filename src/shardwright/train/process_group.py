"""The process group that a launched rank joins, and the device it computes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwright.runtime.collective_errors import naming_conversions

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """What a launcher (torchrun, or ours) tells a process in its environment.

    Args:
        restarts: how often the processes have been started before, because some failed.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int = 0

    @staticmethod
    def from_environment() -> World:
        """The world of this process; of it alone when no launcher started it."""
        if not launched():
            return World(rank=0, size=1, local_rank=0, local_size=1)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        return World(rank, size, local_rank, local_size, restarts)


def launched() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_device(world: World) -> torch.device:
    """The accelerator of this process; the CPU where there are fewer of them than processes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < world.local_size:
        return torch.device("cpu")
    return torch.device(accelerator.type, world.local_rank)


@contextmanager
def process_group(world: World, timeout: timedelta = TIMEOUT) -> Iterator[torch.device]:
    """Be part of the group of all processes, over the backend of this process's device; gives the
    device. A world of one process needs no group and makes none.

    Args:
        timeout: a collective that waits longer fails: the other ranks are gone or stuck.

    Raises:
        CommunicationError: a collective of a planned program failed; names the conversion.
    """
    device = local_device(world)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if world.size == 1:
        yield device
        return
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=_store(world, timeout),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    with naming_conversions():
        yield device
    # Not after an error: other ranks may wait in a collective, which this would wait for.
    dist.destroy_process_group()


def _store(world: World, timeout: timedelta) -> Store:
    """The launcher's store, in which the processes find each other. It lives through restarts, so
    what the processes of an earlier start wrote there must not be read by those of this one."""
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"restart {world.restarts} of {world.size} ranks", store)
