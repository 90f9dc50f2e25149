"""Collectives and process groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import wraps
from inspect import isfunction, signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate import DDP, _ReplicateState
from torch.distributed.distributed_c10d import Store
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

from shardwright.core.torch_internals.modules import call_before

ReplicatedModule = DDP
"""Class from which a module is derived after `replicate` of `torch.distributed._composable`."""

FAKE = "fake"
"""Name of PyTorch's backend that simulates a process group in a single process."""

functional_collectives = torch.ops._c10d_functional
"""Collectives that return new tensors, which are ready after `wait_tensor`; `torch.compile` can
trace them."""


def is_collective(operator: Any) -> bool:
    """Whether an operator is one of `functional_collectives`."""
    return bool(operator.namespace == "_c10d_functional")


def is_group_call(operator: Any) -> bool:
    """Whether an operator is a `c10d` operator, which functions such as `dist.isend` call."""
    return bool(operator.namespace == "c10d")


def names_ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers that `DistributedDataParallel` would ignore."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def before_replicate(check: Callable[[nn.Module, Iterable[nn.Module]], None]) -> None:
    """Call `check` before `replicate` of `torch.distributed._composable` changes a module.

    The change is permanent for the process; a second check is ignored.

    Args:
        check: takes the module and the submodules that `replicate` ignores.
    """

    def check_arguments(
        _: object, module: nn.Module, ignored_modules: Iterable[nn.Module], **options: Any
    ) -> None:
        check(module, ignored_modules)

    call_before(_ReplicateState, "record_init_args", check_arguments)


class GroupClock:
    """Context manager that counts creations of process groups and measures their CPU time in
    seconds."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0

    def __enter__(self) -> GroupClock:
        self.original = distributed_c10d._new_group_with_tag
        # All functions that create a group call this one.
        distributed_c10d._new_group_with_tag = self.create_timed
        return self

    def __exit__(self, *_: object) -> None:
        distributed_c10d._new_group_with_tag = self.original

    def create_timed(self, *args: Any, **kwargs: Any) -> Any:
        # CPU time leaves out the wait for other ranks.
        started = time.process_time()
        try:
            return self.original(*args, **kwargs)
        finally:
            self.calls += 1
            self.seconds += time.process_time() - started


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group with the name that functional collectives take."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]


def name_of_local_group(ranks: list[int]) -> str:
    """Return the name of a process group created by its own ranks only
    (`use_local_synchronization`)."""
    # A hash of the ranks and of the number of groups of this process, which may differ on others.
    return str(distributed_c10d._hash_ranks_to_str(ranks))


def own_connection(group: dist.ProcessGroup) -> Store:
    """Return a clone of a group's store with its own connection, which other threads' waits do not
    block."""
    store: Store = group.get_group_store().clone()  # type: ignore[attr-defined]
    return store


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of collectives of `group`; None if the backend has no timeout."""
    # Not every backend has options, nor do all options have a timeout.
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def device_of_objects(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which PyTorch runs collectives of Python objects.

    Args:
        group: the process group; None for the default group.
    """
    return torch.device(distributed_c10d._get_object_coll_device(group))


def supports_split_group(group: dist.ProcessGroup) -> bool:
    """Whether `torch.distributed.split_group`, which creates all subgroups in one call, supports
    `group`."""
    device = group.bound_device_id
    # Only a group that is bound to a device, by `device_id`, can be split.
    return device is not None and group._get_backend(device).supports_splitting


WAITING_COLLECTIVES = (
    *("barrier", "all_reduce", "all_gather", "all_gather_object", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)
"""Names of functions that, unless asynchronous, synchronize all ranks: no rank returns before all
ranks have called the function."""

ROOTED_COLLECTIVES = (
    *("broadcast", "broadcast_object_list", "reduce", "gather", "gather_object", "scatter"),
    "scatter_object_list",
)
"""Names of functions that may return on one rank before other ranks have called the function."""


def has_all_ranks(group: Any) -> bool:
    """Whether `group` contains all ranks.

    Args:
        group: a process group; None for the default group, or another value for a group that does
            not contain this rank.
    """
    world = dist.group.WORLD
    if group is None or group is world:
        return True
    if world is None or not isinstance(group, dist.ProcessGroup):
        return False
    return bool(group.size() == world.size())


def around_world_collectives(context: Callable[[str, bool], AbstractContextManager[None]]) -> None:
    """Run each collective of all ranks inside a new context manager.

    Functions imported before this call are included. The change is permanent for the process; a
    second call is ignored.

    Args:
        context: makes the context manager, given the name of the function and whether the call
            synchronizes all ranks.
    """
    for name in (*WAITING_COLLECTIVES, *ROOTED_COLLECTIVES):
        function = getattr(dist, name, None)  # Names differ between versions.
        # The public functions are closures around their implementation. Replacing the content of
        # the closure's cell also reaches code that has imported them before.
        closure = getattr(function, "__closure__", None) or ()
        cells = (cell for cell in closure if isfunction(cell.cell_contents))
        cell = next(cells, None)
        if cell is not None and not hasattr(cell.cell_contents, "counts_calls"):
            waits = name in WAITING_COLLECTIVES
            cell.cell_contents = _wrap_collective(cell.cell_contents, name, waits, context)


def _wrap_collective(
    function: Callable[..., Any],
    name: str,
    waits: bool,
    context: Callable[[str, bool], AbstractContextManager[None]],
) -> Callable[..., Any]:
    names = list(signature(function).parameters)
    group_index = names.index("group")
    # Beyond all arguments if the function is never asynchronous.
    async_index = names.index("async_op") if "async_op" in names else len(names)

    def argument(index: int, keyword: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[index] if index < len(args) else kwargs.get(keyword)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = argument(group_index, "group", args, kwargs)
        if not has_all_ranks(group):
            return function(*args, **kwargs)
        is_async = bool(argument(async_index, "async_op", args, kwargs))
        with context(name, waits and not is_async):
            return function(*args, **kwargs)

    vars(call)["counts_calls"] = True
    return call
