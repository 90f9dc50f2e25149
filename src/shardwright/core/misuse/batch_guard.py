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
from shardwright.core.misuse.ranks import delay_data_errors, is_due
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.runtime.accelerator import DeviceEvent, SideStream, pinned
from shardwright.core.runtime.devices import Devices
from shardwright.errors import DataError

FIRST_CALLS = 10
"""Number of first calls that compare the contents of the batch."""

PERIOD = 100
"""Calls from one comparison of contents to the next, after the first calls."""

MAX_CACHED_SIGNATURES = 256
"""Largest number of cached call signatures; a call whose signature was evicted is a new one."""

MAX_PENDING_COMPARISONS = 2
"""Largest number of pending comparisons; the next call waits for the oldest."""

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
        leaf_indices: indices of the inputs among the leaves of a call's arguments.
        names: names of the inputs, for errors.
        replica_groups: for each shard that several ranks must pass, the ranks that pass it.
    """

    leaf_indices: tuple[int, ...]
    names: tuple[str, ...]
    replica_groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CallComparison:
    """A pending comparison of one call.

    Args:
        call: the number of the call, from 1.
        rows: int64 table on the host, one row per rank: hash of the call's signature, batch size,
            hashes of the inputs; valid once the comparison has arrived.
        hashes: hashes of this rank's inputs, kept alive until they have been read.
        work: handle of the asynchronous all-reduce.
        arrival: event recorded after the copy to the host; None on the CPU.
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
        arrivals: the inputs of which each rank passes its shard, by name, with the mesh axes that
            shard each dimension.
    """

    def __init__(self, devices: Devices, graph: Graph, arrivals: Mapping[str, CutAxes]) -> None:
        self._device, self._waits = devices.device, devices.waits
        self._active = devices.is_distributed and has_other_ranks()
        self._remedy = SHARD_OF_BATCH if arrivals else GLOBAL_BATCH
        self._inputs = _shared_inputs(devices, graph, arrivals) if self._active else ()
        self._signature_tables: dict[Hashable, Tensor] = {}
        self._calls = 0
        self._pending_comparisons: deque[CallComparison] = deque()
        self._side_stream = SideStream.of(self._device) if self._active else None

    def begin(
        self, signature: Hashable, leaves: Sequence[Any], input_indices: Sequence[int | None]
    ) -> None:
        """Start to compare a call.

        Args:
            signature: structure, shapes and dtypes of the arguments; its `repr` must be equal on
                all ranks.
            leaves: the leaves of the arguments, on the device.
            input_indices: index of the graph's input for each leaf; None for a leaf that is no
                input of the graph.

        Raises:
            DataError: on every rank, if this call or an earlier one differs between ranks.
        """
        if not self._active:
            return
        self._check_pending(len(self._pending_comparisons) + 1 - MAX_PENDING_COMPARISONS)
        self._calls += 1
        table = self._signature_tables.pop(signature, None)
        new = table is None
        if table is None:
            table = self._signature_table(signature, leaves)
        self._signature_tables[signature] = table  # in order of use, for eviction
        if len(self._signature_tables) > MAX_CACHED_SIGNATURES:
            del self._signature_tables[next(iter(self._signature_tables))]
        contents: list[Tensor] = []
        if new or is_due(self._calls, FIRST_CALLS, PERIOD):
            contents = self._content_hashes(dict(zip(input_indices, leaves, strict=True)))
        self._pending_comparisons.append(self._start_comparison(table.clone(), contents))
        if new:
            self._check_pending(len(self._pending_comparisons))

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Raise the error of a pending comparison instead of one inside the context.

        Ranks with different batches fail in many ways, which that error explains.
        """
        try:
            yield
        except (RuntimeError, IndexError) as error:
            with suppress(RuntimeError):
                self._check_pending(0)
            if isinstance(error, IndexError) or "out of bounds" in str(error):
                raise DataError(
                    f"an index in the batch is out of range ({error}), such as a token beyond the "
                    "vocabulary of the model\n"
                    "use the tokenizer of the model, or a larger vocabulary"
                ) from error
            raise

    def _content_hashes(self, leaves: Mapping[int | None, Any]) -> list[Tensor]:
        hashes = []
        for inputs in self._inputs:
            tensors = [leaves.get(index) for index in inputs.leaf_indices]
            parts = [content_hash(t) for t in tensors if isinstance(t, Tensor) and not t.is_sparse]
            combined = torch.zeros((), dtype=torch.int64, device=self._device)
            for part in parts:
                combined = combined * 31 + part  # depends on the order of the inputs
            hashes.append(combined)
        return hashes

    def _signature_table(self, signature: Hashable, leaves: Sequence[Any]) -> Tensor:
        """The `CallComparison.rows` of a call before the all-reduce, without hashes of inputs.

        The rows of other ranks are zero.
        """
        table = torch.zeros(dist.get_world_size(), 2 + len(self._inputs), dtype=torch.int64)
        table[dist.get_rank(), 0] = text_hash(re.sub(r" at 0x[0-9a-f]+", "", repr(signature)))
        table[dist.get_rank(), 1] = _batch_size(leaves)
        return table

    def _start_comparison(self, rows: Tensor, contents: list[Tensor]) -> CallComparison:
        """Start to all-reduce the tables of all ranks, which is cheaper than to gather rows.

        Args:
            rows: this rank's table, of shape (ranks, 2 + inputs).
            contents: hashes of this rank's inputs; empty if contents are not compared.
        """
        rank = dist.get_rank()
        if self._side_stream is None:
            if contents:
                rows[rank, 2:] = torch.stack(contents)
            # For a few numbers, `dist.all_reduce` takes twice as long on the host.
            assert dist.group.WORLD is not None
            work = dist.group.WORLD.allreduce([rows])
            return CallComparison(self._calls, rows, contents, work, None)
        with self._side_stream.after_program():
            rows = pinned(rows)
            device_rows = rows.to(self._device, non_blocking=True)
            if contents:
                device_rows[rank, 2:] = torch.stack(contents)
            work = dist.all_reduce(device_rows, async_op=True)
            work.wait()  # only the stream waits
            rows.copy_(device_rows, non_blocking=True)
            return CallComparison(self._calls, rows, contents, work, self._side_stream.event())

    def _check_pending(self, min_count: int) -> None:
        """Check the comparisons that have arrived.

        Args:
            min_count: number of comparisons to check even if they have not arrived.
        """
        while self._pending_comparisons and (
            min_count > 0 or self._pending_comparisons[0].has_arrived()
        ):
            comparison = self._pending_comparisons.popleft()
            with self._waits.measure():
                comparison.wait()
            min_count -= 1
            with delay_data_errors():
                self._check_rows(comparison.call, comparison.rows.tolist())

    def _check_rows(self, call: int, rows: list[list[int]]) -> None:
        """Compare the rows of all ranks for one call.

        Raises:
            DataError: if the ranks differ.
        """
        if rows.count(rows[0]) == len(rows):
            return
        for rank, (signature, size, *_) in enumerate(rows):
            if size != rows[0][1]:
                raise DataError(
                    f"call {call}: rank {rank} passed a batch of {size} rows, rank 0 one of"
                    f" {rows[0][1]} rows\n{self._remedy}"
                )
            if signature != rows[0][0]:
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
                            f"call {call}: rank {rank} passed another batch than rank {first}"
                            f" (input {', '.join(inputs.names)})\n{self._remedy}"
                        )


def _shared_inputs(
    devices: Devices, graph: Graph, arrivals: Mapping[str, CutAxes]
) -> tuple[SharedInputs, ...]:
    """Group the inputs by sharding; omits inputs of which no two ranks pass the same shard."""
    layout, world = devices.matrix, dist.get_world_size()
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


def _batch_size(leaves: Sequence[Any]) -> int:
    """Size of dimension 0 of the first tensor that is not a scalar; 0 without one."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
