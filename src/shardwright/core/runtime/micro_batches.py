"""Split the arguments of a call into micro-batches of equal size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Value
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.errors import PlanError

SPLIT_NOTE = (
    "tensors are split in their batch dimension, by default dimension 0 if it has the size of"
    " dimension 0 of the first tensor; other tensors are passed in full"
)

SampleDims = tuple[int | None, ...]
"""The batch dimension of each leaf of a call; None for a leaf that is passed in full."""


def first_dims(leaves: Sequence[Any]) -> SampleDims:
    """Return the default batch dimension of each leaf.

    It is 0 for tensors with the batch size, the size of dimension 0 of the first non-scalar tensor;
    None for other leaves.
    """
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    return tuple(
        0 if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == sizes[0] else None
        for leaf in leaves
    )


def micro_batch(
    leaves: Sequence[Any], number: int, count: int, dims: SampleDims | None = None
) -> list[Any]:
    """Return the leaves of a call for micro-batch `number` of `count`, as views.

    Args:
        leaves: leaves of the call's arguments, for the full batch.
        number: index of the micro-batch.
        count: number of micro-batches.
        dims: batch dimension of each leaf; by default `first_dims(leaves)`.

    Raises:
        PlanError: if `count` does not divide the batch size, or an argument is a nested tensor.
    """
    result = []
    # Empty dimensions mean the default too, as in `PipelineSpec`.
    for leaf, dim in zip(leaves, dims or first_dims(leaves), strict=True):
        if dim is not None and leaf.is_nested:
            raise PlanError(
                "an argument is a nested tensor, which cannot be split into micro-batches\n"
                "pass it padded, as an ordinary tensor: `torch.nested.to_padded_tensor(x, 0.0)`"
            )
        if dim is not None:
            rows, remainder = divmod(leaf.shape[dim], count)
            if remainder:
                divisors = [str(each) for each in _list_divisors(leaf.shape[dim])]
                valid = ", ".join(divisors[:12] + ["…"] * (len(divisors) > 12))
                raise PlanError(
                    f"a batch of {leaf.shape[dim]} samples cannot be split into {count} equal"
                    f" micro-batches\nvalid numbers of micro-batches are {valid}; name the batch"
                    " dimension if it is another (`batch_dims={'x': 1}`)"
                )
            # Consecutive samples, as in `torch.chunk` and PyTorch's pipeline schedules.
            leaf = leaf.narrow(dim, number * rows, rows)
        result.append(leaf)
    return result


def empty_full_batch(
    leaves: Sequence[Any], count: int, dims: SampleDims | None = None
) -> list[Any]:
    """Return uninitialized leaves with the shapes of a batch of `count` micro-batches.

    Args:
        leaves: leaves of a call with one micro-batch.
        count: number of micro-batches.
        dims: batch dimension of each leaf; by default `first_dims(leaves)`.
    """
    result = []
    for leaf, dim in zip(leaves, dims or first_dims(leaves), strict=True):
        if dim is not None:
            shape = [*leaf.shape]
            shape[dim] *= count
            empty = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
            leaf = empty.requires_grad_(leaf.requires_grad)
        result.append(leaf)
    return result


def num_micro_batches_of_call(
    leaves: Sequence[Any], pipeline: PipelineSpec, dims: SampleDims | None = None
) -> int:
    """Return the number of micro-batches of a call: the largest number, up to the planned one, that
    divides the batch size and that the schedule supports."""
    rows = _get_batch_size(leaves, dims)
    return next(
        count
        # Ends at the latest at 1, which every schedule supports.
        for count in range(pipeline.micro_batches, 0, -1)
        if rows % count == 0 and pipeline.can_run(count)
    )


def valid_num_micro_batches(leaves: Sequence[Any], dims: SampleDims | None = None) -> list[int]:
    """Return the valid numbers of micro-batches of a call: the divisors of its batch size."""
    return _list_divisors(_get_batch_size(leaves, dims))


def _get_batch_size(leaves: Sequence[Any], dims: SampleDims | None = None) -> int:
    """Return the batch size; 1 if no leaf has a batch dimension."""
    pairs = zip(leaves, dims or first_dims(leaves), strict=True)
    return next((leaf.shape[dim] for leaf, dim in pairs if dim is not None), 1)


def _list_divisors(batch_size: int) -> list[int]:
    # Each divisor above the root is the counterpart of one below.
    small = [n for n in range(1, isqrt(batch_size) + 1) if batch_size % n == 0]
    # A set, because the root of a square is its own counterpart.
    return sorted({*small, *(batch_size // n for n in small)})


def global_leaves(
    planned: Sequence[Any],
    mesh: DeviceMatrix,
    arrivals: Mapping[str, CutAxes],
    leaves: Sequence[Any],
) -> list[Any]:
    """Return the leaves of a call, with sharded inputs replaced by meta tensors of their global
    shape.

    Args:
        planned: graph value of each leaf of the call that was planned; None for a leaf that is not
            a graph input.
        mesh: the device matrix.
        arrivals: for each input that ranks pass sharded, by name, the mesh axes that shard each
            dimension.
        leaves: the leaves of the call's arguments on this rank.

    Raises:
        PlanError: if the call passes a tensor that the planned call did not pass.
    """
    if not arrivals:
        return list(leaves)
    result = []
    for value, leaf in zip(planned, leaves, strict=True):
        # A tensor without dimensions cannot be sharded.
        if value is None and isinstance(leaf, Tensor) and leaf.ndim:
            raise PlanError(
                f"a call passes a tensor of shape {tuple(leaf.shape)} that the planned call did "
                "not pass, so `dataset_strategy` does not tell whether it is a local batch\n"
                "plan with an example that passes the tensor, or without `dataset_strategy`"
            )
        is_split = isinstance(value, Value) and value.name in arrivals
        # `PlannedCall.check` rejects another number of dimensions, with both shapes in its error.
        if is_split and isinstance(leaf, Tensor) and leaf.ndim == len(value.shape):
            counts = TensorLayout(mesh, arrivals[value.name]).shard_counts
            shape = [size * count for size, count in zip(leaf.shape, counts, strict=True)]
            leaf = torch.empty(shape, dtype=leaf.dtype, device="meta")
        result.append(leaf)
    return result
