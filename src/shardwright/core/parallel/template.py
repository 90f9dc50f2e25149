"""A copy of the model on the meta device, from which calls in other situations are captured."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.deferred import copies_of_attributes


def template_of(module: nn.Module) -> nn.Module:
    """Copy `module` to the meta device, with shapes, strides and dtypes of its tensors."""

    def meta(tensor: Tensor) -> Tensor:
        shape, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")

    memo: dict[int, Any] = copies_of_attributes(module)
    memo.update(
        (id(p), nn.Parameter(meta(p), requires_grad=p.requires_grad)) for p in module.parameters()
    )
    memo.update((id(b), meta(b)) for b in module.buffers())
    return copy.deepcopy(module, memo)
