"""Runs a record, so far as somebody needs what it makes, with no more memory than that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.deferred.init_record import (
    Operation,
    Record,
    StorageView,
    TensorVersion,
    unchanged,
)
from shardwright.errors import DeferredError
from shardwright.torch_internals import pytree
from shardwright.torch_internals.dispatch import without_dispatch_modes, without_torch_function

Keep = Callable[[str, Tensor], Tensor]
"""What to keep of a finished tensor, given its name and the tensor."""


def replay(record: Record, wanted: Mapping[str, StorageView], keep: Keep) -> dict[str, Tensor]:
    """What `keep` keeps of each of the `wanted` tensors, which are on the CPU.

    Every tensor is given to `keep` as soon as it is finished, and freed where it is not kept. So
    memory is that of what is kept and the largest tensor with its temporaries.

    Raises:
        DeferredError: if one depends on a tensor that never had values, or on changed data.
    """
    schedule = plan_replay(record, wanted, ())
    if schedule.missing:
        raise DeferredError(_lost(record, wanted))
    return _run(record, schedule, wanted, keep)


def settle_generators(record: Record) -> None:
    """Brings every generator that still stands where a recorded draw has left it to the state that
    it would have if all had been drawn at once; others were used or seeded since."""
    for generator in record.generators():
        last = record.standing(generator)
        if last is None:
            continue
        if last not in record.after:
            _run(record, plan_replay(record, {}, (last,)), {}, lambda name, tensor: tensor)
        generator.set_state(record.after[last])
        record.stand(generator, last)


@dataclass(frozen=True)
class ReplaySchedule:
    """Which operations run.

    Args:
        steps: their numbers in order; after each, the storages that are finished and wanted, and
            those that nothing needs any more.
        missing: storages that are read but that no operation makes.
    """

    steps: tuple[tuple[int, frozenset[int], frozenset[int]], ...]
    missing: frozenset[int]


def plan_replay(
    record: Record, wanted: Mapping[str, StorageView], states: Iterable[int]
) -> ReplaySchedule:
    """Walks the record backwards from what is wanted.

    Args:
        states: draws whose generator's state afterwards is wanted.
    """
    finished = _finished(record, {piece.storage for piece in wanted.values()})
    alive: set[int] = set()
    drawn = {number for number in states if number not in record.after}
    steps = []
    for number in reversed(range(len(record.operations))):
        operation = record.operations[number]
        ready = frozenset(finished.get(number, ()))
        if number not in drawn and not (alive | ready) & operation.writes:
            continue
        steps.append((number, ready, operation.storages - alive))
        alive |= ready
        alive -= operation.fills
        alive |= operation.reads
        if operation.draw is not None and isinstance(operation.draw.start, int):
            drawn.update({operation.draw.start} - record.after.keys())
    never = {piece.storage for piece in wanted.values()}.difference(*finished.values())
    return ReplaySchedule(tuple(reversed(steps)), frozenset(alive | never))


def _finished(record: Record, storages: set[int]) -> dict[int, set[int]]:
    """By number of an operation, those of `storages` that it is the last to write."""
    left, finished = set(storages), {}
    for number in reversed(range(len(record.operations))):
        ready = left & record.operations[number].writes
        if ready:
            finished[number] = ready
            left -= ready
    return finished


def _run(
    record: Record, schedule: ReplaySchedule, wanted: Mapping[str, StorageView], keep: Keep
) -> dict[str, Tensor]:
    names: dict[int, list[str]] = {}
    for name, piece in wanted.items():
        names.setdefault(piece.storage, []).append(name)
    memory: dict[int, torch.UntypedStorage] = {}
    kept = {}
    with _undisturbed(record):
        for number, ready, dead in schedule.steps:
            _execute(record, number, memory)
            for storage in sorted(ready):
                for name in names[storage]:
                    kept[name] = keep(name, wanted[name].of(memory[storage]))
            for storage in dead:
                memory.pop(storage, None)
    return kept


def _execute(record: Record, number: int, memory: dict[int, torch.UntypedStorage]) -> None:
    operation = record.operations[number]

    def real(leaf: Any) -> Any:
        if isinstance(leaf, TensorVersion):
            return unchanged(leaf)
        if not isinstance(leaf, StorageView):
            return leaf
        if leaf.storage not in memory:  # nobody needs what was there
            size = record.nbytes(leaf.storage)
            memory[leaf.storage] = torch.empty(size, dtype=torch.uint8).untyped_storage()
        return leaf.of(memory[leaf.storage])

    args, kwargs = pytree.tree_map(real, (operation.args, operation.kwargs))
    torch.set_default_dtype(operation.default_dtype)
    draw = operation.draw
    if draw is not None:
        start = record.after[draw.start] if isinstance(draw.start, int) else draw.start
        draw.generator.set_state(start)
    results = operation.function(*args, **kwargs)
    if draw is not None:
        record.after[number] = draw.generator.get_state()
    for piece, result in zip(operation.results, pytree.tree_leaves(results), strict=True):
        if piece is not None:
            memory[piece.storage] = _as_recorded(operation, piece, result)


def _as_recorded(operation: Operation, piece: StorageView, result: Tensor) -> torch.UntypedStorage:
    """The storage of a result; its other pieces are told by how it lay on the meta device."""
    if (tuple(result.shape), result.stride(), result.storage_offset(), result.dtype) != (
        piece.shape,
        piece.stride,
        piece.offset,
        piece.dtype,
    ):
        raise DeferredError(
            f"{operation.function} gives a tensor that lies otherwise in memory than on the meta "
            f"device: {tuple(result.shape)} with strides {result.stride()}, recorded as "
            f"{piece.shape} with strides {piece.stride}; build this part outside of "
            "no_init_parameters"
        )
    return result.untyped_storage()


@contextmanager
def _undisturbed(record: Record) -> Iterator[None]:
    """Without the caller's modes; generators and the default dtype stay as they are."""
    states = [(generator, generator.get_state()) for generator in record.generators()]
    dtype = torch.get_default_dtype()
    try:
        with without_dispatch_modes(), without_torch_function(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        for generator, state in states:
            generator.set_state(state)


def _lost(record: Record, wanted: Mapping[str, StorageView]) -> str:
    """Says which of the wanted tensors has no values."""
    name = next(
        name for name, piece in wanted.items() if plan_replay(record, {name: piece}, ()).missing
    )
    return (
        f"{name!r} cannot be initialized: it is made from a tensor on the meta device that never "
        "had values (made outside of no_init_parameters, or moved there with `.to('meta')`); make "
        "that tensor inside, or give it values"
    )
