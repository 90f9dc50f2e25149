"""Any dataset of `torch.utils.data`, read by each rank as its plan asks for, from any position."""

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
    """Batches of a dataset for this rank, epoch after epoch; each iteration is one epoch.

    `state_dict()` is its position, which `load_state_dict` goes on from, on any number of devices
    and with any size of batch; the batch that the loop has in hand counts as done.
    """

    def __init__(self, dataset: Any, sampler: BatchSampler, options: Mapping[str, Any]) -> None:
        self.sampler = sampler
        collate = options.get("collate_fn") or default_collate
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=sampler, **{**options, "collate_fn": partial(_batch, collate)}
        )
        self._epoch = self._sample = 0

    def __len__(self) -> int:
        """Number of batches in what is left of the epoch."""
        self.sampler.set_epoch(self._epoch, self._sample)
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self._epoch, self._sample)
        for batch in self._loader:
            self._sample = min(self._sample + self.sampler.batch_size, self.sampler.samples)
            yield batch
        self._epoch, self._sample = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, the next of its samples, and what their order depends on."""
        return {"epoch": self._epoch, "sample": self._sample, **self._order}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a position.

        Raises:
            DataError: if it is of samples in another order.
        """
        for name, value in self._order.items():
            if state.get(name) != value:
                raise DataError(
                    f"the position is of a dataset with {name} {state.get(name)}, this one has "
                    f"{name} {value}: the order of the samples is another"
                )
        self._epoch, self._sample = state["epoch"], state["sample"]

    @property
    def _order(self) -> dict[str, int]:
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
    """Batches of a dataset, of which this rank reads what the plan's `dataset_strategy` says: the
    whole batch, or its own part.

    Args:
        dataset: with a length and numbered samples, of `torch.utils.data` or `datasets`.
        batch_size: samples of a whole batch, over all ranks.
        seed: which with the number of the epoch gives the order, the same on all ranks.
        drop_last: whether samples that do not fill a last batch are left out.
        options: of `torch.utils.data.DataLoader`, such as `num_workers` and `collate_fn`.

    Raises:
        DataError: if the dataset has no length, has less than one batch, or a batch cannot be
            divided as planned; while iterating, if the samples of a batch differ in shape.
    """
    samples = _length(dataset)
    if not samples:
        raise DataError(f"{type(dataset).__name__} is empty: it has no samples")
    for name in ("batch_sampler", "sampler"):
        if options.get(name) is not None:
            raise DataError(f"{name}=...: the loader draws the same order on all ranks by itself")
    if not isinstance(seed, int):
        raise DataError(f"seed={seed!r}: use a whole number")
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler = BatchSampler(
        samples, plan, rank, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    return PlannedLoader(dataset, sampler, options)


def _length(dataset: Any) -> int:
    """Raises: DataError: it has no length, or no samples by their numbers."""
    kind = type(dataset)
    if isinstance(dataset, DataLoader | Mapping):
        raise DataError(f"a {kind.__name__} has no numbered samples: give the dataset itself")
    problem = "" if hasattr(kind, "__getitem__") else "no samples by their numbers"
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        problem = "no length"
    if isinstance(dataset, IterableDataset) or problem:
        raise DataError(
            f"{kind.__name__} has {problem or 'no samples by their numbers'}, so no rank can read "
            "only its part of it: give a dataset with numbered samples, or pass batches of a "
            "DataLoader of your own through shardwright.run.local_batch"
        )
    return length


def _batch(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    try:
        return collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        # The second is what a worker says, which joins samples in shared memory.
        if "equal size" in str(error) or "resize storage" in str(error):
            raise DataError(
                f"the {len(samples)} samples of a batch differ in shape ({error}): pad them by a "
                "collate_fn such as shardwright.run.PadToMultiple, so that few shapes occur"
            ) from None
        if collate is not default_collate:
            raise
        raise DataError(
            f"the {len(samples)} samples of a batch cannot be joined ({type(error).__name__}: "
            f"{error}): let all have the same keys and tensors or numbers, or give a collate_fn"
        ) from None
