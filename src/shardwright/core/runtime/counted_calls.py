"""Count collective calls of models, DTensors and the user's code, to detect deadlocked ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.runtime.devices import Devices, stages_of_plan
from shardwright.core.runtime.rank_calls import MAX_WAIT, RankCalls
from shardwright.core.torch_internals.autograd import around_backward
from shardwright.core.torch_internals.distributed import around_world_collectives
from shardwright.core.torch_internals.dtensor import around_redistributions

Params = ParamSpec("Params")
CallResult = TypeVar("CallResult")


@cache
def _get_counters_by_group() -> WeakKeyDictionary[dist.ProcessGroup, RankCalls]:
    """Return the counter of calls for each default process group of this process.

    The first call installs hooks in backward passes and in the collectives of `torch.distributed`.
    """
    around_backward(_count_backward_passes)
    around_world_collectives(_count_world_collective)
    around_redistributions(_count_redistribution)
    return WeakKeyDictionary()


def rank_calls() -> RankCalls | None:
    """Start to count this rank's collective calls, unless started, and return the counter; None
    with a single rank.

    All ranks must make their first call of this function at the same point of the program.
    """
    calls = watch_rank()
    if calls is not None and calls.counting_thread is None:
        calls.start_counting()
    return calls


def watch_rank() -> RankCalls | None:
    """Return the counter of this rank's collective calls; None with a single rank.

    The counter counts only after the first `rank_calls()`. Until then, it reports where this rank
    waits, once another rank counts.
    """
    if not has_other_ranks():
        return None
    groups, world = _get_counters_by_group(), dist.group.WORLD
    assert world is not None
    if world not in groups:
        groups[world] = RankCalls(world)
    return groups[world]


def _find_call_counter() -> RankCalls | None:
    """Return the counter of this rank's collective calls; None before `watch_rank()`."""
    world = dist.group.WORLD
    return None if world is None else _get_counters_by_group().get(world)


def collective_call(name: str, devices: Devices | None = None) -> AbstractContextManager[None]:
    """Return the context of a collective call that waits until all ranks have begun the call.

    For calls that one rank might make alone by mistake, such as saving a checkpoint.

    Args:
        name: name of the call, equal on all ranks.
        devices: the devices of the model; nothing is counted on one device.

    Raises:
        DataError: on all ranks, if they wait for each other in different calls.
    """
    calls = rank_calls() if devices is None or devices.is_distributed else None
    return nullcontext() if calls is None else calls.call(name, always_synchronizes=True)


def by_all_ranks(
    name: str,
) -> Callable[[Callable[Params, CallResult]], Callable[Params, CallResult]]:
    """Return a decorator that runs each call of a function in `collective_call(name)`."""

    def decorate(function: Callable[Params, CallResult]) -> Callable[Params, CallResult]:
        @wraps(function)
        def call(*args: Params.args, **kwargs: Params.kwargs) -> CallResult:
            with collective_call(name):
                return function(*args, **kwargs)

        return call

    return decorate


def model_call(name: str, devices: Devices) -> AbstractContextManager[None]:
    """Return the context of a model's call, which waits for all ranks in an unexpected call.

    Raises:
        DataError: on all ranks, if they wait for each other in different calls.
    """
    calls = rank_calls() if devices.is_distributed else None
    # The first model, often the only one, has the plain name.
    if devices.model > 1:
        name = f"model {devices.model}'s {name}"
    return nullcontext() if calls is None else calls.call(name)


def begin_backward() -> None:
    """Count the running backward pass of a model on several devices as a collective call."""
    calls = rank_calls()
    if calls is not None:
        calls.begin_backward()


def _count_backward_passes() -> AbstractContextManager[None]:
    # Also of models that are not planned, which must not begin to count.
    calls = _find_call_counter()
    if calls is None or calls.counting_thread is None:
        return nullcontext()
    return calls.backward_passes()


def counted_call(name: str, *, waits: bool = True) -> AbstractContextManager[None]:
    """Return the context that counts a collective call.

    Counts nothing before the first `rank_calls()`; errors of closed connections are explained.

    Args:
        name: name of the call, equal on all ranks.
        waits: whether the call returns only after all ranks have begun it; False for asynchronous
            calls and calls with a source rank.
    """
    calls = _find_call_counter()
    if calls is None:
        return nullcontext()
    if calls.counting_thread is None:
        return calls.explaining_errors()
    return calls.call(name, max_wait=math.inf if waits else MAX_WAIT)


def _count_world_collective(name: str, waits: bool) -> AbstractContextManager[None]:
    """Return the context that counts a collective over all ranks, including the user's own.

    Args:
        name: name of the function of `torch.distributed`.
        waits: whether the collective returns only after all ranks have called it.
    """
    calls = _find_call_counter()
    # Other threads, such as those of asynchronous checkpoints on accelerators, may use backends
    # that the calls of the counting thread do not use.
    counting_thread = calls.counting_thread if calls is not None else None
    if counting_thread not in (None, threading.current_thread()):
        return nullcontext()
    return counted_call(f"`{name}`", waits=waits)


def _count_redistribution(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Return the context that counts a redistribution of a DTensor, such as `full_tensor()`."""
    # Stages have different parameters, so not all ranks redistribute.
    if stages_of_plan(mesh) != 1:
        return nullcontext()
    return counted_call("DTensor redistribution")
