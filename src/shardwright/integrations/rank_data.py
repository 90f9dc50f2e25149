"""The samples of a batch that each rank has under a plan, for loaders and metrics of libraries.

A plan of whole batches gives every rank all samples; under a `dataset_strategy` ranks have shards
of the batch, of which several ranks may have the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from shardwright.core.agreement.collective import has_other_ranks, value_of_rank
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.plan import Plan
from shardwright.core.runtime.accelerator import generator_states, set_generator_states
from shardwright.errors import DataError, PlanError

CPU = torch.device("cpu")
"""The device of the random generator that samplers draw from."""

WHOLE_BATCHES, LOCAL_BATCHES = "full_batch", "data_parallel"
"""Values of `dataset_strategy` that need no plan to know the samples of each rank."""


@dataclass(frozen=True)
class DataShards:
    """The shards into which a batch is divided over the ranks.

    Args:
        count: number of shards; 1 if every rank has the whole batch.
        index: index of the shard of this rank.
        owners: for each shard, the ranks that have it.
    """

    count: int
    index: int
    owners: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_model(net: ParallelModule) -> DataShards:
        """Return the shards of the batches with which a planned model is called."""
        return _data_shards(
            net.execution.devices.matrix, net.execution.partitioned.decisions.arrivals
        )

    @staticmethod
    def of_plan(plan: Plan) -> DataShards:
        """Return the shards of the batches with which a model of `plan` is called."""
        return _data_shards(plan.mesh, plan.arrivals)

    @staticmethod
    def of_options(options: Mapping[str, Any]) -> DataShards:
        """Return the shards under options of `sw.plan`, before there is a plan.

        Raises:
            PlanError: if the shards depend on the plan.
        """
        strategy = options.get("dataset_strategy", WHOLE_BATCHES)
        if strategy == WHOLE_BATCHES:
            return _whole_batches()
        if strategy == LOCAL_BATCHES and options.get("stages", 1) == 1:
            ranks = tuple((rank,) for rank in range(_world_size()))
            return DataShards(len(ranks), _rank(), ranks)
        raise PlanError(
            f"dataset_strategy={strategy!r} without a plan: which samples a rank loads is known"
            " only once the model is planned\nplan the model first and pass the plan:"
            f" `plan=sw.plan(net, batch, devices={_world_size()}, dataset_strategy=...)`"
        )

    def group_of_distinct_samples(self) -> dist.ProcessGroup | None:
        """Return a group of this rank and one rank for each other shard; None for one shard.

        Collective. Sums over the group count each sample once.
        """
        if self.count == 1:
            return None
        if self.count == _world_size():
            return dist.group.WORLD
        group_of_rank = None
        for ranks in zip(*self.owners, strict=True):
            group = dist.new_group(list(ranks))
            group_of_rank = group if _rank() in ranks else group_of_rank
        return group_of_rank

    def check_loader(self, loader: Any) -> None:
        """Check that a loader is not divided over the ranks in another way than the batch.

        Raises:
            DataError: if the loader gives each rank a part, but the plan expects the whole batch on
                every rank, or other parts.
        """
        for sampler, (count, index) in _divisions(loader):
            if (count, index) in ((1, 0), (self.count, self.index)):
                continue
            if self.count == 1:
                raise DataError(
                    f"the loader's {sampler} gives this rank part {index} of {count}, but the plan"
                    " needs the whole batch on every rank\nremove the sampler for several"
                    " processes, or plan with `dataset_strategy='data_parallel'`"
                )
            raise DataError(
                f"the loader's {sampler} gives this rank part {index} of {count}, but under the"
                f" plan's `dataset_strategy` it has part {self.index} of {self.count}\nremove the"
                " sampler: the loader is divided as planned where it is prepared"
            )

    def check_whole_loader(self, loader: Any) -> None:
        """Check a loader that is not divided any more: local batches must be divided already.

        Raises:
            DataError: if the plan expects local batches, but the loader gives each rank all
                samples, or `check_loader` fails.
        """
        self.check_loader(loader)
        if self.count > 1 and all(division[0] == 1 for _, division in _divisions(loader)):
            raise DataError(
                "the loader gives every rank the whole batch, but under the plan's"
                f" `dataset_strategy` a rank has one of {self.count} parts\nlet the framework"
                " prepare the loader, or plan with `dataset_strategy='full_batch'`"
            )


def _data_shards(mesh: Layout, arrivals: Mapping[str, CutAxes]) -> DataShards:
    axes = {cut[0] for cut in arrivals.values() if any(cut)}
    if not axes:
        return _whole_batches()
    if len(axes) > 1 or any(any(cut[1:]) for cut in arrivals.values()):
        raise DataError(
            "`dataset_strategy` shards inputs differently along the batch, or along other"
            " dimensions, so that no loader can be divided by samples\nplan with"
            " `dataset_strategy='full_batch'` or `'data_parallel'`"
        )
    layout = TensorLayout(mesh, (axes.pop(),))
    # All stages of a pipeline have the same device matrix, and read the same samples.
    shards = [layout.block(rank % mesh.num_devices)[0] for rank in range(_world_size())]
    owners = tuple(
        tuple(rank for rank, shard in enumerate(shards) if shard == index)
        for index in range(layout.shard_counts[0])
    )
    return DataShards(len(owners), shards[_rank()], owners)


def _whole_batches() -> DataShards:
    return DataShards(1, 0, (tuple(range(_world_size())),))


LOADER_PARTS = ("base_dataloader", "batch_sampler", "sampler", "dataset")
"""Attributes of loaders, and of batch samplers, that may divide samples over ranks."""


def _divisions(loader: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield what divides a loader's samples over ranks: its class, number of parts, and index.

    `DistributedSampler` names them `num_replicas` and `rank`, Accelerate's samplers and data sets
    `num_processes` and `process_index`. A sampler may be inside of a batch sampler.
    """
    pending, seen = [loader], set[int]()
    while pending:
        element = pending.pop()
        if element is None or id(element) in seen:
            continue
        seen.add(id(element))
        attributes = getattr(element, "__dict__", {})
        for count, index in (("num_replicas", "rank"), ("num_processes", "process_index")):
            if isinstance(attributes.get(count), int) and isinstance(attributes.get(index), int):
                yield type(element).__name__, (attributes[count], attributes[index])
        pending += [attributes.get(name) for name in LOADER_PARTS]


class SharedOrder(Sampler[Any]):
    """A sampler that draws the same order on all ranks: that of the random state of rank 0.

    Samplers without a generator draw from PyTorch's, whose state may differ between ranks.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        states = generator_states(CPU)
        shared = {name: value_of_rank(state.tolist()) for name, state in states.items()}
        states = {name: torch.tensor(state, dtype=torch.uint8) for name, state in shared.items()}
        set_generator_states(states, CPU)
        return iter(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


def share_order(loader: Any) -> None:
    """Make a loader of whole batches draw the same order on all ranks, in place."""
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    is_random = isinstance(sampler, RandomSampler | WeightedRandomSampler | SubsetRandomSampler)
    if is_random and sampler.generator is None and has_other_ranks():
        batches.sampler = SharedOrder(sampler)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
