"""The accelerator of this process: its backend, streams, events, memory and random generators.

All functions use `torch.accelerator`, so new device types work unchanged. No other module depends
on device types, backends, streams or events.
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
"""Name of the communication backend for CPU tensors."""

BACKENDS = ("GLOO", "NCCL", "HCCL")
"""Prefixes of the environment variables `*_SOCKET_IFNAME`, which select the network interface of a
backend."""

DeviceEvent = torch.Event
"""An event recorded in a stream of an accelerator."""

COLLECTIVE_KERNEL = re.compile("[nrhox]ccl", re.IGNORECASE)
"""Pattern of the names of communication kernels of NCCL, RCCL, HCCL, oneCCL and XCCL."""

LOOPBACK = "127.0.0.1"

VISIBLE_DEVICES_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""Environment variables with which launchers restrict the devices visible to a process."""


def loopback_interfaces() -> dict[str, str]:
    """Return environment variables that make backends listen on the loopback interface only."""
    # "lo" on Linux, "lo0" on macOS.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {f"{backend}_SOCKET_IFNAME": name for backend in BACKENDS for name in loopback}


def accelerator_type() -> torch.device | None:
    """Return the type of this machine's accelerators as a device without index; None without an
    accelerator."""
    # Without the check, PyTorch built with CUDA returns CUDA on machines without a GPU.
    return torch.accelerator.current_accelerator(check_available=True)


def num_accelerators() -> int:
    """Return the number of accelerators that are visible to this process."""
    return torch.accelerator.device_count() if accelerator_type() is not None else 0


def device_of_rank(local_rank: int, local_size: int) -> torch.device:
    """Return the accelerator of a process: the device of index `local_rank`, or the only device
    that the process sees.

    Return the CPU if there is no accelerator, or if several processes need to communicate and the
    accelerator has no communication backend.

    Args:
        local_rank: index of the process on this machine.
        local_size: number of processes on this machine.

    Raises:
        ConfigError: if there are fewer accelerators than processes.
    """
    accelerator, count = accelerator_type(), num_accelerators()
    # Several ranks need a backend that communicates the accelerator's tensors; MPS has none.
    if accelerator is None or (local_size > 1 and not _has_communication_backend(accelerator)):
        return CPU
    if count >= local_size:
        return torch.device(accelerator.type, local_rank)
    # Some launchers make only its own device visible to each process, which is then number 0.
    if count == 1 and _read_visible_devices():
        return torch.device(accelerator.type, 0)
    raise ConfigError(
        f"{local_size} ranks were started on this machine, which has {count} {accelerator.type}"
        f" device{'s' * (count != 1)}\nstart at most {count}"
        f" rank{'s' * (count != 1)} on this machine, or compute on the CPU (`train.device: cpu`)"
    )


def hardware_of(device: torch.device) -> str | None:
    """Return the name of the physical accelerator, equal for all processes that share it.

    Return None for the CPU, which processes may share.
    """
    # The variable is part of the name: device 0 of two processes may be two accelerators.
    return None if device.type == "cpu" else f"{device} of {_read_visible_devices() or 'all'}"


def device_of_group() -> torch.device:
    """Return the device on which this process runs collectives.

    This is the process's accelerator if the process group has a backend for accelerators, by
    default the device of index `LOCAL_RANK`. Otherwise it is the CPU.
    """
    accelerator = accelerator_type()
    if accelerator is None:
        return CPU
    index, local_rank = torch.accelerator.current_device_index(), 0
    if dist.is_initialized():
        # For example `cpu:gloo,cuda:nccl`; a group made with "gloo" alone uses gloo for CUDA
        # tensors too.
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        if backends.get(accelerator.type, HOST_BACKEND) == HOST_BACKEND:
            return CPU
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
    # Device 0 is current unless the process selects a device. If a launcher makes only its own
    # device visible to each process, there are fewer devices than ranks.
    chosen = index > 0 or local_rank >= num_accelerators()
    return torch.device(accelerator.type, index if chosen else local_rank)


def device_of_host_values() -> torch.device:
    """Return the device for collectives of a few host values: the CPU if the process group has a
    backend for CPU tensors, otherwise the device of the group.

    Collectives on the CPU do not wait for the accelerator.
    """
    backends = dist.get_backend_config().split(",")
    has_host_backend = any(pair.partition(":")[0] == CPU.type for pair in backends)
    return CPU if has_host_backend else device_of_group()


def backend_of(device: torch.device) -> str:
    """Return the name of the default communication backend for tensors on `device`."""
    return str(dist.get_default_backend_for_device(device))


