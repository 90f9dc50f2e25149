"""Process group and device of a launched rank."""

from __future__ import annotations

import ctypes
import os
import re
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
from shardwright.plain_data import short_repr
from shardwright.run.launch.rendezvous_store import open_private_store, serve_tcp_store

# PyTorch's default for NCCL.
TIMEOUT = timedelta(minutes=10)

MAX_RANKS = 2**24
"""Largest number of ranks that is accepted from a launcher, far more than any run has."""

DeviceChoice = Literal["auto", "cpu"]
"""Device type of ranks: `auto` uses accelerators if the machine has any, `cpu` does not."""


@dataclass(frozen=True)
class World:
    """Rank and world size of this process, set by its launcher: torchrun or Shardwright.

    Args:
        rank, size: global rank and number of ranks.
        local_rank, local_size: rank and number of ranks on this node.
        restarts: number of restarts after failures so far.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int = 0

    @staticmethod
    def from_environment() -> World:
        """Read the environment variables of the launcher; without a launcher the size is 1.

        Raises:
            ConfigError: if a variable is not a number, or the numbers contradict each other.
        """
        if not is_launched():
            return World(rank=0, size=1, local_rank=0, local_size=1)
        size = _read_number("WORLD_SIZE", range(1, MAX_RANKS + 1))
        rank = _read_number("RANK", range(size))
        # A launcher that sets no local ranks runs all of them on this machine.
        local_size = _read_number("LOCAL_WORLD_SIZE", range(1, size + 1), size)
        local_rank = _read_number("LOCAL_RANK", range(local_size), rank)
        restarts = _read_number("TORCHELASTIC_RESTART_COUNT", range(2**31), 0)
        return World(rank, size, local_rank, local_size, restarts)


def _read_number(name: str, allowed: range, default: int | None = None) -> int:
    """Read a number from an environment variable of the launcher.

    Raises:
        ConfigError: if the variable is missing without a default, or not one of the `allowed`
            numbers.
    """
    number = os.environ.get(name, "" if default is None else str(default))
    # More digits than any allowed number has are also more than `int` may accept.
    if re.fullmatch(r"\d{1,18}", number, re.ASCII) and int(number) in allowed:
        return int(number)
    raise ConfigError(
        f"the environment variable {name} is {short_repr(number)}, not a number from"
        f" {allowed.start} to {allowed.stop - 1}\nstart the ranks with `shardwright train`,"
        " `shardwright launch` or torchrun, or unset RANK and WORLD_SIZE to run one process"
    )


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_device(world: World, choice: DeviceChoice = "auto") -> torch.device:
    """Return the accelerator of this rank; the CPU if `choice` is `cpu` or the machine has no
    accelerator.

    Raises:
        ConfigError: if this machine has fewer accelerators than ranks.
    """
    return CPU if choice == "cpu" else device_of_rank(world.local_rank, world.local_size)


@contextmanager
def process_group(
    world: World, timeout: timedelta = TIMEOUT, device: DeviceChoice = "auto"
) -> Iterator[torch.device]:
    """Context with the default process group, on the default backend of this process's device.

    A world of size 1 creates no group.

    Args:
        world: rank and world size of this process.
        timeout: timeout of collectives, after which a missing rank counts as dead or stuck.
        device: `cpu`, or by default the accelerator of the local rank, if the machine has any.

    Yields:
        The device of this process.

    Raises:
        ConfigError: on all ranks, if ranks have different device types, or two share an
            accelerator.
        CommunicationError: if another rank is dead or stuck; the message names the redistribution,
            or the other ranks that waited.
    """
    if world.size == 1:
        local = local_device(world, device)
        use_device(local)
        yield local
        return
    _request_kill_with_agent()
    with naming_redistributions():
        # Device types are compared before the group is created: otherwise ranks with different
        # backends would wait for each other in its initialization.
        device_type = device_type_or_error(world, device)
        # A rank without a device takes part in the comparison, so that all ranks raise the error.
        hardware = (
            None if device_type.startswith("none") else hardware_of(local_device(world, device))
        )
        store = _join_checked_store(world, {"device": device_type}, "devices", timeout, hardware)
        local = local_device(world, device)
        use_device(local)
        dist.init_process_group(
            backend_of(local),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            # Bound to its device, NCCL can split the communicator into groups.
            device_id=None if local.type == "cpu" else local,
        )
        yield local
    # Not in a `finally`: after an error this would block while other ranks wait in a collective.
    dist.destroy_process_group()


@contextmanager
def check_same_run(
    world: World, facts: Mapping[str, Any], timeout: timedelta, device: DeviceChoice = "auto"
) -> Iterator[None]:
    """Context that first checks that all nodes run the same configuration.

    Compares `facts`, the number of ranks per node, the PyTorch version and the device type. Does
    nothing on a single node, whose ranks have the same launcher.

    Args:
        facts: JSON values to compare, by name.
        timeout: longest time to wait for the other ranks.
        device: `cpu`, or by default the accelerator of the local rank, if the machine has any.

    Raises:
        ConfigError: if a fact differs between ranks; raised on all of them.
        CommunicationError: if a rank did not join in time.
    """
    if world.local_size == world.size:
        yield
        return
    sizes = {"torch": torch.__version__, "ranks on the node": world.local_size}
    facts = {**sizes, "device": device_type_or_error(world, device), **facts}
    # Kept alive until the process group, which joins the same store, has ended.
    store = _join_checked_store(world, facts, "same run", timeout)
    yield
    del store


def _request_kill_with_agent() -> None:
    """Make the kernel kill this rank when its elastic agent dies (`PR_SET_PDEATHSIG`).

    Otherwise the rank would outlive its agent while ranks of other nodes continue.
    """
    if dist.is_torchelastic_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def join_store(world: World, timeout: timedelta) -> Store:
    """Join the rendezvous store: the launcher's file, or the `TCPStore` of torchrun or rank 0.

    Keys get a prefix with the number of restarts, because a launcher's store survives a restart.
    """
    # With several nodes, rank 0 serves a new store at each start, and nodes that joined later have
    # counted fewer restarts: their prefixes would differ.
    is_persistent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    store = open_private_store()
    if store is None:
        # Checked first, as PyTorch reads them too, with tracebacks for errors.
        port = _read_number("MASTER_PORT", range(2**16))
        host = os.environ.get("MASTER_ADDR")
        if not host:
            raise ConfigError(
                "the environment variable MASTER_ADDR is missing\n"
                "set it to the address of rank 0, such as 127.0.0.1 on one machine"
            )
        if world.rank == 0 and not is_persistent:
            store = serve_tcp_store(host, port, timeout)
        else:
            store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    store.set_timeout(timeout)
    restarts = world.restarts if is_persistent else 0
    return PrefixStore(f"restart {restarts} of {world.size} ranks", store)


def device_type_or_error(world: World, choice: DeviceChoice) -> str:
    """Return the device type of this rank, or `none:` and the reason why it has no device."""
    try:
        return local_device(world, choice).type
    except ConfigError as error:
        return f"none: {error}"


def _join_checked_store(
    world: World,
    facts: Mapping[str, Any],
    purpose: str,
    timeout: timedelta,
    unique_value: str | None = None,
) -> Store:
    """Join the rendezvous store, and check that `facts` are equal on all ranks.

    Args:
        facts: JSON values to compare, by name.
        purpose: prefix of the store keys of this comparison.
        timeout: longest time to wait for the other ranks.
        unique_value: a value that must differ between ranks, such as the hardware id of a device.

    Raises:
        ConfigError: if a fact differs between ranks, or two ranks have equal `unique_value`; raised
            on all ranks.
        CommunicationError: if a rank did not join in time.
    """
    try:
        joined = join_store(world, timeout)
        check_same_facts(PrefixStore(purpose, joined), world.rank, world.size, facts, unique_value)
    # Stores raise subclasses of RuntimeError when a wait takes too long.
    except RuntimeError as error:
        raise CommunicationError(
            f"not all {world.size} ranks joined within {timeout.total_seconds():.0f} s\n"
            "check the logs of all ranks and, with several nodes, that each node was started"
        ) from error
    return joined
