"""Grouped matrix multiplication: rows sorted by group, each multiplied by its group's matrix.

The operator is opaque, since the sizes of the groups depend on values. Tensors that PyTorch's
`grouped_mm` does not support (float64, some strides) are multiplied group by group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("shardwright::segment_matmul", mutates_args=())
def segment_matmul(rows: Tensor, matrices: Tensor, ends: Tensor, tail: bool = False) -> Tensor:
    """Multiply the rows of group g by `matrices[g]`.

    Args:
        rows: `[rows, inner]`, sorted by group.
        matrices: `[groups, inner, columns]`.
        ends: `[groups]`, int32: index after the last row of each group (`offs` of `grouped_mm`).
        tail: whether rows may follow the last group; their result is 0.

    Returns:
        `[rows, columns]`.
    """
    if _has_grouped_kernel(rows, matrices):
        out = F.grouped_mm(rows, matrices, offs=ends)
    else:
        out = rows.new_empty(rows.shape[0], matrices.shape[2])
        for group, group_rows in _iterate_group_slices(ends):
            torch.mm(rows[group_rows], matrices[group], out=out[group_rows])
    # The kernels leave rows behind the last group unwritten. Only with a tail, as `int` waits for
    # the device.
    if tail:
        out[int(ends[-1]) :] = 0
    return out


@torch.library.custom_op("shardwright::segment_outer", mutates_args=())
def _sum_outer_products(rows: Tensor, gradients: Tensor, ends: Tensor) -> Tensor:
    """Return `rows[g]' @ gradients[g]` of each group g, `[groups, inner, columns]`.

    Args:
        rows: `[rows, inner]`, sorted by group.
        gradients: `[rows, columns]`.
        ends: `[groups]`: index after the last row of each group.
    """
    if _has_grouped_kernel(rows, gradients):
        return F.grouped_mm(rows.mT, gradients, offs=ends)
    # A group without rows gets a gradient of zeros.
    out = rows.new_zeros(ends.shape[0], rows.shape[1], gradients.shape[1])
    for group, group_rows in _iterate_group_slices(ends):
        torch.mm(rows[group_rows].mT, gradients[group_rows], out=out[group])
    return out


def _has_grouped_kernel(*tensors: Tensor) -> bool:
    """Whether `F.grouped_mm` supports these tensors; it needs strides of multiples of 16 bytes."""
    first = tensors[0]
    return (
        first.device.type == "cuda"
        and first.dtype == torch.bfloat16
        and first.shape[0] > 0
        # Ampere and newer.
        and torch.cuda.get_device_capability(first.device) >= (8, 0)
        and all(n * t.itemsize % 16 == 0 for t in tensors for n in t.stride() if n != 1)
    )


def _iterate_group_slices(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the index and the row slice of each non-empty group."""
    start = 0
    # One transfer to the host for all groups.
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


@segment_matmul.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor, tail: bool = False) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_sum_outer_products.register_fake
def _(rows: Tensor, gradients: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradients.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.tail = inputs
    ctx.save_for_backward(*tensors)


def _matmul_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, matrices, ends = ctx.saved_tensors
    needs_grad = ctx.needs_input_grad
    # The gradient of a sum is an expanded tensor, with strides of 0.
    gradient = gradient.contiguous()
    # The rows of a tail have a result of 0, and so a gradient of 0.
    grad_rows = segment_matmul(gradient, matrices.mT, ends, ctx.tail) if needs_grad[0] else None
    grad_matrices = _sum_outer_products(rows, gradient, ends) if needs_grad[1] else None
    return grad_rows, grad_matrices, None, None


segment_matmul.register_autograd(_matmul_backward, setup_context=_save_for_backward)
