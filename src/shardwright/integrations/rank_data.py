"""Division of a batch over the ranks by a plan, for the loaders and metrics of other libraries.

With `dataset_strategy='full_batch'` every rank loads all samples of a batch. With other strategies
a rank loads one shard of the batch, and several ranks may load the same shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""Device of PyTorch's default random generator, from which samplers draw their order."""

FULL_BATCHES, LOCAL_BATCHES = "full_batch", "data_parallel"
"""Values of `dataset_strategy` that determine the samples of each rank without a plan."""


@dataclass(frozen=True)
class DataShards:
    """The shards into which a batch is divided over the ranks.

    Args:
        count: number of shards; 1 if every rank has the full batch.
        index: index of this rank's shard.
        owners: the ranks that load each shard, by index of the shard.
    """

    count: int
    index: int
    owners: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_model(net: ParallelModule) -> DataShards:
        """Return the shards into which a planned model divides its inputs over the ranks."""
        return _divide_batch_by_cuts(
            net.execution.devices.matrix, net.execution.partitioned.decisions.arrivals
        )

    @staticmethod
    def of_plan(plan: Plan) -> DataShards:
        """Return the shards into which `plan` divides the inputs of its model over the ranks."""
        return _divide_batch_by_cuts(plan.mesh, plan.arrivals)

    @staticmethod
    def of_options(options: Mapping[str, Any]) -> DataShards:
        """Return the shards into which the option `dataset_strategy` divides a batch, before the
        model is planned.

        Raises:
            PlanError: if the division depends on the plan.
        """
        strategy = options.get("dataset_strategy", FULL_BATCHES)
        if strategy == FULL_BATCHES:
            return _make_unsharded_data_shards()
        # With stages several ranks read one shard, and only the plan tells which.
        if strategy == LOCAL_BATCHES and options.get("stages", 1) == 1:
            ranks = tuple((rank,) for rank in range(_get_world_size()))
            return DataShards(len(ranks), _get_rank(), ranks)
        raise PlanError(
            f"dataset_strategy={strategy!r} needs a plan, which determines the samples of each"
            " rank\nplan the model first and pass the plan:"
            f" `plan=sw.plan(net, batch, devices={_get_world_size()}, dataset_strategy=...)`"
        )

    def select_distinct(self, values_of_ranks: Sequence[Any]) -> list[Any]:
        """Return one value for each shard: that of the first rank that loads it."""
        return [values_of_ranks[ranks[0]] for ranks in self.owners]

    def group_of_distinct_samples(self) -> dist.ProcessGroup | None:
        """Create a process group of this rank and one rank of each other shard; None for one shard.

        Collective. A sum over the group counts each sample once.
        """
        if self.count == 1:
            return None
        if self.count == _get_world_size():
            return dist.group.WORLD
        group_of_rank = None
        # All ranks create all groups, since `new_group` is collective. The i-th owners of all
        # shards form one group.
        for ranks in zip(*self.owners, strict=True):
            group = dist.new_group(list(ranks))
            group_of_rank = group if _get_rank() in ranks else group_of_rank
        return group_of_rank

    def check_loader(self, loader: Any) -> None:
        """Check that no sampler of a loader divides samples over ranks differently than the plan.

        Raises:
            DataError: if a sampler divides samples, but the plan needs the full batch on every rank
                or another shard on this rank.
        """
        for sampler, (count, index) in _iterate_loader_divisions(loader):
            # Undivided samples, or divided as planned.
            if (count, index) in ((1, 0), (self.count, self.index)):
                continue
            if self.count == 1:
                raise DataError(
                    f"the loader's {sampler} gives this rank shard {index} of {count}, but the plan"
                    f" needs the full batch on every rank\nremove the {sampler}, or plan with"
                    " `dataset_strategy='data_parallel'`"
                )
            raise DataError(
                f"the loader's {sampler} gives this rank shard {index} of {count}, but the plan's"
                f" `dataset_strategy` gives it shard {self.index} of {self.count}\nremove the"
                f" {sampler}: the framework divides the loader as planned"
            )

    def check_divided_loader(self, loader: Any) -> None:
        """Check that a loader gives each rank exactly its samples of the plan.

        Raises:
            DataError: if the plan shards the batch, but no sampler of the loader divides samples,
                or a sampler divides them differently than the plan.
        """
        self.check_loader(loader)
        if self.count > 1 and all(
            division[0] == 1 for _, division in _iterate_loader_divisions(loader)
        ):
            raise DataError(
                "the loader gives every rank the full batch, but the plan's `dataset_strategy`"
                f" divides the batch into {self.count} shards\nlet the framework set up the"
                " loader, or plan with `dataset_strategy='full_batch'`"
            )


def _divide_batch_by_cuts(mesh: Layout, input_cuts: Mapping[str, CutAxes]) -> DataShards:
    # The first entry has the axes that shard the batch dimension.
    axes = {cut[0] for cut in input_cuts.values() if any(cut)}
    if not axes:
        return _make_unsharded_data_shards()
    if len(axes) > 1 or any(any(cut[1:]) for cut in input_cuts.values()):
        raise DataError(
            "`dataset_strategy` of the plan shards inputs over different axes, or along other"
            " dimensions than the batch, but a loader can only divide samples\nplan with"
            " `dataset_strategy='full_batch'` or `'data_parallel'`"
        )
    layout = TensorLayout(mesh, (axes.pop(),))
    # All stages of a pipeline have the same device matrix, and read the same samples.
    shards = [layout.block(rank % mesh.num_devices)[0] for rank in range(_get_world_size())]
    owners = tuple(
        tuple(rank for rank, shard in enumerate(shards) if shard == index)
        for index in range(layout.shard_counts[0])
    )
    return DataShards(len(owners), shards[_get_rank()], owners)


def _make_unsharded_data_shards() -> DataShards:
    return DataShards(1, 0, (tuple(range(_get_world_size())),))


LOADER_PARTS = ("base_dataloader", "batch_sampler", "sampler", "dataset")
"""Attributes of a loader or batch sampler that may contain a sampler dividing samples over ranks.
"""


def _iterate_loader_divisions(loader: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (class name, (number of shards, shard index)) of each sampler that divides samples.

    `DistributedSampler` has the attributes `num_replicas` and `rank`; samplers and datasets of
    Accelerate have `num_processes` and `process_index`. Includes samplers inside batch samplers.
    """
    # With a set, because loaders and samplers may refer to each other.
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
    """Sampler wrapper with the same order on all ranks, drawn from the random state of rank 0.

    A sampler without a generator draws from PyTorch's default one, which may differ between ranks.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # For each epoch, whose order the sampler draws when it is iterated.
        states = generator_states(CPU)
        # As lists, because values are sent as JSON.
        shared = {name: value_of_rank(state.tolist()) for name, state in states.items()}
        states = {name: torch.tensor(state, dtype=torch.uint8) for name, state in shared.items()}
        set_generator_states(states, CPU)
        return iter(self.sampler)

    def __getattr__(self, name: str) -> Any:
        # `sampler` is looked up before it is set, for example when the object is unpickled.
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


def share_order(loader: Any) -> None:
    """Make a `DataLoader` of global batches draw samples in the same order on all ranks."""
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    is_random = isinstance(sampler, RandomSampler | WeightedRandomSampler | SubsetRandomSampler)
    # Users seed a generator of their own themselves.
    if is_random and sampler.generator is None and has_other_ranks():
        batches.sampler = SharedOrder(sampler)


def _get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
