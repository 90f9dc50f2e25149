"""`sw.dataloader`: batches of a map-style dataset, sharded as planned and resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from shardwright.core.checkpoint.sampler import BatchSampler
from shardwright.core.plan import Plan
from shardwright.errors import DataError


class PlannedLoader:
    """Data loader of one rank; each iteration is one epoch.

    `state_dict()` returns the position in the data after the last yielded batch. From there,
    `load_state_dict` resumes on any number of devices and with any batch size.

    Args:
        dataset: the map-style dataset.
        sampler: the sample indices of each batch of this rank.
        options: options of `torch.utils.data.DataLoader`.
    """

    def __init__(self, dataset: Any, sampler: BatchSampler, options: Mapping[str, Any]) -> None:
        self.sampler = sampler
        collate = options.get("collate_fn") or default_collate
        collate_fn = partial(_collate_samples, collate)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=sampler, **{**options, "collate_fn": collate_fn}
        )
        self._epoch = self._sample = 0

    def __len__(self) -> int:
        """Return the number of remaining batches of the current epoch."""
        self.sampler.set_epoch(self._epoch, self._sample)
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self._epoch, self._sample)
        for batch in self._loader:
            # Counted here and not in the sampler, from which workers of the `DataLoader` read
            # ahead; before the `yield`, so that a position that is saved in the loop's body is
            # after this batch.
            self._sample = min(self._sample + self.sampler.batch_size, self.sampler.samples)
            yield batch
        self._epoch, self._sample = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data: indices of the epoch and of the next sample, and the
        numbers that determine the order of samples."""
        return {"epoch": self._epoch, "sample": self._sample, **self._sample_order_settings}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a position in the data.

        Args:
            state: the position that `state_dict` of a loader returned.

        Raises:
            DataError: if the number of samples, `seed` or `shuffle` differs from that of the saved
                position.
        """
        for name, value in self._sample_order_settings.items():
            # Otherwise the position would skip some samples and repeat others.
            if state.get(name) != value:
                raise DataError(
                    "the saved position of the data loader is for another order of samples:"
                    f" {name!r} was {state.get(name)} when it was saved, but is {value}\n"
                    f"make the data loader with {name}={state.get(name)!r}"
                )
        self._epoch, self._sample = state["epoch"], state["sample"]

    @property
    def _sample_order_settings(self) -> dict[str, int]:
        """Number of samples, seed and `shuffle`, which determine the order of samples."""
        sampler = self.sampler
        return {"samples": sampler.samples, "seed": sampler.seed, "shuffle": int(sampler.shuffle)}


def dataloader(
    dataset: Any,
    batch_size: int,
    plan: Plan,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    **options: Any,
) -> PlannedLoader:
    """Make a data loader of the batches that this rank passes to the model.

    The plan's `dataset_strategy` determines whether a rank reads the global batch or its shard.

    Args:
        dataset: a map-style dataset of `torch.utils.data` or `datasets`, with `__len__` and
            `__getitem__`.
        batch_size: samples per global batch, over all ranks.
        plan: the plan of the model.
        shuffle: whether to shuffle the samples in each epoch.
        seed: seed of the order of samples, which is the same on all ranks and differs per epoch.
        drop_last: whether to drop the last samples of an epoch if they are fewer than a batch.
        options: options of `torch.utils.data.DataLoader`, such as `num_workers` and `collate_fn`.

    Raises:
        DataError: if the dataset is not map-style, has fewer samples than a batch, or a batch
            cannot be sharded as planned; during iteration, if samples of a batch differ in shape.
    """
    samples = _count_samples(dataset)
    if not samples:
        raise DataError(
            f"{type(dataset).__name__} is empty: it has no samples\npass a dataset with samples for"
            " at least one batch"
        )
    # `DataLoader` accepts one sampler, here that of this loader.
    for name in ("batch_sampler", "sampler"):
        if options.get(name) is not None:
            raise DataError(
                f"`{name}` is not supported: the loader draws the order of samples itself, the same"
                f" on all ranks\nremove `{name}`, and choose the order with `shuffle` and `seed`"
            )
    if not isinstance(seed, int):
        raise DataError(f"seed={seed!r} is not an integer\npass for example seed=0")
    # One device without a process group reads like rank 0.
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler = BatchSampler(
        samples, plan, rank, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    return PlannedLoader(dataset, sampler, options)


def _count_samples(dataset: Any) -> int:
    """Return the number of samples of a dataset.

    Raises:
        DataError: if the dataset is not map-style.
    """
    dataset_type = type(dataset)
    if isinstance(dataset, DataLoader | Mapping):
        raise DataError(
            f"`{dataset_type.__name__}` is not a map-style dataset\npass a dataset whose samples"
            " have indices, such as the `dataset` of a DataLoader"
        )
    # In the class, where Python looks up special methods.
    problem = "" if hasattr(dataset_type, "__getitem__") else "no sample indices"
    try:
        length = len(dataset)
    # TypeError: the class has no `__len__`; NotImplementedError: it has one that only raises.
    except (TypeError, NotImplementedError):
        problem = "no length"
    if isinstance(dataset, IterableDataset) or problem:
        raise DataError(
            f"{dataset_type.__name__} has {problem or 'no sample indices'}, so a rank cannot "
            "read only its shard\npass a map-style dataset (with __len__ and __getitem__), or "
            "batches of your own DataLoader through shardwright.run.local_batch"
        )
    return length


def _collate_samples(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Collate samples, with an error that explains what to do if they differ in shape.

    Args:
        collate: the user's `collate_fn`, or PyTorch's default.
        samples: this rank's samples of a batch.

    Raises:
        DataError: if the samples differ in shape or structure.
    """
    try:
        return collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        # In the main process `torch.stack` complains of unequal sizes; in a worker, which stacks
        # into shared memory, resizing that memory fails.
        if "equal size" in str(error) or "resize storage" in str(error):
            raise DataError(
                f"the {len(samples)} samples of a batch differ in shape ({error})\n"
                "pad them with a collate_fn such as shardwright.run.PadToMultiple, which yields "
                "few different shapes"
            ) from None
        # An error of the user's own function says best what is wrong.
        if collate is not default_collate:
            raise
        raise DataError(
            f"the {len(samples)} samples of a batch cannot be joined ({type(error).__name__}: "
            f"{error})\nreturn the same keys with tensors or numbers from every sample, or pass a "
            "collate_fn"
        ) from None
