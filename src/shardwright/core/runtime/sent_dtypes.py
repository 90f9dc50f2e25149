"""Send tensors of dtypes that communication backends do not support.

gloo and NCCL do not support `int16`, unsigned integers wider than 8 bits, and some 8-bit
floating-point dtypes; gloo's all-to-all does not support complex numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

SUPPORTED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""Dtypes that collectives of all backends support."""

OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""A dtype in `SUPPORTED` for each number of bytes of an element."""


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which collectives send the bytes of a non-complex tensor of `dtype`."""
    return dtype if dtype in SUPPORTED else OF_SIZE[dtype.itemsize]


def sendable(x: Tensor) -> Tensor:
    """Return `x` in a form that all backends can send.

    The result is contiguous, with conjugate and negative bits resolved, with complex numbers as
    pairs of real numbers, and in a supported dtype of equal size.
    """
    # Conjugation and negation are flags of the tensor; its memory is the same with and without.
    x = x.contiguous().resolve_conj().resolve_neg()
    if x.is_complex():
        return torch.view_as_real(x)
    return x if x.dtype in SUPPORTED else x.view(sent_dtype(x.dtype))


def reducible(x: Tensor) -> Tensor:
    """Return `x` in a form that all backends can send and sum.

    Unsupported dtypes are converted to float32 or int64, instead of reinterpreted as in `sendable`.
    """
    if x.dtype in SUPPORTED or x.is_complex():
        return sendable(x)
    return x.contiguous().to(torch.float32 if x.is_floating_point() else torch.int64)


def restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `x`, the result of a collective on a tensor from `sendable` or `reducible`, back to
    `dtype`, the dtype of the original tensor."""
    if dtype.is_complex:
        # Already complex if an earlier call has completed it.
        return x if x.is_complex() else torch.view_as_complex(x)
    if dtype in SUPPORTED or x.dtype == dtype:
        return x
    # Of the two forms of a dtype, only that of `uint64` is the same, and has the same bytes.
    return x.view(dtype) if x.dtype == sent_dtype(dtype) else x.to(dtype)


def broadcast(x: Tensor, group: dist.ProcessGroup | None, source: int) -> None:
    """Overwrite `x`, a contiguous tensor, with `x` of rank `source` of the group. Collective."""
    # A view, so that the bytes are written into the memory of `x`.
    sent = x if x.is_complex() else x.view(sent_dtype(x.dtype))
    dist.broadcast(sent, group=group, group_src=source)
