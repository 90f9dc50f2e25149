"""Replay the recorded operations that compute requested tensors, with minimal peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.deferred.init_record import (
    Operation,
    Record,
    StorageView,
    TensorVersion,
    check_unchanged,
)
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import without_dispatch_modes, without_torch_function
from shardwright.errors import DeferredError

OnFinished = Callable[[str, Tensor], Tensor]
"""Function from the name and complete value of a tensor to the result to store, such as a shard."""


def replay(
    record: Record, requested: Mapping[str, StorageView], on_finished: OnFinished
) -> dict[str, Tensor]:
    """Compute the `requested` tensors on the CPU, and return the results of `on_finished` by name.

    Each tensor is passed to `on_finished` as soon as it is complete, and then freed. Peak memory is
    therefore the size of the results plus the size of the largest tensor with its temporaries.

    Args:
        record: the record of the operations.
        requested: views to compute, by name.
        on_finished: called with the name and value of each tensor.

    Raises:
        DeferredError: if a tensor depends on a meta tensor that was never initialized, or on data
            that has been modified.
    """
    schedule = plan_replay(record, requested, ())
    if schedule.missing:
        raise DeferredError(_make_uninitialized_message(record, requested))
    return _run_scheduled_operations(record, schedule, requested, on_finished)


def advance_generators(record: Record) -> None:
    """Advance the record's generators as ordinary construction of the model would.

    Generators that have been used or seeded since the last recorded draw are unchanged.
    """
    for generator in record.generators():
        last = record.last_draw(generator)
        if last is None:
            continue
        # If no requested tensor needed the last draw, replay it for the state after it.
        if last not in record.states_after:
            _run_scheduled_operations(
                record, plan_replay(record, {}, (last,)), {}, lambda name, tensor: tensor
            )
        generator.set_state(record.states_after[last])
        record.add_generator_state(generator, last)


@dataclass(frozen=True)
class ReplaySchedule:
    """The recorded operations that compute requested tensors, in order.

    Args:
        steps: for each operation, (its index in the record, requested storages that it completes,
            storages that can be freed after it).
        missing: storages that are read or requested but never initialized.
    """

    steps: tuple[tuple[int, frozenset[int], frozenset[int]], ...]
    missing: frozenset[int]


def plan_replay(
    record: Record, requested: Mapping[str, StorageView], states: Iterable[int]
) -> ReplaySchedule:
    """Find the operations to replay by walking the record backwards from the requested tensors.

    Args:
        record: the record of the operations.
        requested: views to compute, by name.
        states: indices of operations with random draws; the generator states after these draws are
            also computed.
    """
    finished = _group_storages_by_last_write(record, {view.storage for view in requested.values()})
    live: set[int] = set()
    required_draws = {number for number in states if number not in record.states_after}
    steps = []
    for number in reversed(range(len(record.operations))):
        operation = record.operations[number]
        finished_here = frozenset(finished.get(number, ()))
        if number not in required_draws and not (live | finished_here) & operation.writes:
            continue
        # Backwards, a storage that is not live here is not used later: it is freed after this step.
        steps.append((number, finished_here, operation.storages - live))
        # Earlier writes to these storages may be part of their values.
        live |= finished_here
        # Values before a complete overwrite are not needed, unless the operation also reads them.
        live -= operation.fills
        live |= operation.reads
        # A draw that starts where another ended needs the state after that draw.
        if operation.draw is not None and isinstance(operation.draw.start, int):
            required_draws.update({operation.draw.start} - record.states_after.keys())
    never_written = {view.storage for view in requested.values()}.difference(*finished.values())
    return ReplaySchedule(tuple(reversed(steps)), frozenset(live | never_written))


def _group_storages_by_last_write(record: Record, storages: set[int]) -> dict[int, set[int]]:
    """Group storages by the index of the operation that writes them last.

    Args:
        record: the record of the operations.
        storages: the storages to look up.
    """
    # Backwards: the first operation found that writes a storage is the last to do so.
    remaining, finished = set(storages), {}
    for number in reversed(range(len(record.operations))):
        finished_here = remaining & record.operations[number].writes
        if finished_here:
            finished[number] = finished_here
            remaining -= finished_here
    return finished


def _run_scheduled_operations(
    record: Record,
    schedule: ReplaySchedule,
    requested: Mapping[str, StorageView],
    on_finished: OnFinished,
) -> dict[str, Tensor]:
    names: dict[int, list[str]] = {}
    for name, view in requested.items():
        names.setdefault(view.storage, []).append(name)
    storages: dict[int, torch.UntypedStorage] = {}
    results = {}
    # A replay may run in the middle of a training step: it must not move the caller's generators.
    with _isolate_replay(record):
        for number, finished_here, freeable in schedule.steps:
            _run_recorded_operation(record, number, storages)
            # Storages are numbered in the order of their creation, so results follow the order of
            # the model.
            for storage in sorted(finished_here):
                for name in names[storage]:
                    results[name] = on_finished(name, requested[name].of(storages[storage]))
            for storage in freeable:
                storages.pop(storage, None)
    return results


def _run_recorded_operation(
    record: Record, number: int, storages: dict[int, torch.UntypedStorage]
) -> None:
    operation = record.operations[number]

    def real_argument(leaf: Any) -> Any:
        if isinstance(leaf, TensorVersion):
            return check_unchanged(leaf)
        if not isinstance(leaf, StorageView):
            return leaf
        # A storage that does not exist yet is only written: `plan_replay` has found no read of it.
        if leaf.storage not in storages:
            size = record.nbytes(leaf.storage)
            storages[leaf.storage] = torch.empty(size, dtype=torch.uint8).untyped_storage()
        return leaf.of(storages[leaf.storage])

    args, kwargs = pytree.tree_map(real_argument, (operation.args, operation.kwargs))
    # The dtype of `torch.rand(3)` is the default at the time of the call.
    torch.set_default_dtype(operation.default_dtype)
    draw = operation.draw
    if draw is not None:
        start = record.states_after[draw.start] if isinstance(draw.start, int) else draw.start
        # Set before each draw, as a replay skips draws whose end states are known and not needed.
        draw.generator.set_state(start)
    results = operation.function(*args, **kwargs)
    if draw is not None:
        record.states_after[number] = draw.generator.get_state()
    for view, result in zip(operation.results, pytree.tree_leaves(results), strict=True):
        if view is not None:
            storages[view.storage] = _get_result_storage(operation, view, result)


def _get_result_storage(
    operation: Operation, view: StorageView, result: Tensor
) -> torch.UntypedStorage:
    """Return the storage of `result`, which later operations access by the recorded views.

    Raises:
        DeferredError: if shape, strides, offset or dtype differ from the result on the meta device.
    """
    # The recorded views of later operations assume the memory layout of the meta result.
    if (tuple(result.shape), result.stride(), result.storage_offset(), result.dtype) != (
        view.shape,
        view.stride,
        view.offset,
        view.dtype,
    ):
        raise DeferredError(
            f"`{operation.function}` returns a tensor of shape {tuple(result.shape)} and strides "
            f"{result.stride()} on the CPU, but of shape {view.shape} and strides {view.stride} on "
            "the meta device\nbuild this part of the model outside `no_init_parameters`"
        )
    return result.untyped_storage()


@contextmanager
def _isolate_replay(record: Record) -> Iterator[None]:
    """Within the context, disable the caller's modes and gradients for a replay.

    At the end, the generators of the record and the default dtype are restored.
    """
    # A replay leaves no trace in the caller's random stream; `advance_generators` moves it on
    # purpose.
    states = [(generator, generator.get_state()) for generator in record.generators()]
    dtype = torch.get_default_dtype()
    try:
        with without_dispatch_modes(), without_torch_function(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        for generator, state in states:
            generator.set_state(state)


def _make_uninitialized_message(record: Record, requested: Mapping[str, StorageView]) -> str:
    """Return the error message for the first requested tensor that was never initialized."""
    # One tensor at a time: a plan for all tensors does not tell which one lacks values.
    name = next(
        name for name, view in requested.items() if plan_replay(record, {name: view}, ()).missing
    )
    return (
        f"{name!r} cannot be initialized, as it depends on a meta tensor that never had values "
        "(created outside `no_init_parameters`, or moved by `.to('meta')`)\n"
        "create that tensor inside `no_init_parameters`, or on the CPU"
    )
