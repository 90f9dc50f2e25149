"""Values of samples gathered from all ranks of an Accelerate training, each sample once.

A loader that does not divide evenly repeats samples in its last batch: the first ones of the epoch,
or, with a `DistributedSampler`, one more sample on each of the last ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from shardwright.core.torch_internals import pytree
from shardwright.integrations.accelerate_loaders import find_distributed_samplers
from shardwright.integrations.rank_data import DataShards


def has_only_tensors(data: Any) -> bool:
    """Whether all leaves are tensors; Accelerate gathers anything else as a list of objects."""
    return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(data))


def gather_distinct_objects(
    objects: Any, shards: DataShards, last: DataLoader[Any] | None, remainder: int
) -> list[Any]:
    """Gather lists of objects from all ranks, once for each data shard.

    Args:
        objects: the list of this rank.
        shards: the division of the batch over the ranks.
        last: the loader, if the batch is its last; its repeated samples are dropped.
        remainder: number of distinct samples in the last global batch, as Accelerate counts them:
            0 if none is repeated.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, objects)
    of_shards = shards.select_distinct(of_ranks)
    if last is not None and find_distributed_samplers(last):
        repeated, size = _count_repeated_by_sampler(last)
        # Lists of another length do not have one object for each sample.
        if repeated and all(len(of_shard) == size for of_shard in of_shards):
            of_shards = _drop_last_of_last(of_shards, repeated)
        last = None
    distinct = [each for of_shard in of_shards for each in of_shard]
    return distinct[:remainder] if last is not None and remainder > 0 else distinct


def drop_repeated_samples(data: Any, last: DataLoader[Any], remainder: int) -> Any:
    """Drop the samples that a loader repeats from its last batch, in tensors of all shards.

    Args:
        data: tensors, gathered from one rank of each data shard.
        last, remainder: as of `gather_distinct_objects`.
    """
    samplers = find_distributed_samplers(last)
    if not samplers:
        return pytree.tree_map(lambda x: x[:remainder], data) if remainder > 0 else data
    repeated, size = _count_repeated_by_sampler(last)
    shard_count = samplers[0].num_replicas

    def distinct(value: Tensor) -> Tensor:
        # Other values are of ranks, such as losses, instead of samples.
        if not repeated or len(value) != size * shard_count:
            return value
        return torch.cat(_drop_last_of_last(value.chunk(shard_count), repeated))

    return pytree.tree_map(distinct, data)


def _count_repeated_by_sampler(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return how many ranks repeat a sample in the last batch, and the samples of a rank in it."""
    (sampler, *_), batches = find_distributed_samplers(loader), loader.batch_sampler
    # Negative if the sampler drops samples instead.
    repeated = max(sampler.total_size - len(sampler.dataset), 0)
    batch_size = getattr(batches, "batch_size", None) or 1
    last_size = sampler.num_samples % batch_size
    # The loader drops the batch with the repeated samples.
    if last_size and getattr(batches, "drop_last", False):
        return 0, batch_size
    return repeated, last_size or batch_size


def _drop_last_of_last(of_shards: Any, count: int) -> list[Any]:
    """Drop the last value of each of the last `count` shards."""
    first = len(of_shards) - count
    return [*of_shards[:first], *(of_shard[:-1] for of_shard in of_shards[first:])]
