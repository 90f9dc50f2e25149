"""Which samples each rank feeds: the whole batch, or the part of it that arrives at its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shardwright.errors import DataError
from shardwright.layout.layout import TensorLayout
from shardwright.plan import Plan


def local_part(plan: Plan, rank: int, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What `rank` gives the model of a whole batch: of each input tensor the block that arrives.

    Raises:
        DataError: if the batch has another number of tensors than the model has inputs, or a tensor
            cannot be cut as its input arrives.
    """
    inputs = _inputs(plan)
    if len(batch) != len(inputs):
        raise DataError(
            f"the batch has {len(batch)} tensors, but the model has {len(inputs)} inputs:"
            f" {', '.join(name for name, _ in inputs)}"
        )
    parts = []
    for tensor, (name, arrival) in zip(batch, inputs, strict=True):
        for dim, count in enumerate(arrival.shard_counts):
            if tensor.shape[dim] % count:
                raise DataError(
                    f"input {name} arrives in {count} equal parts of dimension {dim}, which a"
                    f" batch of shape {list(tensor.shape)} does not allow"
                )
        place = rank % plan.mesh.num_devices
        parts.append(tensor[arrival.slices(place, tuple(tensor.shape))])
    return tuple(parts)


class BatchSampler(Sampler[list[int]]):
    """The numbers of the samples that one rank feeds, a list for each batch.

    For `DataLoader(data, batch_sampler=...)`. All ranks draw the same order, which depends on
    `seed` and the epoch only. Where inputs arrive whole every rank is given every sample; where
    they arrive cut along the batch each rank is given its block, and ranks that hold the same block
    (of different pipeline stages, too) the same samples.

    Args:
        samples: how many there are.
        batch_size: samples of the whole batch, over all ranks.
        drop_last: leave out the samples that do not fill a last batch; else they are a smaller one.

    Raises:
        DataError: there is not one whole batch, the inputs arrive cut differently along the batch,
            or a batch, the last one included, cannot be cut as they arrive.
    """

    def __init__(
        self,
        samples: int,
        plan: Plan,
        rank: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._arrival = _arrival_of_rows(plan)
        self._place = rank % plan.mesh.num_devices
        if samples < batch_size:
            raise DataError(
                f"{samples} samples do not fill one batch of {batch_size}: use a batch_size of at"
                f" most {samples}"
            )
        self._check_divides(batch_size, "a batch")
        if not drop_last:
            self._check_divides(samples % batch_size, "the last batch")

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of epoch `epoch`."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        for number in range(len(self)):
            rows = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield rows[self._arrival.slices(self._place, (len(rows),))].tolist()

    def _check_divides(self, rows: int, what: str) -> None:
        (parts,) = self._arrival.shard_counts
        if rows % parts:
            raise DataError(
                f"{what} has {rows} samples, and the inputs arrive in {parts} equal parts of it:"
                f" choose numbers that {parts} divides"
                + ("" if what == "a batch" else ", or drop_last=True")
            )


def _inputs(plan: Plan) -> list[tuple[str, TensorLayout]]:
    """Each tensor input with the layout in which it arrives."""
    tensors = [leaf for leaf in plan.inputs if isinstance(leaf, dict)]
    return [
        (
            leaf["name"],
            TensorLayout(plan.mesh, plan.arrivals.get(leaf["name"], ((),) * len(leaf["shape"]))),
        )
        for leaf in tensors
    ]


def _arrival_of_rows(plan: Plan) -> TensorLayout:
    """How dimension 0 of all inputs that have the batch arrives."""
    sized = [leaf for leaf in plan.inputs if isinstance(leaf, dict) and leaf["shape"]]
    names = [leaf["name"] for leaf in sized if leaf["shape"][0] == sized[0]["shape"][0]]
    found = {arrival.axes[0] for name, arrival in _inputs(plan) if name in names}
    if len(found) != 1:
        raise DataError(
            f"the inputs {', '.join(names)} arrive cut differently along the batch, so that no"
            " list of samples serves them all: use shardwright.train.local_part on whole batches"
        )
    return TensorLayout(plan.mesh, (found.pop(),))