def use_device(device: torch.device) -> None:
    """Make `device` the current device of this process."""
    # NCCL and object collectives use the current device of a process, by default device 0, which
    # all ranks of a node would share.
    if device.type not in ("cpu", "meta") and device.index is not None:
        torch.accelerator.set_device_index(device)


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of PyTorch's default generators of the CPU and of `device`, by device
    type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the default generators of the CPU and of `device` to states from `generator_states`."""
    for device_type, state in states.items():
        if device_type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def forked_generators() -> Iterator[Callable[[int], object]]:
    """Yield a function that seeds the default generators of the CPU and the current accelerator;
    restore their states at exit."""
    # `torch.manual_seed` and `fork_rng()` would take all accelerators, and the former formats a
    # stack trace for each type that is not initialized, which takes longer than many operators.
    available = torch.accelerator.is_available()
    # An empty list forks the generator of the CPU only.
    with torch.random.fork_rng([torch.accelerator.current_device_index()] if available else []):
        yield _seed_default_generators if available else torch.default_generator.manual_seed


def _seed_default_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    torch.get_device_module().manual_seed(seed)


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in pinned host memory, which allows asynchronous copies."""
    # A copy from pageable memory blocks the host until it is done, even with `non_blocking=True`.
    return tensor.pin_memory()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `device` takes to run the operators that `work()` launches."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    stream = torch.accelerator.current_stream(device)
    # By events, as launches return before the device has run; earlier launches must not count.
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    stream.record_event(first)
    work()
    stream.record_event(last)
    last.synchronize()
    return first.elapsed_time(last) / 1e3


class Intervals:
    """Total of time intervals on `device`, by the device's clock and without synchronization."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pending: deque[tuple[DeviceEvent, DeviceEvent, int]] = deque()

    def timestamp(self) -> float | DeviceEvent:
        """Return the current time: seconds on the CPU, a recorded event on an accelerator."""
        if self._device.type in ("cpu", "meta"):
            return time.perf_counter()
        event = DeviceEvent(self._device, enable_timing=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return event

    def add(self, first: float | DeviceEvent, last: float | DeviceEvent, sign: int = 1) -> None:
        """Add the interval between two results of `timestamp`, or subtract it if `sign` is -1."""
        # Both are floats or both are events, as `timestamp` returns one type per device.
        if isinstance(first, float) and isinstance(last, float):
            self._seconds += sign * (last - first)
        elif isinstance(first, DeviceEvent) and isinstance(last, DeviceEvent):
            self._pending.append((first, last, sign))

    def take_seconds(self) -> float:
        """Return the total seconds of completed intervals, and reset the total to 0."""
        # Events of a stream complete in order: the first pending event ends the loop.
        # `elapsed_time` is in milliseconds.
        while self._pending and self._pending[0][1].query():
            first, last, sign = self._pending.popleft()
            self._seconds += sign * first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def device_memory(device: torch.device) -> int:
    """Return the size of the device's memory in bytes; for the CPU, the size of the machine's
    memory."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # `mem_get_info` returns free and total bytes.
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def reset_peak_memory(device: torch.device) -> None:
    """Reset PyTorch's peak memory statistics of `device`; no effect on the CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory allocated by PyTorch since `reset_peak_memory`, in bytes; None for the
    CPU, which has no statistics."""
    has_statistics = device.type not in ("cpu", "meta")
    return torch.accelerator.max_memory_allocated(device) if has_statistics else None


class AllocatedPeak:
    """Measurement of the peak memory allocated by PyTorch since `restart`, in bytes above the
    memory allocated at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()  # otherwise memory that is freed later would reduce the measured peak
        self._before = torch.accelerator.memory_allocated(device)

    @classmethod
    def of(cls, device: torch.device) -> AllocatedPeak | None:
        """Start to measure the memory of `device`; return None for the CPU, which has no
        statistics."""
        return None if device.type in ("cpu", "meta") else cls(device)

    def restart(self) -> None:
        reset_peak_memory(self._device)

    def bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device) - self._before


@dataclass(frozen=True)
class SideStream:
    """A stream of `device` that runs concurrently with the compute stream."""

    device: torch.device
    stream: torch.Stream

    @classmethod
    def of(cls, device: torch.device) -> SideStream | None:
        """Create a stream of `device`; return None for the CPU, which has no streams."""
        return None if device.type == "cpu" else cls(device, torch.Stream(device))

    @contextmanager
    def after_program(self) -> Iterator[None]:
        """Launch the operators of the context on this stream, after all operators launched by the
        program so far."""
        # The device waits, not the host.
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            yield

    def event(self) -> DeviceEvent:
        """Record an event after all operators launched on this stream, and return it."""
        return self.stream.record_event()


def _has_communication_backend(accelerator: torch.device) -> bool:
    try:
        return backend_of(accelerator) != HOST_BACKEND
    # Raised for device types without any backend, such as MPS.
    except ValueError:
        return False


def _read_visible_devices() -> str:
    return ",".join(os.environ[name] for name in VISIBLE_DEVICES_VARIABLES if name in os.environ)
