"""Detect ranks that call the model differently, or pass different batches.

Each call starts an all-reduce of a few numbers per rank: hashes of the call's signature and of its
inputs, and what the rank has done since its previous call (`training_guard`). After the first
calls, the hash of a large input covers only a sample of its elements. A training step reads the
result before its gradients are used, an evaluation before it returns. Only the first call of each
signature waits for the result before its program runs, because different programs on different
ranks would deadlock.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.agreement.content_hash import (
    content_hash,
    host_sample_hash,
    sample_of,
    text_hash,
)
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.misuse.equal_shards import SHARD_OF_BATCH, EqualShards
from shardwright.core.misuse.ranks import delay_data_errors, is_due
from shardwright.core.misuse.replicas import compute_checksum_of_replicas
from shardwright.core.misuse.training_guard import check_equal_training
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.runtime.accelerator import DeviceEvent, SideStream, pinned
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.training_record import NUM_COLUMNS, training_record
from shardwright.errors import DataError

log = logging.getLogger(__name__)

FIRST_CALLS = 10
"""Number of calls at the start of a run that all compare the full contents of the batch."""

PERIOD = 100
"""Number of calls between comparisons of the full contents, after the first `FIRST_CALLS` calls."""

MAX_CACHED_SIGNATURES = 256
"""Maximum number of cached call signatures; the least recently used is evicted."""

MAX_PENDING_COMPARISONS = 2
"""Maximum number of pending comparisons; the next call waits for the oldest."""

GLOBAL_BATCH = (
    "pass the same global batch on every rank: sample with the same seed on all ranks, as "
    "`shardwright.run.BatchSampler` does, and without a `DistributedSampler` or a loader from "
    "Accelerate's `prepare`; to pass a local batch on each rank, plan with "
    "`dataset_strategy='data_parallel'`"
)


@dataclass(frozen=True)
class SharedInputs:
    """Inputs of a graph with equal sharding over the ranks, so that the same ranks pass equal
    values.

    Args:
        leaf_indices: indices of the inputs among the leaves of a call's arguments.
        names: names of the inputs, for errors.
        replica_groups: the ranks that pass the same shard, for each shard with several such ranks.
        shard_owners: for each shard, the first rank that passes it.
        batch_sizes: sizes of dimension 0 of the inputs in the planned global batch.
    """

    leaf_indices: tuple[int, ...]
    names: tuple[str, ...]
    replica_groups: tuple[tuple[int, ...], ...]
    shard_owners: tuple[int, ...]
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class CallComparison:
    """A pending comparison of one call between ranks.

    Args:
        call: the number of the call, from 1.
        rows: int64 table on the host, (ranks, 2 + number of `SharedInputs` + `NUM_COLUMNS`). A row
            has the hash of the call's signature, the batch size, a hash for each `SharedInputs`,
            and the training record since the previous call. Valid after `wait`.
        hashes: hashes of this rank's inputs; referenced here until the all-reduce has read them.
        work: handle of the asynchronous all-reduce.
        arrival: event recorded after the copy to the host; None on the CPU.
        is_full: whether the hashes cover the full contents of the inputs.
        trains: whether the call is one with gradients.
        is_global: whether sharded inputs have the size of the planned global batch.
    """

    call: int
    rows: Tensor
    hashes: Sequence[int] | Sequence[Tensor]
    work: Any
    arrival: DeviceEvent | None
    is_full: bool
    trains: bool
    is_global: bool

    def has_arrived(self) -> bool:
        return bool(self.work.is_completed() if self.arrival is None else self.arrival.query())

    def wait(self) -> None:
        if self.arrival is None:
            self.work.wait()
        else:
            self.arrival.synchronize()


class BatchGuard:
    """Compares the calls of a module between ranks; every rank must have such a guard.

    Args:
        devices: this rank's view of the devices.
        graph: the graph of the module, whose inputs are the arguments of the calls.
        arrivals: mesh axes that shard each dimension of the inputs of which ranks pass shards, by
            input name.
        micro_batches: number of micro-batches of the planned batch, of which `graph` computes one.
    """

    def __init__(
        self,
        devices: Devices,
        graph: Graph,
        arrivals: Mapping[str, CutAxes],
        micro_batches: int = 1,
    ) -> None:
        self._device, self._waits = devices.device, devices.waits
        # A rehearsal has fake ranks, with which nothing can be compared.
        self._active = devices.is_distributed and has_other_ranks()
        self._remedy = SHARD_OF_BATCH if arrivals else GLOBAL_BATCH
        self._inputs = (
            _group_shared_inputs(devices, graph, arrivals, micro_batches) if self._active else ()
        )
        self._signature_tables: dict[Hashable, Tensor] = {}
        self._calls = 0
        self._equal_shards = EqualShards()
        self._pending_comparisons: deque[CallComparison] = deque()
        self._side_stream = SideStream.of(self._device) if self._active else None

    def begin(
        self,
        signature: Hashable,
        leaves: Sequence[Any],
        input_indices: Sequence[int | None],
        has_gradients: bool,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        """Start to compare a call between ranks, and check pending comparisons.

        Args:
            signature: structure, shapes and dtypes of the arguments. Equal signatures must have the
                same `repr` on all ranks.
            leaves: the leaves of the arguments, on the device.
            input_indices: for each leaf, the index of its input in the graph; None for a leaf that
                is not an input of the graph.
            has_gradients: whether gradients are left from earlier backward passes, to which the
                next one adds.
            parameters: the parameters of the module, of which replicas are compared.

        Raises:
            DataError: on every rank, if this call or an earlier one differs between ranks.
        """
        if not self._active:
            return
        # With the comparison of this call, at most `MAX_PENDING_COMPARISONS` are then pending.
        self._check_arrived_comparisons(
            len(self._pending_comparisons) + 1 - MAX_PENDING_COMPARISONS
        )
        self._calls += 1
        table = self._signature_tables.pop(signature, None)
        new = table is None
        if table is None:
            table = self._make_row_table(signature, leaves)
        self._signature_tables[signature] = table  # in order of use, for eviction
        if len(self._signature_tables) > MAX_CACHED_SIGNATURES:
            del self._signature_tables[next(iter(self._signature_tables))]
        is_full = new or is_due(self._calls, FIRST_CALLS, PERIOD)
        leaves_by_input = dict(zip(input_indices, leaves, strict=True))
        contents = self._hash_shared_inputs(leaves_by_input, is_full)
        # A copy, as the all-reduce overwrites its input.
        rows = table.clone()
        # On accelerators, replicas that kernels without a fixed order compute differ slightly.
        is_compared = self._calls <= FIRST_CALLS and self._side_stream is None
        replicas = compute_checksum_of_replicas(parameters) if is_compared else 0.0
        # Writing through NumPy takes a fraction of the time.
        record = training_record().take(has_gradients, replicas)
        rows.numpy()[dist.get_rank(), -NUM_COLUMNS:] = record
        properties = is_full, torch.is_grad_enabled(), self._is_global_batch(leaves_by_input)
        self._pending_comparisons.append(self._start_rank_comparison(rows, contents, properties))
        # The program of a new signature has other collectives, so no rank may start it alone.
        if new:
            self._check_arrived_comparisons(len(self._pending_comparisons))

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Within the context, replace errors by the error of a pending comparison, if any.

        Ranks with different batches fail in many ways; the error of the comparison names the cause.
        An index that is out of bounds becomes a `DataError`.
        """
        try:
            yield
        except (RuntimeError, IndexError) as error:
            # The comparison fails too if another rank has ended; the caller's error then says more.
            with suppress(RuntimeError):
                self._check_arrived_comparisons(0)
            if isinstance(error, IndexError) or "out of bounds" in str(error):
                raise DataError(
                    f"an index in the batch is out of range ({error}), such as a token beyond the "
                    "vocabulary of the model\n"
                    "use the tokenizer of the model, or a larger vocabulary"
                ) from error
            raise

    def check_step(self) -> None:
        """Check the call of this step before its gradients are used.

        On an accelerator a comparison that has not arrived is checked later, so that the host can
        run ahead.

        Raises:
            DataError: on every rank, if the call differs between ranks.
        """
        # On the CPU there is nothing to gain by not waiting, as the host does not run ahead of the
        # device.
        self._check_arrived_comparisons(
            len(self._pending_comparisons) if self._side_stream is None else 0
        )

    def _hash_shared_inputs(
        self, leaves: Mapping[int | None, Any], is_full: bool
    ) -> list[int] | list[Tensor]:
        """Return one hash per `SharedInputs`, over the values of its inputs: numbers on the CPU,
        scalars on the device on an accelerator.

        Args:
            leaves: the leaves of the arguments, by the index of the input.
            is_full: whether to hash large tensors in full, instead of a sample of their elements.
        """
        hashes: list[Any] = []
        for inputs in self._inputs:
            leaves_of_inputs = [leaves.get(index) for index in inputs.leaf_indices]
            # Sparse tensors have no contiguous memory to hash.
            tensors = [t for t in leaves_of_inputs if isinstance(t, Tensor) and not t.is_sparse]
            if not is_full and self._side_stream is None:
                hashes.append(host_sample_hash(tensors))
                continue
            combined = torch.zeros((), dtype=torch.int64, device=self._device)
            for tensor in tensors:
                # Depends on the order of the inputs.
                combined = combined * 31 + content_hash(tensor if is_full else sample_of(tensor))
            hashes.append(int(combined) if self._side_stream is None else combined)
        return hashes

    def _is_global_batch(self, leaves: Mapping[int | None, Any]) -> bool:
        """Whether sharded inputs have the size of the planned global batch."""
        return all(
            isinstance(leaf := leaves.get(index), Tensor) and leaf.shape[:1] == (size,)
            for inputs in self._inputs
            if len(inputs.shard_owners) > 1
            for index, size in zip(inputs.leaf_indices, inputs.batch_sizes, strict=True)
        )

    def _make_row_table(self, signature: Hashable, leaves: Sequence[Any]) -> Tensor:
        """Return a table of zeros (`CallComparison.rows`), with this rank's signature and batch
        size."""
        columns = 2 + len(self._inputs) + NUM_COLUMNS
        table = torch.zeros(dist.get_world_size(), columns, dtype=torch.int64)
        # Addresses of objects in a `repr` differ between processes.
        table[dist.get_rank(), 0] = text_hash(re.sub(r" at 0x[0-9a-f]+", "", repr(signature)))
        table[dist.get_rank(), 1] = _get_batch_size(leaves)
        return table

    def _start_rank_comparison(
        self,
        rows: Tensor,
        contents: list[int] | list[Tensor],
        properties: tuple[bool, bool, bool],
    ) -> CallComparison:
        """Start an all-reduce of the tables of all ranks, which is faster than an all-gather.

        Args:
            rows: this rank's table, with the shape of `CallComparison.rows`.
            contents: the result of `_hash_shared_inputs`.
            properties: the last three fields of the comparison.
        """
        rank = dist.get_rank()
        columns = slice(2, 2 + len(contents))
        if self._side_stream is None:
            # Rows of other ranks are zero, so the sum of the tables gathers the rows exactly, in
            # int64.
            rows.numpy()[rank, columns] = contents
            # For a few numbers, `dist.all_reduce` takes twice as long on the host.
            assert dist.group.WORLD is not None
            work = dist.group.WORLD.allreduce([rows])
            return CallComparison(self._calls, rows, contents, work, None, *properties)
        with self._side_stream.after_program():
            rows = pinned(rows)
            device_rows = rows.to(self._device, non_blocking=True)
            if contents:
                hashes = [hash for hash in contents if isinstance(hash, Tensor)]
                device_rows[rank, columns] = torch.stack(hashes)
            work = dist.all_reduce(device_rows, async_op=True)
            work.wait()  # only the stream waits
            rows.copy_(device_rows, non_blocking=True)
            event = self._side_stream.event()
            return CallComparison(self._calls, rows, contents, work, event, *properties)

    def _check_arrived_comparisons(self, min_count: int) -> None:
        """Check pending comparisons that have finished, oldest first.

        Args:
            min_count: number of comparisons for which to wait if they have not finished.
        """
        # At least `min_count`, then those that have arrived; in order, so that the oldest error is
        # raised.
        while self._pending_comparisons and (
            min_count > 0 or self._pending_comparisons[0].has_arrived()
        ):
            comparison = self._pending_comparisons.popleft()
            with self._waits.measure():
                comparison.wait()
            min_count -= 1
            with delay_data_errors():
                rows = comparison.rows.tolist()
                # First, as equal rows are what this check is about.
                self._check_batch_shards_differ(comparison, rows)
                self._check_rows_of_ranks_are_equal(comparison.call, rows)

    def _check_rows_of_ranks_are_equal(self, call: int, rows: list[list[int]]) -> None:
        """Check that all ranks have equal rows for one call.

        Args:
            call: the number of the call, from 1, for errors.
            rows: `CallComparison.rows` after the all-reduce.

        Raises:
            DataError: if signatures, batch sizes, or inputs that must be equal differ.
        """
        if rows.count(rows[0]) == len(rows):
            return
        # The size first: it names the difference, which the signature contains too.
        for rank, (signature, size, *_) in enumerate(rows):
            if size != rows[0][1]:
                raise DataError(
                    f"call {call}: rank {rank} passed a batch of {size} samples, but rank 0 a batch"
                    f" of {rows[0][1]} samples\n{self._remedy}"
                )
            if signature != rows[0][0]:
                raise DataError(
                    f"call {call}: on rank {rank} the arguments, the training mode of the model, or"
                    " attributes and global variables that `forward` reads differ from rank 0\n"
                    "train and evaluate on all ranks at the same time, with inputs of the same"
                    f" shapes, and set attributes equally; {self._remedy}"
                )
        for column, inputs in enumerate(self._inputs, 2):
            for first, *others in inputs.replica_groups:
                for rank in others:
                    if rows[rank][column] != rows[first][column]:
                        raise DataError(
                            f"call {call}: rank {rank} and rank {first} passed different values for"
                            f" input {', '.join(map(repr, inputs.names))}\n{self._remedy}"
                        )
        check_equal_training(call, [row[-NUM_COLUMNS:] for row in rows])

    def _check_batch_shards_differ(self, comparison: CallComparison, rows: list[list[int]]) -> None:
        """Check ranks that should pass different shards of the batch for equal shards."""
        sharded = {c: i for c, i in enumerate(self._inputs, 2) if len(i.shard_owners) > 1}
        # One input may well be equal on all ranks, such as labels of one class.
        is_equal = all(
            rows[rank][column] == rows[0][column]
            for column, inputs in sharded.items()
            for rank in inputs.shard_owners
        )
        hashes = tuple(rows[0][column] for column in sharded)
        # The hash 0 stands for inputs that are not compared, such as sparse tensors.
        if comparison.is_full and is_equal and any(hashes):
            names = ", ".join(repr(name) for inputs in sharded.values() for name in inputs.names)
            self._equal_shards.check(
                comparison.call,
                names,
                hashes,
                trains=comparison.trains,
                is_global=comparison.is_global,
            )


