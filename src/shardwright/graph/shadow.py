"""A copy of a module that needs no memory: its tensors are fake, the module stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from shardwright.deferred import deferred_attributes, value_of
from shardwright.errors import CaptureError
from shardwright.graph.precision import STORED, cast_parameters


def shadow(
    module: nn.Module, args: Any, kwargs: Any, compute_dtype: torch.dtype | None = None
) -> tuple[nn.Module, Any, Any]:
    """The module and its arguments with a fake tensor for every parameter, buffer and argument.

    Parameters may be real or on the meta device; tied ones stay tied. The same tensor given twice
    becomes two.

    Args:
        compute_dtype: of parameters and arguments that are in single precision.

    Raises:
        CaptureError: for a module with uninitialised (lazy) parameters, or that cannot be copied.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    cast = cast_parameters(module, compute_dtype)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise CaptureError(
                f"{name}: this parameter has no shape yet. Run the module once before capturing it."
            )
        fake = _fake(mode, parameter, compute_dtype if id(parameter) in cast else None)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _fake(mode, buffer)
    memo |= {id(tensor): value_of(tensor) for tensor in deferred_attributes(module)}
    for child in module.modules():
        for attribute in vars(child).values():
            if isinstance(attribute, torch.Tensor):
                memo.setdefault(id(attribute), attribute.detach())
    try:
        twin = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied (`copy.deepcopy`): {error}. Capturing works "
            f"on a copy without weights; keep what cannot be copied out of the module's attributes."
        ) from error
    fake_args, fake_kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: _fake(mode, t, compute_dtype if t.dtype == STORED else None),
        (args, kwargs),
    )
    return twin, fake_args, fake_kwargs


def _fake(
    mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)
