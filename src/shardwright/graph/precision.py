"""Computing in another dtype than the parameters are stored in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

STORED = torch.float32
"""What is computed in the other dtype: single precision. Other dtypes stay as they are."""

LOSSES = frozenset(
    getattr(functional, name)
    for name in dir(functional)
    if name.endswith("_loss")
    or name in ("cross_entropy", "kl_div")
    or name.startswith("binary_cross_entropy")
)


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> frozenset[int]:
    """The identities of the parameters that are computed in `dtype`.

    Parameters of a module with floating buffers of its own stay: a batch norm computes with its
    statistics, in their dtype.
    """
    found: set[int] = set()
    for child in module.modules() if dtype is not None else ():
        if not any(buffer.is_floating_point() for buffer in child.buffers(recurse=False)):
            found.update(id(p) for p in child.parameters(recurse=False) if p.dtype == STORED)
    return frozenset(found)


class LossesInSinglePrecision(TorchFunctionMode):
    """Within it, losses of half precision are computed in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in LOSSES:
            args, kwargs = pytree.tree_map_only(Tensor, _single, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _single(tensor: Tensor) -> Tensor:
    half = tensor.is_floating_point() and tensor.dtype.itemsize < STORED.itemsize
    return tensor.to(STORED) if half else tensor
