"""Autocast as it acts where a model computes.

Tracing works on the CPU, whose autocast casts other operators than that of accelerators. For a
model that computes on one of these, the CPU's kernels are replaced while a region is traced. The
lists of operators are those of PyTorch's documentation ("CUDA Ops that can autocast").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import fallthrough_kernel

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import (
    Region,
    autocast_kernels,
    below_autocast,
    names_with_autocast,
    region_of,
    set_region,
)
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.errors import CaptureError

CPU = "cpu"

LIKE_CUDA = ("cuda", "xpu", "mtia")
"""The types of devices whose autocast has the lists of CUDA's."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _names(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    lstm.input gru.input rnn_tanh.input rnn_relu.input
    """
)
"""What is computed in the region's dtype; recurrences are, as cuDNN gets all of theirs cast."""

SINGLE = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
"""What is computed in single precision, if it is not given the dtype of its result."""

WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
"""What is computed in the widest dtype of its arguments."""


@dataclass(frozen=True)
class Autocast:
    """What autocast does in a call.

    Args:
        device_type: of the device that computes; None where it is the first accelerator that a
            region names, or else the CPU.
        dtype: of the region that the call is made in; None outside of regions.
    """

    device_type: str | None = CPU
    dtype: torch.dtype | None = None

    @classmethod
    def around(cls, device: torch.device) -> Autocast:
        """That of a call made here that computes on `device`; on the meta device there is none."""
        if device.type == "meta":
            return cls(None)
        within = torch.is_autocast_enabled(device.type)
        return cls(device.type, torch.get_autocast_dtype(device.type) if within else None)

    @classmethod
    def inside(cls, device: torch.device) -> Autocast:
        """That of a call on `device` which is made in no region."""
        return replace(cls.around(device), dtype=None)

    def acts_as(self, device_type: str | None) -> bool:
        """Whether regions that were captured for a type of device (None: there are none) are what
        they are here."""
        return None in (self.device_type, device_type) or self.device_type == device_type

    def disabled(self) -> AbstractContextManager[Any]:
        """A context in which operators cast nothing."""
        kind = self.device_type
        return nullcontext() if kind is None else torch.autocast(kind, enabled=False)


ON_CPU = Autocast()

_METHODS = ("__init__", "__enter__", "__exit__")


class TracedRegions:
    """The regions of autocast that a trace has met.

    Args:
        device_type: of the device that computes, or None.
    """

    def __init__(self, device_type: str | None) -> None:
        self._device_type = device_type
        self._any_enabled = False
        self._entered: list[tuple[Region, ExitStack]] = []

    @property
    def device_type(self) -> str | None:
        """For which a region was enabled, whether it acts there or not; None if none was."""
        return self._device_type or CPU if self._any_enabled else None

    def enter(self, region: torch.autocast, enabled: bool, enter: Callable[[Any], Any]) -> Any:
        """Enters a region: one that acts becomes one of the CPU.

        Raises:
            CaptureError: for an accelerator whose autocast has lists of its own.
        """
        (named, _), stack = region_of(region), ExitStack()
        self._entered.append((region_of(region), stack))
        self._any_enabled |= enabled
        if self._device_type is None and enabled and named != CPU:
            self._device_type = named
        on = self._device_type or CPU
        # A model that asks a tensor for its device is told "cpu".
        if named not in (CPU, on):
            return enter(region)
        if on != CPU and enabled:
            if on not in LIKE_CUDA:
                raise CaptureError(
                    f"cannot capture autocast for {on!r}. Cast explicitly with `.to(dtype)`, or "
                    "convert the model to the lower precision."
                )
            stack.enter_context(autocast_kernels(kernels_like_cuda()))
        set_region(region, (CPU, enabled))
        result = enter(region)
        if on != CPU:
            stack.enter_context(_answers(on, enabled, region.fast_dtype))
        return result

    def exit(self, region: torch.autocast, leave: Callable[[Any], Any]) -> Any:
        asked, stack = self._entered.pop()
        stack.close()
        result = leave(region)
        set_region(region, asked)
        return result


def call_in_autocast(module: nn.Module, autocast: Autocast) -> None:
    """Lets a copy of a module that is traced be called in the region that surrounds its call."""
    if autocast.dtype is None:
        return
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(autocast.device_type or CPU, autocast.dtype):
            return original(*args, **kwargs)

    module.forward = forward


@contextmanager
def traced_autocast(autocast: Autocast) -> Iterator[TracedRegions]:
    """A context in which regions act on tensors of the CPU as they would where the model
    computes."""
    regions = TracedRegions(autocast.device_type)
    begin, enter, leave = (vars(torch.autocast)[name] for name in _METHODS)

    def init(region: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            if autocast.device_type != CPU:
                warnings.simplefilter("ignore")  # That there is no accelerator here.
            begin(region, device_type, *args, **kwargs)
        region.asked = args[1] if len(args) > 1 else kwargs.get("enabled", True)

    def entered(region: Any) -> Any:
        return regions.enter(region, getattr(region, "asked", region_of(region)[1]), enter)

    def left(region: Any, *error: Any) -> Any:
        return regions.exit(region, lambda region: leave(region, *error))

    _set_methods((init, entered, left))
    try:
        yield regions
    finally:
        _set_methods((begin, enter, leave))


def _set_methods(methods: tuple[Callable[..., Any], ...]) -> None:
    for name, method in zip(_METHODS, methods, strict=True):
        setattr(torch.autocast, name, method)


@contextmanager
def _answers(device_type: str, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """A context in which PyTorch tells a model that asks what autocast does on a device."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


@cache
def kernels_like_cuda() -> dict[str, Callable[..., Any]]:
    """What operators do in a region on the CPU that acts as one of CUDA, by their names."""
    kernels = dict.fromkeys(names_with_autocast("AutocastCPU"), fallthrough_kernel)
    for names, cast in ((LOWER, _lower), (SINGLE, _single), (WIDEST, _widest)):
        for name in names:
            operator, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, operator), overload or "default")
            kernels[f"aten::{name}"] = partial(_run, op, cast)
    return kernels


def _run(op: OpOverload, cast: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with below_autocast():
        args, kwargs = cast(op, args, kwargs)
        return op(*args, **kwargs)


def _lower(op: OpOverload, args: Any, kwargs: Any) -> Any:
    return _as(torch.get_autocast_dtype(CPU), args, kwargs)


def _single(op: OpOverload, args: Any, kwargs: Any) -> Any:
    names = (argument.name for argument in schema_of(op).arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return (args, kwargs) if given.get("dtype") else _as(torch.float32, args, kwargs)


def _widest(op: OpOverload, args: Any, kwargs: Any) -> Any:
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _eligible(leaf)}
    wide = torch.float32 in dtypes
    return _as(torch.float32 if wide else torch.get_autocast_dtype(CPU), args, kwargs)


def _as(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(lambda x: x.to(dtype) if _eligible(x) else x, (args, kwargs))


def _eligible(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not torch.float64
