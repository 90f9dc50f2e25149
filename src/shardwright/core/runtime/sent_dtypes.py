"""Send tensors of any dtype with backends that support only some.

gloo and NCCL know no `int16`, no unsigned integers wider than 8 bits, and not all 8-bit
floating-point numbers; gloo's all-to-all knows no complex numbers.
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
    """Return the dtype as which collectives move the bytes of a tensor of `dtype`, which is not
    complex."""
    return dtype if dtype in SUPPORTED else OF_SIZE[dtype.itemsize]


def sendable(x: Tensor) -> Tensor:
    """Return `x` in a form that all backends can move: contiguous, with conjugate and negative bits
    resolved, with complex numbers as pairs of real numbers, and in a supported dtype of equal size.
    """
    # Conjugation and negation are bits of a tensor, of which its memory knows nothing.
    x = x.contiguous().resolve_conj().resolve_neg()
    if x.is_complex():
        return torch.view_as_real(x)
    return x if x.dtype in SUPPORTED else x.view(sent_dtype(x.dtype))


def reducible(x: Tensor) -> Tensor:
    """Return `x` in a form that all backends can move and sum: as `sendable`, but with numbers of
    other dtypes converted to a wider dtype, as their bytes do not add up."""
    if x.dtype in SUPPORTED or x.is_complex():
        return sendable(x)
    return x.contiguous().to(torch.float32 if x.is_floating_point() else torch.int64)


def restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x`, the result of a collective on a `sendable` or `reducible` tensor, in the `dtype`
    of the tensor before."""
    if dtype.is_complex:
        # Already complex if an earlier call has completed it.
        return x if x.is_complex() else torch.view_as_complex(x)
    if dtype in SUPPORTED or x.dtype == dtype:
        return x
    # Of the two forms of a dtype, only that of `uint64` is the same, and has the same bytes.
    return x.view(dtype) if x.dtype == sent_dtype(dtype) else x.to(dtype)


def broadcast(x: Tensor, group: dist.ProcessGroup | None, source: int) -> None:
    """Overwrite `x`, a contiguous tensor, by that of rank `source` of the group. Collective."""
    # A view, so that the bytes are written into the memory of `x`.
    sent = x if x.is_complex() else x.view(sent_dtype(x.dtype))
    dist.broadcast(sent, group=group, group_src=source)
