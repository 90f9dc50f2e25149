"""Detect ranks that call the model differently than others, or with another batch.

Each call starts an all-reduce of a few numbers per rank: a hash of the call's signature and, in the
first calls and some later ones, a hash of the inputs. The result is read when a later call begins,
so nothing waits for it. Only the first call of each signature waits, before anything runs, because
different programs on different ranks would deadlock.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.agreement.content_hash import content_hash, text_hash
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.misuse.ranks import found_by_all, is_due
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.runtime.accelerator import DeviceEvent, SideStream, pinned
from shardwright.core.runtime.devices import Devices
from shardwright.errors import DataError

FIRST_CALLS = 10
"""Number of first calls that compare the contents of the batch."""

EVERY = 100
"""Later, one of this many calls compares contents."""

MOST_KINDS = 256
"""Number of cached call signatures; an evicted one is compared like a new one."""

UNREAD = 2
"""Number of pending comparisons from which on a call waits for the oldest."""

GLOBAL_BATCH = (
    "every rank must pass the same global batch: draw it in one order from one seed, as"
    " shardwright.run.BatchSampler does, without a DistributedSampler; to pass a shard of the batch"
    " on each rank, plan with dataset_strategy='data_parallel'"
)
SHARD_OF_BATCH = (
    "dataset_strategy decides which ranks pass the same shard of the batch: use"
    " shardwright.run.BatchSampler or shardwright.run.local_batch"
)


@dataclass(frozen=True)
class SharedInputs:
    """Inputs with the same sharding.

    Args:
        leaf_indices: their positions among the leaves of a call's arguments.
        names: names of the inputs.
        replica_groups: for each shard that several ranks must pass, these ranks.
    """

    leaf_indices: tuple[int, ...]
    names: tuple[str, ...]
    replica_groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CallComparison:
    """A pending comparison of one call.

    Args:
        call: the number of the call, from 1.
        rows: one row per rank, on the host; valid once the comparison has arrived.
        hashes: hashes of this rank's inputs, kept alive until they have been read.
        work: the asynchronous all-reduce.
        arrival: the event of the copy to the host; None on the CPU.
    """

    call: int
    rows: Tensor
    hashes: Sequence[Tensor]
    work: Any
    arrival: DeviceEvent | None

    def has_arrived(self) -> bool:
        return bool(self.work.is_completed() if self.arrival is None else self.arrival.query())

    def wait(self) -> None:
        if self.arrival is None:
            self.work.wait()
        else:
            self.arrival.synchronize()


class BatchGuard:
    """Compare the calls of a module between ranks; every rank must have a guard.

    Args:
        devices: the devices of the program.
        graph: the graph, whose inputs are the arguments of the calls.
        arrivals: for inputs of which each rank passes its shard, the axes of each dimension.
    """

    def __init__(self, devices: Devices, graph: Graph, arrivals: Mapping[str, CutAxes]) -> None:
        self._device, self._waits = devices.device, devices.waits
        self._active = devices.is_distributed and has_other_ranks()
        self._remedy = SHARD_OF_BATCH if arrivals else GLOBAL_BATCH
        self._inputs = _shared_inputs(devices, graph, arrivals) if self._active else ()
        self._kinds: dict[Hashable, Tensor] = {}
        self._calls = 0
        self._unread: deque[CallComparison] = deque()
        self._beside = SideStream.of(self._device) if self._active else None

    def begin(self, kind: Hashable, leaves: Sequence[Any], numbers: Sequence[int | None]) -> None:
        """Start to compare a call.

        Args:
            kind: the call's signature with shapes; its `repr` must be equal on all ranks.
            leaves: the leaves of the arguments, on the device.
            numbers: for each leaf, the index of the graph's input; None if the graph has none.

        Raises:
            DataError: on every rank, if this call or an earlier one differs between ranks.
        """
        if not self._active:
            return
        self._read(len(self._unread) + 1 - UNREAD)
        self._calls += 1
        table = self._kinds.pop(kind, None)
        new = table is None
        if table is None:
            table = self._table(kind, leaves)
        self._kinds[kind] = table  # least recently used signatures are evicted first
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        contents: list[Tensor] = []
        if new or is_due(self._calls, FIRST_CALLS, EVERY):
            contents = self._contents(dict(zip(numbers, leaves, strict=True)))
        self._unread.append(self._collect(table.clone(), contents))
        if new:
            self._read(len(self._unread))

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Prefer the error of the comparison to an error inside the context, which it may explain:
        ranks with different batches fail in many ways."""
        try:
            yield
        except (RuntimeError, IndexError) as error:
            with suppress(RuntimeError):
                self._read(0)
            if isinstance(error, IndexError) or "out of bounds" in str(error):
                raise DataError(
                    f"the batch has an index that no table or class is for ({error}), such as a "
                    "token beyond the vocabulary of the model\n"
                    "use the tokenizer of the model, or a larger vocabulary"
                ) from error
            raise

    def _contents(self, leaves: Mapping[int | None, Any]) -> list[Tensor]:
        hashes = []
        for inputs in self._inputs:
            tensors = [leaves.get(index) for index in inputs.leaf_indices]
            parts = [content_hash(t) for t in tensors if isinstance(t, Tensor) and not t.is_sparse]
            combined = torch.zeros((), dtype=torch.int64, device=self._device)
            for part in parts:
                combined = combined * 31 + part  # depends on the order of the inputs
            hashes.append(combined)
        return hashes

    def _table(self, kind: Hashable, leaves: Sequence[Any]) -> Tensor:
        """One row per rank, zero except this rank's: the hash of the signature, the size of the
        batch, and columns for the hashes of inputs."""
        table = torch.zeros(dist.get_world_size(), 2 + len(self._inputs), dtype=torch.int64)
        table[dist.get_rank(), 0] = text_hash(re.sub(r" at 0x[0-9a-f]+", "", repr(kind)))
        table[dist.get_rank(), 1] = _rows(leaves)
        return table

    def _collect(self, rows: Tensor, contents: list[Tensor]) -> CallComparison:
        """Start to all-reduce the tables of all ranks, which is cheaper than to gather rows."""
        rank = dist.get_rank()
        if self._beside is None:
            if contents:
                rows[rank, 2:] = torch.stack(contents)
            # `dist.all_reduce` does the same with twice the work for so few numbers.
            assert dist.group.WORLD is not None
            work = dist.group.WORLD.allreduce([rows])
            return CallComparison(self._calls, rows, contents, work, None)
        with self._beside.after_program():
            rows = pinned(rows)
            every = rows.to(self._device, non_blocking=True)
            if contents:
                every[rank, 2:] = torch.stack(contents)
            work = dist.all_reduce(every, async_op=True)
            work.wait()  # only the stream waits
            rows.copy_(every, non_blocking=True)
            return CallComparison(self._calls, rows, contents, work, self._beside.event())

    def _read(self, waits: int) -> None:
        """Check the comparisons that have arrived.

        Args:
            waits: number of the oldest comparisons to wait for.
        """
        while self._unread and (waits > 0 or self._unread[0].has_arrived()):
            comparison = self._unread.popleft()
            with self._waits.measure():
                comparison.wait()
            waits -= 1
            with found_by_all():
                self._compare(comparison.call, comparison.rows.tolist())

    def _compare(self, call: int, rows: list[list[int]]) -> None:
        """Check the rows of one call.

        Raises:
            DataError: if the ranks differ.
        """
        if rows.count(rows[0]) == len(rows):
            return
        for rank, (kind, size, *_) in enumerate(rows):
            if size != rows[0][1]:
                raise DataError(
                    f"call {call}: rank {rank} was given a batch of {size} rows, rank 0 one of"
                    f" {rows[0][1]}\n{self._remedy}"
                )
            if kind != rows[0][0]:
                raise DataError(
                    f"call {call}: rank {rank} and rank 0 make different calls of the model\ntrain"
                    " and evaluate on all ranks at the same time, with inputs of the same shapes;"
                    f" {self._remedy}"
                )
        for column, inputs in enumerate(self._inputs, 2):
            for first, *others in inputs.replica_groups:
                for rank in others:
                    if rows[rank][column] != rows[first][column]:
                        raise DataError(
                            f"call {call}: rank {rank} was given another batch than rank {first}"
                            f" (input {', '.join(inputs.names)})\n{self._remedy}"
                        )


def _shared_inputs(
    devices: Devices, graph: Graph, arrivals: Mapping[str, CutAxes]
) -> tuple[SharedInputs, ...]:
    layout, world = devices.layout, dist.get_world_size()
    indices_of_axes: dict[CutAxes, list[int]] = {}
    for index, leaf in enumerate(graph.inputs):
        if isinstance(leaf, Value):
            axes = arrivals.get(leaf.name, ())
            indices_of_axes.setdefault(axes if any(axes) else (), []).append(index)
    result = []
    for axes, indices in indices_of_axes.items():
        ranks_of_shard: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world):
            shard = TensorLayout(layout, axes).block(rank % layout.num_devices)
            ranks_of_shard.setdefault(shard, []).append(rank)
        names = tuple(graph.inputs[index].name for index in indices)
        replica_groups = tuple(tuple(ranks) for ranks in ranks_of_shard.values() if len(ranks) > 1)
        if replica_groups:
            result.append(SharedInputs(tuple(indices), names, replica_groups))
    return tuple(result)


def _rows(leaves: Sequence[Any]) -> int:
    """The size of dimension 0 of the first tensor that has one."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
