"""Conversion of a call's leaves to the inputs of programs: plain tensors on this rank's device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.capture.capturable import check_argument
from shardwright.core.graph.graph import Value
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.local_gradients import scale_gradient
from shardwright.core.runtime.micro_batches import SampleDims, global_leaves
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError, DataError, PlanError


@dataclass(frozen=True)
class CallLeaves:
    """Converts the leaves of a call's arguments to inputs of programs on this rank.

    Args:
        partitioned: the planned model; determines which inputs ranks pass as local batches.
    """

    partitioned: Partitioned
    devices: Devices

    def on_device(self, leaves: Sequence[Any], planned_indices: Sequence[int | None]) -> list[Any]:
        """Move the leaves of a call to this rank's device.

        Ranks average their losses. The gradient of a local batch is multiplied by the number of
        local batches, so that it is the gradient of this rank's own loss.

        Args:
            leaves: the leaves as passed to this rank.
            planned_indices: index of each leaf in the planned call; None for a leaf that the
                planned call does not have.

        Raises:
            DataError: if a leaf is on the meta device.
        """
        device, inputs = self.devices.device, self.partitioned.graph.inputs
        result = []
        for leaf, index in zip(leaves, planned_indices, strict=True):
            if isinstance(leaf, Tensor):
                if leaf.is_meta and device.type != "meta":
                    raise DataError(
                        f"an argument of shape {tuple(leaf.shape)} is on the meta device, where"
                        " tensors have no values\npass a batch with values; tensors on the meta"
                        " device suffice for `sw.plan`"
                    )
                # Every rank passes the full tensor of a leaf that the planned call did not have.
                axes = () if index is None else self._get_local_batch_axes(inputs[index])
                count = self.devices.matrix.size(chain(*axes))
                # The inverse of the factor at local outputs (`BoundProgram.wrap_outputs`).
                leaf = scale_gradient(leaf.to(device), count)
            result.append(leaf)
        return result

    def _get_local_batch_axes(self, planned_leaf: object) -> CutAxes:
        """Return the mesh axes that shard each dimension of an input passed as local batches.

        Returns () if ranks pass the global batch.
        """
        arrivals = self.partitioned.decisions.arrivals
        return arrivals.get(planned_leaf.name, ()) if isinstance(planned_leaf, Value) else ()

    def with_global_shapes(
        self, leaves: list[Any], planned_indices: Sequence[int | None]
    ) -> list[Any]:
        """Return the leaves with global shapes; local batches become meta tensors.

        Args:
            leaves: the leaves as passed to this rank.
            planned_indices: index of each leaf in the planned call; None for a leaf that the
                planned call does not have.
        """
        graph, arrivals = self.partitioned.graph, self.partitioned.decisions.arrivals
        planned = [None if index is None else graph.inputs[index] for index in planned_indices]
        return global_leaves(planned, self.devices.matrix, arrivals, leaves)

    def sample_dims(self, planned_indices: Sequence[int | None]) -> SampleDims:
        """Return the batch dimension of each leaf of a call; empty if it is dimension 0 for all.

        Args:
            planned_indices: index of each leaf in the planned call; None for a leaf that the
                planned call does not have.
        """
        dims = self.partitioned.pipeline.batch_dims
        if not dims:
            return ()
        return tuple(None if index is None else dims[index] for index in planned_indices)


# The types of leaves of most calls; an object of another type may contain tensors.
_COMMON = (Tensor, bool, int, float, str, type(None))


def full_leaves(call: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return leaves and structure of a call, with DTensors (e.g. other models' outputs) gathered.

    Raises:
        PlanError: if an argument is neither a dense tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten(call)
    # Objects are registered as containers only where an argument is one, as this runs on every
    # call.
    if not all(isinstance(leaf, _COMMON) for leaf in leaves):
        pytree.register_objects(call)
        leaves, spec = pytree.tree_flatten(call)
    for leaf in leaves:
        try:
            check_argument("an argument of the model", leaf)
        except CaptureError as error:
            # The rule is that of captures, but a call whose program is cached may break it too.
            raise PlanError(str(error)) from None
        # Leaves that are no tensors are part of the key of the program.
        if not isinstance(leaf, Hashable):
            raise PlanError(
                f"an argument of the model is an object of unsupported type {type(leaf).__name__}\n"
                "pass its fields, or tensors, numbers, tuples, lists and dicts"
            )
    # Collective: other models' sharded outputs are gathered on all ranks.
    return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves], spec


def has_dtensors(call: Any) -> bool:
    """Whether an argument of a call is a DTensor."""
    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(call))
