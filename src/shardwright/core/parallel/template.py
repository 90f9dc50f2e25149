"""A copy of the model on the meta device, for capturing calls with other shapes or modes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.deferred import copies_of_attributes
from shardwright.core.torch_internals.modules import memo_of_process_groups


def template_of(module: nn.Module) -> nn.Module:
    """Return a copy of `module` on the meta device with equal shapes, strides and dtypes."""

    def to_meta(tensor: Tensor) -> Tensor:
        # With the strides, on which it depends whether a tensor can be viewed in another shape.
        shape, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")

    # Through the memo of `deepcopy` tied parameters stay tied, and no values are copied.
    memo: dict[int, Any] = {**copies_of_attributes(module), **memo_of_process_groups(module)}
    memo.update(
        (id(p), nn.Parameter(to_meta(p), requires_grad=p.requires_grad))
        for p in module.parameters()
    )
    memo.update((id(b), to_meta(b)) for b in module.buffers())
    return copy.deepcopy(module, memo)
