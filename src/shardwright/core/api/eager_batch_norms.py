"""Compute batch norm statistics per micro-batch in a module call with the global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.core.parallel.whole_batch_values import micro_batches_of_tensor

# `F.batch_norm` calls `torch.batch_norm`, which models may also call directly.
FUNCTIONS = (F.batch_norm, torch.batch_norm)


class RecordedBatchNorms(TorchFunctionMode):
    """Function mode that records the input shapes of batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in FUNCTIONS:
            self.shapes.add(tuple(_get_batch_norm_input(args, kwargs).shape))
        return func(*args, **(kwargs or {}))


class SplitBatchNorms(TorchFunctionMode):
    """Function mode that computes batch norm statistics over each micro-batch separately.

    Args:
        count: number of micro-batches.
        shards: number of local batches, each of which is split into micro-batches.
        shapes: input shapes of batch norms in a call with one micro-batch. Inputs of other shapes,
            such as a table that all samples share, are normalized as usual.
    """

    def __init__(self, count: int, shards: int, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._count, self._shards, self._shapes = count, shards, shapes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in FUNCTIONS:
            return func(*args, **kwargs)
        x = _get_batch_norm_input(args, kwargs)
        rows, remainder = divmod(x.shape[0], self._count)
        if remainder or (rows, *x.shape[1:]) not in self._shapes:
            return func(*args, **kwargs)
        # The micro-batch takes the place of `input`, by position.
        others = {name: value for name, value in kwargs.items() if name != "input"}
        shards = micro_batches_of_tensor(x, 0, self._shards, self._count)
        # These calls update the running statistics too; the caller restores the buffers.
        normalized = [func(shard, *args[1:], **others) for shard in shards]
        # Back from [micro-batch, rank, sample] to [rank, micro-batch, sample], the order of the
        # global batch.
        of_ranks = [shard.unflatten(0, (self._shards, -1)) for shard in normalized]
        return torch.stack(of_ranks, 1).reshape(x.shape)


def _get_batch_norm_input(args: tuple[Any, ...], kwargs: Any) -> Tensor:
    tensor: Tensor = args[0] if args else kwargs["input"]
    return tensor
