"""The leaves of a call as programs take them: plain tensors, on this rank's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.misuse.whole_batch import to_plain_tensor, to_plain_tensors
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import SampleDims, global_leaves
from shardwright.core.torch_internals import pytree


@dataclass(frozen=True)
class CallLeaves:
    """Converts the leaves of calls.

    Args:
        partitioned: the planned model.
    """

    partitioned: Partitioned
    devices: Devices

    def on_device(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves as plain tensors where the program runs."""
        device = self.devices.device
        return [
            to_plain_tensor(leaf).to(device) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]

    def with_global_shapes(
        self, leaves: list[Any], planned_indices: Sequence[int | None]
    ) -> list[Any]:
        """The leaves with global shapes; inputs that arrive sharded become meta tensors."""
        graph, arrivals = self.partitioned.graph, self.partitioned.decisions.arrivals
        planned = [None if index is None else graph.inputs[index] for index in planned_indices]
        ordinary_leaves = to_plain_tensors(planned, arrivals, leaves)
        return global_leaves(planned, self.devices.matrix, arrivals, ordinary_leaves)

    def sample_dims(self, numbers: Sequence[int | None]) -> SampleDims:
        """The dimension of the samples of each leaf of a call; empty for dimension 0.

        Args:
            numbers: position of each leaf in the planned call.
        """
        dims = self.partitioned.pipeline.batch_dims
        return tuple(None if n is None else dims[n] for n in numbers) if dims else ()


def full_leaves(call: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of a call; DTensors, such as outputs of other models, are gathered."""
    leaves, spec = pytree.tree_flatten(call)
    return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves], spec


def has_dtensors(call: Any) -> bool:
    """Whether an argument of a call is a DTensor."""
    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(call))
