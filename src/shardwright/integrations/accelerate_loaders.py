"""Loaders of Accelerate that read this rank's shard of each global batch."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from accelerate.utils import RNGType
from torch.utils.data import DataLoader, IterableDataset

from shardwright.errors import DataError
from shardwright.integrations.rank_data import DataShards


def prepare_divided_loader(accelerator: Any, loader: DataLoader[Any]) -> Any:
    """Prepare a loader that already gives each rank the samples of the plan."""
    config = accelerator.dataloader_config
    rng_types = {str(RNGType(rng_type).value) for rng_type in accelerator.rng_types or ()}
    # Samplers without a generator draw from torch's, whose state must be equal on all ranks.
    rng_types |= {"torch"} if dist.is_initialized() else set()
    return prepare_data_loader(
        loader,
        accelerator.device,
        # Accelerate does not divide it once more.
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement,
        rng_types=sorted(rng_types),
        # Every rank reads its samples itself, instead of rank 0 for all.
        dispatch_batches=False,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )


def divide_loader(
    loader: DataLoader[Any], shards: DataShards, even_batches: bool
) -> DataLoader[Any]:
    """Return a copy of a loader that reads this rank's shard of each global batch."""
    divided = copy(loader)
    if isinstance(loader.dataset, IterableDataset):
        stream = ShardedStream(loader.dataset, loader.batch_size, loader.drop_last, shards)
        changes: dict[str, Any] = {"dataset": stream, "batch_size": stream.local_batch_size}
    else:
        changes = {"batch_sampler": ShardedBatchSampler(loader.batch_sampler, shards, even_batches)}
    for name, value in changes.items():
        # Not by assignment, which `DataLoader` refuses.
        object.__setattr__(divided, name, value)
    return divided


def _check_batch_size(size: object, shards: DataShards) -> None:
    if not isinstance(size, int) or size % shards.count:
        raise DataError(
            f"batch_size={size} of a loader is not divisible by the {shards.count} data shards"
            f" of the plan's `dataset_strategy`\nuse a multiple of {shards.count}: `batch_size`"
            " is the number of samples per step over all processes"
        )


class ShardedBatchSampler(BatchSamplerShard):  # type: ignore[misc]
    """Batch sampler that yields this rank's shard of each global batch of another batch sampler.

    An incomplete last batch gets only as many samples from the start of the epoch as are needed for
    shards of equal length. Accelerate would fill it up to the batch size.
    """

    def __init__(self, batches: Any, shards: DataShards, even_batches: bool) -> None:
        size = getattr(batches, "batch_size", None)
        _check_batch_size(size, shards)
        super().__init__(batches, shards.count, shards.index, True, even_batches)
        self.sampler = getattr(batches, "sampler", None)

    def __iter__(self) -> Iterator[list[Any]]:
        first: list[Any] = []
        for batch in self.batch_sampler:
            # Every rank reads all batches, so all fill the last one with the same samples.
            first = first or list(batch)
            missing = -len(batch) % self.num_processes
            if missing and not self.even_batches:
                raise DataError(
                    f"the last batch of a loader has {len(batch)} samples, not a multiple of its"
                    f" {self.num_processes} data shards\ndrop this batch (`drop_last=True`), or"
                    " repeat samples to fill it (`even_batches=True`)"
                )
            filled = [*batch, *islice(cycle(first), missing)]
            size = len(filled) // self.num_processes
            yield filled[size * self.process_index : size * (self.process_index + 1)]


class ShardedStream(IterableDataset[Any]):
    """Iterable dataset that yields the samples of this rank's shard of each global batch.

    Every rank reads all samples of the original dataset, in the same order.

    Raises:
        DataError: when the dataset ends with a batch that cannot be divided.
    """

    total_dataset_length = 0
    """Accelerate's name of the number of samples from which it derives how many of the last batch
    are repeated: none."""

    def __init__(
        self, dataset: IterableDataset[Any], size: int | None, drop_last: bool, shards: DataShards
    ) -> None:
        _check_batch_size(size, shards)
        assert size is not None
        self.dataset, self.batch_size, self.drop_last = dataset, size, drop_last
        # As Accelerate's datasets, for checks of prepared loaders.
        self.num_processes, self.process_index = shards.count, shards.index
        self.local_batch_size = size // shards.count

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        while batch := list(islice(samples, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            if len(batch) % self.num_processes:
                raise DataError(
                    f"the last batch of an iterable dataset has {len(batch)} samples, not a"
                    f" multiple of its {self.num_processes} data shards\ndrop this batch"
                    " (`drop_last=True`), or plan with `dataset_strategy='full_batch'`"
                )
            size = len(batch) // self.num_processes
            yield from batch[size * self.process_index : size * (self.process_index + 1)]

    def __len__(self) -> int:
        # A `TypeError` if the dataset has no length, as without this class.
        full, last = divmod(len(self.dataset), self.batch_size)  # type: ignore[arg-type]
        return full * self.local_batch_size + (0 if self.drop_last else last // self.num_processes)


def find_distributed_samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the `DistributedSampler`s of a loader and of its batch sampler."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return [s for s in samplers if isinstance(s, torch.utils.data.DistributedSampler)]
