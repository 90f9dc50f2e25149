"""Values of the global batch that micro-batches read, such as the number of valid targets.

The values are outputs of the prologue of a step (`Graph.whole_batch`), a graph without parameters,
so every rank that needs the values runs the prologue itself. Inputs that arrive sharded are
gathered first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import FIRST, Graph, PassedDim, Value, WholeBatch
from shardwright.core.graph.interpreter import run
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.collectives import all_gather
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import first_dims
from shardwright.errors import PlanError

Buffers = dict[str, Tensor]


def batch_reduction(graph: Graph) -> WholeBatch:
    """Return how the losses of micro-batches combine to the loss of the batch; by default, to their
    mean."""
    return graph.whole_batch if isinstance(graph.whole_batch, WholeBatch) else WholeBatch()


class GlobalBatchValues:
    """Computes, by a step's prologue, the values of the global batch that micro-batches read.

    Args:
        partitioned: the model with all its stages, for one micro-batch.
        devices: this rank's view of the devices.
        read: the buffers that this rank's chunks read; by default all buffers.
    """

    def __init__(
        self, partitioned: Partitioned, devices: Devices, read: Iterable[Value] | None = None
    ) -> None:
        self._devices, self._mesh = devices, partitioned.mesh
        python = partitioned.graph.python
        self._current = python.current if python is not None else frozenset()
        self._arrivals = partitioned.decisions.arrivals
        self._num_micro_batches = partitioned.pipeline.micro_batches
        whole_batch = batch_reduction(partitioned.graph)
        names = whole_batch.names if read is None else {value.name for value in read}
        # All ranks of a stage read the same buffers, so all of them or none run its gathers.
        self._prologue = whole_batch.prologue if names & whole_batch.names else None
        self._values = whole_batch.values
        self._inputs = () if self._prologue is None else _find_prologue_inputs(self._prologue)
        self._num_local_batches = (
            count_local_batches(partitioned) if self._prologue is not None else 1
        )

    def __call__(self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]) -> list[Buffers]:
        """Return the values of the global batch that each micro-batch reads, by buffer name.

        Args:
            leaves: leaves of the call's arguments for all micro-batches, as passed to this rank.
            buffers: the module's buffers by name.
        """
        if self._prologue is None:
            return [{} for _ in range(self._num_micro_batches)]
        # The prologue depends on no parameter.
        with torch.no_grad():
            outputs = self._run_prologue(self._prologue, leaves, buffers)
        pairs = zip(self._values, outputs, strict=True)
        parts_by_name = {
            name: self._split_into_micro_batches(tensor, dim) for (name, dim), tensor in pairs
        }
        return [
            {name: values[number] for name, values in parts_by_name.items()}
            for number in range(self._num_micro_batches)
        ]

    def _run_prologue(
        self, graph: Graph, leaves: Sequence[Any], buffers: Mapping[str, Tensor]
    ) -> list[Tensor]:
        device = self._devices.device
        tensors = {
            value: self._gather_global_input(value, leaves[index]) for index, value in self._inputs
        }
        tensors |= {v: _get_full_buffer(v, buffers) for v in graph.buffers}
        # As mixed precision casts inputs and buffers before operators read them.
        tensors = {v: t if v.outer_dtype is None else t.to(v.dtype) for v, t in tensors.items()}
        for value, constant in graph.constants.items():
            # State of the captured Python code has another value in each call.
            is_current = value.name in self._current and value.name in buffers
            # Constants of a graph are on the device of the capture.
            tensors[value] = (buffers[value.name] if is_current else constant).to(device)
        for op in graph.ops:
            tensors.update(zip(op.outputs, run(op, tensors, device), strict=True))
        return [tensors[value] for value in graph.output_values]

    def _gather_global_input(self, value: Value, leaf: Tensor) -> Tensor:
        """All-gather the local batch `leaf` of the model input `value` into the global batch."""
        for dim, axes in enumerate(self._arrivals.get(value.name, ())):
            if axes:
                leaf = all_gather(dim, self._devices.group(axes))(leaf.detach())
        return leaf.detach()

    def _split_into_micro_batches(self, tensor: Tensor, dim: PassedDim) -> list[Tensor]:
        """Split a value of the global batch into the tensors that micro-batches read.

        Args:
            tensor: the value for the global batch.
            dim: batch dimension of `tensor`; None if all micro-batches read the full tensor,
                `FIRST` if only the first one reads it, and the others read zeros.
        """
        if dim == FIRST:
            return [tensor, *(torch.zeros_like(tensor),) * (self._num_micro_batches - 1)]
        if dim is None:
            return [tensor] * self._num_micro_batches
        return micro_batches_of_tensor(
            tensor, dim, self._num_local_batches, self._num_micro_batches
        )


def micro_batches_of_tensor(tensor: Tensor, dim: int, shards: int, count: int) -> list[Tensor]:
    """Split a tensor of the global batch into micro-batches along `dim`, each with an equal part of
    every local batch.

    Args:
        tensor: the tensor of the global batch.
        dim: the batch dimension.
        shards: number of local batches.
        count: number of micro-batches.
    """
    shape = tensor.shape
    # Samples are ordered by rank, then by micro-batch: each local batch is split by itself.
    # Not -1, which is ambiguous for empty tensors.
    rows = shape[dim] // (shards * count)
    of_ranks = tensor.reshape(*shape[:dim], shards, count, rows, *shape[dim + 1 :])
    return [tensor.flatten(dim, dim + 1) for tensor in of_ranks.unbind(dim + 1)]


def micro_batches_of_ranks(
    leaves: Sequence[Any], shards: int, pipeline: PipelineSpec
) -> list[list[Any]]:
    """Split the leaves of a call into micro-batches, each with an equal part of every local batch.

    Args:
        leaves: leaves of the arguments, for the global batch.
        shards: number of local batches.
        pipeline: number of micro-batches, and batch dimension of each leaf.
    """
    count = pipeline.micro_batches
    dims = pipeline.batch_dims or first_dims(leaves)
    leaf_values = [
        [leaf] * count if dim is None else micro_batches_of_tensor(leaf, dim, shards, count)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return [[each[number] for each in leaf_values] for number in range(count)]


def _find_prologue_inputs(prologue: Graph) -> tuple[tuple[int, Value], ...]:
    """Return (index among the leaves of a call, input) of each input that `prologue` reads."""
    # An output may be an input itself, which no operator reads.
    read = {value for op in prologue.ops for value in op.inputs} | set(prologue.output_values)
    leaves = enumerate(prologue.inputs)
    return tuple((n, leaf) for n, leaf in leaves if isinstance(leaf, Value) and leaf in read)


def _get_full_buffer(value: Value, buffers: Mapping[str, Tensor]) -> Tensor:
    """Return the buffer `value` as a full tensor.

    Raises:
        PlanError: if this rank has a shard of the buffer, or does not own it.
    """
    buffer = buffers.get(value.name)
    # A buffer that is sharded has another shape here.
    if buffer is None or tuple(buffer.shape) != value.shape:
        raise PlanError(
            f"the loss of the global batch needs the full buffer {value.name!r}, which this rank"
            " does not have\nplan with micro_batches=1, or without pipeline stages"
        )
    return buffer


def count_local_batches(partitioned: Partitioned) -> int:
    """Return the number of local batches in a global batch; 1 if ranks pass the global batch."""
    arrivals = partitioned.decisions.arrivals
    layouts = (TensorLayout(partitioned.mesh, axes) for axes in arrivals.values() if axes)
    # Inputs without samples have fewer shards in dimension 0, or none.
    return max((layout.shard_counts[0] for layout in layouts), default=1)


def prologue_axes(partitioned: Partitioned) -> tuple[tuple[int, ...], ...]:
    """Return the sets of mesh axes over which sharded inputs of the prologue are all-gathered."""
    axes = (
        of_dim for cut, _ in _find_sharded_prologue_inputs(partitioned) for of_dim in cut if of_dim
    )
    return tuple(dict.fromkeys(axes))


def prologue_bytes(partitioned: Partitioned, stage: int) -> int:
    """Return the bytes that one device of `stage` sends per step for the inputs of the prologue.

    Sharded inputs of the prologue are all-gathered. The communication volume of a plan does not
    include these bytes.
    """
    mesh, total = partitioned.mesh, 0
    read = {v.name for chunk in partitioned.chunks_of(stage) for v in chunk.graph.buffers}
    # Stages that read none of the values do not run the prologue.
    if read.isdisjoint(batch_reduction(partitioned.graph).names):
        return 0
    for cut, value in _find_sharded_prologue_inputs(partitioned):
        shards = mesh.size(tuple(axis for axes in cut for axis in axes))
        # An all-gather sends (n-1)/n of the result.
        total += value.numel * value.stored_dtype.itemsize * (shards - 1) // shards
    return total


def _find_sharded_prologue_inputs(partitioned: Partitioned) -> list[tuple[CutAxes, Value]]:
    prologue = batch_reduction(partitioned.graph).prologue
    pipeline, arrivals = partitioned.pipeline, partitioned.decisions.arrivals
    if prologue is None or pipeline.micro_batches == 1:
        return []
    pairs = ((arrivals.get(value.name, ()), value) for _, value in _find_prologue_inputs(prologue))
    return [(cut, value) for cut, value in pairs if any(cut)]
