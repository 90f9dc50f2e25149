"""Register the fused kernels of a device for tensors on the meta device.

PyTorch chooses a kernel of `scaled_dot_product_attention`, `rms_norm` and `dropout` by device. On
the meta device it would decompose them into operators that save more tensors for the backward pass:
the scores of attention, the normalized input of a norm, a dropout mask in the dtype of the input.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.runtime.accelerator import accelerator_type
from shardwright.core.torch_internals.operators import call_composite, unregister

aten = torch.ops.aten


class FusedKernels:
    """Context manager that registers the fused kernels of an accelerator or of a CPU for tensors on
    the meta device.

    Kernels are registered with the dispatcher instead of a dispatch mode, because modes are
    disabled while a backward pass recomputes segments.

    Args:
        on_accelerator: whether the device is an accelerator; by default whether this machine has
            one.
    """

    def __init__(self, on_accelerator: bool | None = None) -> None:
        if on_accelerator is None:
            on_accelerator = accelerator_type() is not None
        self._kernels = _ACCELERATOR_KERNELS if on_accelerator else _CPU_KERNELS

    def __enter__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in self._kernels.items():
            # This key precedes PyTorch's composite kernel, and only for tensors on the meta device.
            self._library.impl(name, kernel, "AutogradMeta")  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        unregister(self._library)


def _cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    mask_needs_gradient = attn_mask is not None and attn_mask.requires_grad
    # The conditions of PyTorch's CPU flash kernel.
    if query.ndim != 4 or len(sizes) > 1 or dropout_p > 0 or mask_needs_gradient:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _decomposed_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    mask = _convert_mask_to_score_bias(attn_mask, query)
    out: Tensor = kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return out


def _accelerator_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that CUDA would choose: flash attention in half precision without a mask, else
    memory-efficient attention (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`). cuDNN
    attention saves the same tensors as either kernel."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    is_half_precision = query.dtype in (torch.float16, torch.bfloat16)
    is_grouped = query.ndim == 4 and query.shape[1] != key.shape[1]
    out: Tensor
    # Flash attention has kernels for heads of up to 256, equal for queries, keys and values.
    has_flash = query.ndim == 4 and is_half_precision and len(sizes) == 1 and max(sizes) <= 256
    # Only flash and cuDNN attention support fewer key heads than query heads; cuDNN also a mask.
    needs_bias = attn_mask is not None and (not is_grouped or attn_mask.requires_grad)
    if has_flash and not needs_bias:
        kernel = aten._scaled_dot_product_flash_attention.default
        out = kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if query.ndim != 4 or is_grouped:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _decomposed_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    kernel = aten._scaled_dot_product_efficient_attention.default
    mask = _convert_mask_to_score_bias(attn_mask, query)
    if mask is not None:
        # A view: the kernel takes a bias for every head and query, repeated by strides of 0.
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    # Only the backward pass reads the log-sum-exp of the scores.
    saves = any(tensor.requires_grad for tensor in (query, key, value))
    out = kernel(query, key, value, mask, saves, dropout_p, is_causal, scale=scale)[0]
    return out


def _decomposed_attention(*args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
    return out


def _convert_mask_to_score_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the attention bias that corresponds to a mask; None without a mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    # Not a number, so that the bias gets the dtype of the queries, which the kernels require.
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask.logical_not(), float("-inf"), zero)


def _accelerator_rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    # The condition of PyTorch's fused kernel (`aten/src/ATen/native/layer_norm.cpp`).
    if weight is not None and weight.dtype != x.dtype:
        out: Tensor = call_composite(aten.rms_norm.default, x, normalized_shape, weight, eps)
        return out
    normalized: Tensor = _FusedRMSNorm.apply(x, weight, prod(normalized_shape))  # type: ignore[no-untyped-call]
    return normalized


class _FusedRMSNorm(torch.autograd.Function):
    """Meta version of `aten._fused_rms_norm`, which saves its input and one statistic per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, width: int) -> Tensor:
        # The kernel keeps `rstd` in float32 also for half precision.
        statistics = x.new_empty(x.numel() // max(width, 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return (
            torch.empty_like(x) if needs_x else None,
            torch.empty_like(weight) if needs_weight else None,
            None,
        )


def _accelerator_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    # The condition of PyTorch's fused kernel (`aten/src/ATen/native/Dropout.cpp`).
    if not train or not 0 < p < 1:
        out: Tensor = call_composite(aten.dropout.default, x, p, train)
        return out
    dropped: Tensor = aten.native_dropout.default(x, p, train)[0]
    return dropped


_CPU_KERNELS = {"scaled_dot_product_attention": _cpu_attention}
_ACCELERATOR_KERNELS = {
    "scaled_dot_product_attention": _accelerator_attention,
    "rms_norm": _accelerator_rms_norm,
    "dropout": _accelerator_dropout,
}
