"""The accelerator of this process and all that is its own: backend, streams, random numbers.

Everything asks `torch.accelerator`, so that a kind of device that PyTorch learns of is not named
here. No other file names a kind of accelerator, a backend, a stream or an event.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import ConfigError

CPU = torch.device("cpu")

HOST_BACKEND = "gloo"
"""Communicates over tensors on the CPU."""

BACKENDS = ("GLOO", "NCCL", "HCCL")
"""As their names begin the variables from which they read where to listen."""

Arrival = torch.Event
"""That an accelerator has come to some point of a stream."""

COLLECTIVE_KERNEL = re.compile("[nrhox]ccl", re.IGNORECASE)
"""What the names of kernels that communicate hold, of whichever library."""

LOOPBACK = "127.0.0.1"

VISIBLE = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""The variables with which a launcher says which devices a process sees."""


def loopback_interfaces() -> dict[str, str]:
    """The environment in which backends listen on the loopback interface only, which no other host
    can reach."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {f"{backend}_SOCKET_IFNAME": name for backend in BACKENDS for name in loopback}


def accelerator_kind() -> torch.device | None:
    """The kind of accelerator of this machine, if there is one."""
    return torch.accelerator.current_accelerator(check_available=True)


def num_accelerators() -> int:
    """How many this process sees."""
    return torch.accelerator.device_count() if accelerator_kind() is not None else 0


def device_of_rank(local_rank: int, local_size: int) -> torch.device:
    """The accelerator of one of `local_size` processes of this machine: that of its number, or the
    only one that its launcher lets it see. The CPU where there is none, or none over which
    processes communicate.

    Raises:
        ConfigError: there are fewer accelerators than processes.
    """
    kind, count = accelerator_kind(), num_accelerators()
    if kind is None or (local_size > 1 and not _communicates(kind)):
        return CPU
    if count >= local_size:
        return torch.device(kind.type, local_rank)
    if count == 1 and _visible():
        return torch.device(kind.type, 0)
    raise ConfigError(
        f"{local_size} ranks on this machine, but it has {count} {kind.type}"
        f" device{'s' * (count != 1)}: start at most {count} here, or compute on the CPU"
        " (train.device: cpu)"
    )


def hardware_of(device: torch.device) -> str | None:
    """A name that processes of one machine share if they compute on the same accelerator; None for
    the CPU, which they may share."""
    return None if device.type == "cpu" else f"{device} of {_visible() or 'all'}"


def device_of_group() -> torch.device:
    """The accelerator of this process if the process group (if any) works on it through a backend
    of its own, else the CPU. Where the program has chosen none, it is that of the local rank."""
    kind = accelerator_kind()
    if kind is None:
        return CPU
    index, local_rank = torch.accelerator.current_device_index(), 0
    if dist.is_initialized():
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        if backends.get(kind.type, HOST_BACKEND) == HOST_BACKEND:
            return CPU
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = index > 0 or local_rank >= num_accelerators()
    return torch.device(kind.type, index if chosen else local_rank)


def backend_of(device: torch.device) -> str:
    """The backend of processes that compute on `device`."""
    return str(dist.get_default_backend_for_device(device))


def use_device(device: torch.device) -> None:
    """Lets this process compute on `device` where it names none."""
    if device.type not in ("cpu", "meta") and device.index is not None:
        torch.accelerator.set_device_index(device)


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of PyTorch's generators of the CPU and of `device`, by its type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the generators to states from `generator_states`."""
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def pinned(tensor: Tensor) -> Tensor:
    """A copy in memory of the host from which, and to which, an accelerator copies on its own."""
    return tensor.pin_memory()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """What `device` takes for all that `work` calls, by its own clock."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    stream = torch.accelerator.current_stream(device)
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    stream.record_event(first)
    work()
    stream.record_event(last)
    last.synchronize()
    return first.elapsed_time(last) / 1e3


class Intervals:
    """Intervals of what `device` does, by its own clock; nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pending: deque[tuple[Arrival, Arrival, int]] = deque()

    def mark(self) -> float | Arrival:
        """Where the device is: for an accelerator once it has come to this point of its stream."""
        if self._device.type in ("cpu", "meta"):
            return time.perf_counter()
        event = Arrival(self._device, enable_timing=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return event

    def add(self, first: float | Arrival, last: float | Arrival, sign: int = 1) -> None:
        """Counts what lies between two marks, `sign` times."""
        if isinstance(first, float) and isinstance(last, float):
            self._seconds += sign * (last - first)
        elif isinstance(first, Arrival) and isinstance(last, Arrival):
            self._pending.append((first, last, sign))

    def taken(self) -> float:
        """The seconds of the intervals since it was last asked, as far as they are over."""
        while self._pending and self._pending[0][1].query():
            first, last, sign = self._pending.popleft()
            self._seconds += sign * first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def device_memory(device: torch.device) -> int:
    """Bytes of memory, for the CPU those of the machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def restart_peak(device: torch.device) -> None:
    """Lets `peak_bytes` count from now on."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most that PyTorch's allocator of an accelerator has given out since `restart_peak`; None
    for devices whose memory PyTorch does not count."""
    counted = device.type not in ("cpu", "meta")
    return torch.accelerator.max_memory_allocated(device) if counted else None


class AllocatedPeak:
    """The most that PyTorch's allocator of an accelerator has given out since `restart`, beyond
    what it had when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()  # What is freed later would count against what is measured.
        self._before = torch.accelerator.memory_allocated(device)

    @classmethod
    def of(cls, device: torch.device) -> AllocatedPeak | None:
        """None for devices whose memory PyTorch does not count."""
        return None if device.type in ("cpu", "meta") else cls(device)

    def restart(self) -> None:
        restart_peak(self._device)

    def bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device) - self._before


@dataclass(frozen=True)
class SideStream:
    """A stream of `device` beside the one on which the program runs."""

    device: torch.device
    stream: torch.Stream

    @classmethod
    def of(cls, device: torch.device) -> SideStream | None:
        """None for the CPU, which has no streams."""
        return None if device.type == "cpu" else cls(device, torch.Stream(device))

    @contextmanager
    def after_program(self) -> Iterator[None]:
        """What is called within it runs on this stream, after all that the program has called."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            yield

    def event(self) -> Arrival:
        """That all has run which was called on this stream."""
        return self.stream.record_event()


def _communicates(kind: torch.device) -> bool:
    """Whether a kind of accelerator has a backend of its own."""
    try:
        return backend_of(kind) != HOST_BACKEND
    except ValueError:
        return False


def _visible() -> str:
    return ",".join(os.environ[name] for name in VISIBLE if name in os.environ)
