"""Select the samples that a rank passes to the model: the global batch or the rank's shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shardwright.core.layout.layout import TensorLayout
from shardwright.core.plan import Plan
from shardwright.errors import DataError


def local_batch(plan: Plan, rank: int, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the shard of each tensor of a global batch that `rank` passes to the model.

    Args:
        plan: the plan of the model; without a `dataset_strategy`, full tensors are returned.
        rank: the global rank.
        batch: the tensors of the global batch, in the order of the model's inputs.

    Raises:
        DataError: if the number of tensors differs from the number of model inputs, or a tensor
            cannot be sharded as required by the plan's `dataset_strategy`.
    """
    inputs = _get_input_layouts(plan)
    if len(batch) != len(inputs):
        raise DataError(
            f"the batch has {len(batch)} tensors, but the model has {len(inputs)} inputs:"
            f" {', '.join(name for name, _ in inputs)}\npass one tensor per input"
        )
    shards = []
    for tensor, (name, layout) in zip(batch, inputs, strict=True):
        for dim, count in enumerate(layout.shard_counts):
            if tensor.shape[dim] % count:
                raise DataError(
                    f"input {name} of shape {list(tensor.shape)}: dimension {dim} of size"
                    f" {tensor.shape[dim]} is not divisible into the {count} shards of"
                    f" dataset_strategy\nuse a multiple of {count}"
                )
        # The ranks of all pipeline stages pass the batch to the model.
        rank_in_mesh = rank % plan.mesh.num_devices
        shards.append(tensor[layout.slices(rank_in_mesh, tuple(tensor.shape))])
    return tuple(shards)


class BatchSampler(Sampler[list[int]]):
    """Sample indices of one rank, a list per batch, for `DataLoader(batch_sampler=...)`.

    All ranks draw the same order, which depends on `seed` and the epoch only. If the plan's
    `dataset_strategy` replicates the inputs, every rank gets all samples of a batch. If inputs are
    sharded along the batch, each rank gets its shard, and ranks with the same shard, also in other
    pipeline stages, get the same samples.

    Args:
        samples: number of samples in the dataset.
        plan: the plan of the model.
        rank: the global rank.
        batch_size: samples per global batch, over all ranks.
        shuffle: whether to shuffle the samples in each epoch.
        seed: seed of the order of the samples.
        drop_last: whether to drop the last samples of an epoch if they are fewer than a batch;
            otherwise the last batch is smaller.

    Raises:
        DataError: if `plan` is not a plan, there are fewer samples than a batch, the inputs are
            sharded differently along the batch, or a batch cannot be sharded evenly.
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
        if not isinstance(plan, Plan):
            raise DataError(
                f"plan={plan!r} is not a plan\npass the result of `sw.plan`, which determines the "
                "samples of each rank"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise DataError(
                f"batch_size={batch_size!r} is not a positive integer\npass for example "
                "batch_size=8"
            )
        self.samples, self.batch_size = samples, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._layout = _get_batch_layout(plan)
        # All stages of a pipeline have the same device matrix, and read the same samples.
        self._rank_in_mesh = rank % plan.mesh.num_devices
        if samples < batch_size:
            raise DataError(
                f"{samples} samples are less than one batch of {batch_size}\n"
                f"use a batch_size of at most {samples}"
            )
        self._check_batch_divisible(batch_size, "a batch")
        # Checks the last batch of an epoch too.
        self.set_epoch(0)

    def set_epoch(self, epoch: int, sample: int = 0) -> None:
        """Select the epoch, and the sample at which the next iteration begins.

        Args:
            epoch: index of the epoch, from 0.
            sample: index of the first sample in the order of the epoch, from 0.

        Raises:
            DataError: if the last batch cannot be sharded evenly.
        """
        self.epoch, self.sample = epoch, sample
        # The last batch is the only one of another size, which must also be divisible.
        if not self.drop_last:
            self._check_batch_divisible((self.samples - sample) % self.batch_size, "the last batch")

    def __len__(self) -> int:
        """Return the number of remaining batches of the current epoch."""
        full, remainder = divmod(max(0, self.samples - self.sample), self.batch_size)
        return full + (remainder > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffle:
            # As `DistributedSampler` of PyTorch seeds the order of an epoch.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        # Resumes within the order of the full epoch, so the batch size may have changed since.
        order = order[self.sample :]
        for index in range(len(self)):
            batch = order[index * self.batch_size : (index + 1) * self.batch_size]
            # Python integers, as not every dataset takes tensors as indices.
            yield batch[self._layout.slices(self._rank_in_mesh, (len(batch),))].tolist()

    def _check_batch_divisible(self, samples: int, batch: str) -> None:
        """Raise DataError unless a batch can be sharded evenly.

        Args:
            samples: number of samples in the batch.
            batch: name of the batch in the error.
        """
        (num_shards,) = self._layout.shard_counts
        if samples % num_shards:
            raise DataError(
                f"{batch} has {samples} samples, but dataset_strategy divides a batch into"
                f" {num_shards} shards\nuse a multiple of {num_shards}"
                + ("" if batch == "a batch" else ", or drop_last=True")
            )


def _get_input_layouts(plan: Plan) -> list[tuple[str, TensorLayout]]:
    """Return the name of each tensor input, and the layout in which ranks pass the input."""
    tensors = [leaf for leaf in plan.inputs if isinstance(leaf, dict)]
    return [
        (
            leaf["name"],
            TensorLayout(plan.mesh, plan.arrivals.get(leaf["name"], ((),) * len(leaf["shape"]))),
        )
        for leaf in tensors
    ]


def _get_batch_layout(plan: Plan) -> TensorLayout:
    """Return the layout of the batch dimension, common to all inputs that have one.

    Raises:
        DataError: if inputs are sharded differently along the batch.
    """
    batched = [leaf for leaf in plan.inputs if isinstance(leaf, dict) and leaf["shape"]]
    # Only inputs of the same size of dimension 0 as the first input have the batch dimension.
    names = [leaf["name"] for leaf in batched if leaf["shape"][0] == batched[0]["shape"][0]]
    axes = {layout.axes[0] for name, layout in _get_input_layouts(plan) if name in names}
    if len(axes) != 1:
        raise DataError(
            f"dataset_strategy shards the inputs {', '.join(names)} differently along the batch, so"
            " that a rank needs different samples of each input\n"
            "use `shardwright.run.local_batch` on global batches"
        )
    return TensorLayout(plan.mesh, (axes.pop(),))
