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
    "tensors are split in the dimension of the batch, by default dimension 0 if it is as long as"
    " that of the first; others are passed in full"
)

SampleDims = tuple[int | None, ...]
"""For each leaf of a call the dimension of its samples; None if it is passed in full."""


def first_dims(leaves: Sequence[Any]) -> SampleDims:
    """Dimension 0 of all tensors whose size is that of the first tensor with dimensions."""
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    return tuple(
        0 if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == sizes[0] else None
        for leaf in leaves
    )


def micro_batch(
    leaves: Sequence[Any], number: int, count: int, dims: SampleDims | None = None
) -> list[Any]:
    """The leaves of a call for one of `count` micro-batches, as views.

    Args:
        dims: the dimension of the samples of each leaf; `first_dims` by default.

    Raises:
        PlanError: if `count` does not divide the batch size, or an argument is a nested tensor.
    """
    result = []
    for leaf, dim in zip(leaves, dims or first_dims(leaves), strict=True):
        if dim is not None and leaf.is_nested:
            raise PlanError("an argument is a nested tensor, which cannot be split\npad its rows")
        if dim is not None:
            rows, rest = divmod(leaf.shape[dim], count)
            if rest:
                divisors = [str(each) for each in _divisors(leaf.shape[dim])]
                valid = ", ".join(divisors[:12] + ["…"] * (len(divisors) > 12))
                raise PlanError(
                    f"a batch of {leaf.shape[dim]} rows cannot be split into {count} equal"
                    f" micro-batches\nvalid numbers are {valid}"
                )
            # Consecutive rows, as `torch.chunk` and PyTorch's pipeline schedules take them.
            leaf = leaf.narrow(dim, number * rows, rows)
        result.append(leaf)
    return result


def of_micro_batches(
    leaves: Sequence[Any], count: int, dims: SampleDims | None = None
) -> list[Any]:
    """Empty leaves of a call with a batch of `count` micro-batches.

    Args:
        leaves: those of one micro-batch.
        dims: as of `micro_batch`.
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
    """Number of micro-batches of a call: as planned or, for another batch size, the largest number
    that divides it and that the schedule supports."""
    rows = _rows(leaves, dims)
    return next(
        count
        # Ends at the latest at 1, which every schedule supports.
        for count in range(pipeline.micro_batches, 0, -1)
        if rows % count == 0 and pipeline.can_run(count)
    )


def valid_num_micro_batches(leaves: Sequence[Any], dims: SampleDims | None = None) -> list[int]:
    """Valid numbers of micro-batches of a call: the divisors of its batch size."""
    return _divisors(_rows(leaves, dims))


def _rows(leaves: Sequence[Any], dims: SampleDims | None = None) -> int:
    """Number of samples of the batch; 1 if no leaf is split."""
    pairs = zip(leaves, dims or first_dims(leaves), strict=True)
    return next((leaf.shape[dim] for leaf, dim in pairs if dim is not None), 1)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def global_leaves(
    planned: Sequence[Any],
    mesh: DeviceMatrix,
    arrivals: Mapping[str, CutAxes],
    leaves: Sequence[Any],
) -> list[Any]:
    """The leaves of a call with global shapes: inputs that arrive sharded are replaced by meta
    tensors of the full shape.

    Args:
        planned: the planned value of each leaf; None for a leaf that the planned call lacks.
        mesh: device matrix.
        arrivals: layouts of inputs that arrive sharded, by name.
        leaves: the leaves of the call.

    Raises:
        PlanError: if it is not known whether a tensor arrives sharded.
    """
    if not arrivals:
        return list(leaves)
    result = []
    for value, leaf in zip(planned, leaves, strict=True):
        if value is None and isinstance(leaf, Tensor) and leaf.ndim:
            raise PlanError(
                "a call has a tensor that the planned call has not, and other inputs arrive "
                "sharded\nplan with an example that has it, or without dataset_strategy"
            )
        is_split = isinstance(value, Value) and value.name in arrivals
        if is_split and isinstance(leaf, Tensor) and leaf.ndim == len(value.shape):
            counts = TensorLayout(mesh, arrivals[value.name]).shard_counts
            shape = [size * count for size, count in zip(leaf.shape, counts, strict=True)]
            leaf = torch.empty(shape, dtype=leaf.dtype, device="meta")
        result.append(leaf)
    return result