def _group_shared_inputs(
    devices: Devices, graph: Graph, arrivals: Mapping[str, CutAxes], micro_batches: int
) -> tuple[SharedInputs, ...]:
    """Group the inputs of a graph by their sharding over the ranks."""
    layout, world = devices.matrix, dist.get_world_size()
    indices_of_axes: dict[CutAxes, list[int]] = {}
    for index, leaf in enumerate(graph.inputs):
        if isinstance(leaf, Value):
            axes = arrivals.get(leaf.name, ())
            # Inputs that no axis shards form one group, whatever their number of dimensions.
            indices_of_axes.setdefault(axes if any(axes) else (), []).append(index)
    result = []
    for axes, indices in indices_of_axes.items():
        ranks_of_shard: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world):
            # All stages of a pipeline have the same device matrix, and their ranks pass the same
            # inputs.
            shard = TensorLayout(layout, axes).block(rank % layout.num_devices)
            ranks_of_shard.setdefault(shard, []).append(rank)
        names = tuple(graph.inputs[index].name for index in indices)
        replica_groups = tuple(tuple(ranks) for ranks in ranks_of_shard.values() if len(ranks) > 1)
        owners = tuple(ranks[0] for ranks in ranks_of_shard.values())
        sizes = [graph.inputs[index].shape[:1] for index in indices]
        batch_sizes = tuple(size[0] * micro_batches if size else 0 for size in sizes)
        result.append(SharedInputs(tuple(indices), names, replica_groups, owners, batch_sizes))
    return tuple(result)


def _get_batch_size(leaves: Sequence[Any]) -> int:
    """Return the size of dimension 0 of the first tensor that is not a scalar; 0 without one."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
