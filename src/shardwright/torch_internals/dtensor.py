"""DTensors without the autograd and the checks of their public functions."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["DTensorSpec", "StridedShard", "held_chunks", "local_tensor", "spec_of", "with_spec"]

StridedShard = _StridedShard
"""The placement of a dimension that axes further right cut first: its blocks are `split_factor`
apart. Without it a `DeviceMesh` could cut a dimension from left to right only."""


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part, which `to_local()` gives through an autograd function."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, shape, strides and dtype."""
    return tensor._spec


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor without gradient whose part on this rank is `local`; `DTensor.from_local` would
    take longer than small operators."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def held_chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Offsets and sizes, in the whole tensor, of what this rank holds."""
    return tensor.__create_chunk_list__()  # type: ignore[no-any-return,no-untyped-call]
