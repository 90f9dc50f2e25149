"""Derive the shapes of the global batch from a local batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.constraints import requested_dataset_strategy
from shardwright.core.constraints.named_strategy import AxisDims, entry_with_layout
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.partition.pipeline_spec import AUTO
from shardwright.core.planner.options import KeywordOptions
from shardwright.core.torch_internals import pytree
from shardwright.errors import StrategyError


def whole_example(
    options: KeywordOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with the global batch, as meta tensors.

    Args:
        options: options of the plan, with its `dataset_strategy`.
        args, kwargs: arguments of a call with this rank's local batch.

    Raises:
        StrategyError: if the global batch size depends on the number of stages, which the planner
            chooses.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shards = iter(_get_input_shard_counts(options, tensors))

    def global_batch_tensor(tensor: Tensor) -> Tensor:
        shape = [size * count for size, count in zip(tensor.shape, next(shards), strict=True)]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    leaves = [global_batch_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def _get_input_shard_counts(
    options: KeywordOptions, tensors: list[Tensor]
) -> list[tuple[int, ...]]:
    """Return, for each input tensor, the number of shards of each dimension."""
    strategy, stages = requested_dataset_strategy(options.dataset_strategy), options.stages
    counts: list[tuple[int, ...]] = [(1,) * tensor.ndim for tensor in tensors]
    if strategy == "data_parallel":
        if stages == AUTO:
            raise StrategyError(
                "with dataset_strategy='data_parallel' the global batch size depends on the number"
                " of stages, which stages='auto' leaves open\n"
                "call `net.compile(*example)` with an example of the global batch"
            )
        world = dist.get_world_size() if dist.is_initialized() else 1
        data_ranks = world // stages
        # A scalar has no batch dimension.
        batch_rows = next((t.shape[0] for t in tensors if t.ndim), None)
        # As in `data_parallel`, tensors with as many rows as the first tensor are local batches.
        counts = [
            (data_ranks, *(1,) * (t.ndim - 1))
            if t.ndim and t.shape[0] == batch_rows
            else (1,) * t.ndim
            for t in tensors
        ]
    elif not isinstance(strategy, str):
        # Their number is checked by the planner, which names the inputs.
        for index, (requested, tensor) in enumerate(zip(strategy, tensors, strict=False)):
            # Names of axes without sizes are left to the planner's error, too.
            if isinstance(requested, AxisDims) and options.axis_matrix is None:
                continue
            entry = entry_with_layout(
                "dataset_strategy", requested, tensor.ndim, options.axis_matrix
            )
            shards = entry.shard_counts if isinstance(entry, TensorLayout) else entry
            # Entries that do not fit are left to the planner's error.
            if shards is not None and len(shards) == tensor.ndim:
                counts[index] = shards
    return counts
