"""Tracing on the CPU with the autocast behavior of the device that the model runs on.

Autocast on the CPU casts other operators than autocast on accelerators. For a model that runs on an
accelerator, the autocast kernels of the CPU are replaced while an autocast region is traced. The
lists of operators are from PyTorch's documentation ("CUDA Ops that can autocast").
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
    AutocastState,
    autocast_kernels,
    autocast_state_of,
    below_autocast,
    operators_with_autocast,
    set_autocast_state,
)
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.errors import CaptureError

CPU = "cpu"

LIKE_CUDA = ("cuda", "xpu", "mtia")
"""Device types whose autocast uses the operator lists of CUDA."""


def _split_names(names: str) -> frozenset[str]:
    return frozenset(names.split())


LOWER = _split_names(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    lstm.input gru.input rnn_tanh.input rnn_relu.input
    """
)
"""Operators that autocast computes in the dtype of the region.

Recurrent layers are listed because autocast casts their inputs for cuDNN.
"""

SINGLE = _split_names(
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
"""Operators that autocast computes in float32, unless the call passes the dtype of the result."""

WIDEST = _split_names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
"""Operators that autocast computes in the widest dtype of their arguments."""


@dataclass(frozen=True)
class Autocast:
    """Autocast state of a captured call.

    Args:
        device_type: type of the device that the call runs on; None for the first accelerator that
            an autocast region names, or else the CPU.
        dtype: dtype of the autocast region around the call; None outside of regions.
    """

    device_type: str | None = CPU
    dtype: torch.dtype | None = None

    @classmethod
    def around(cls, device: torch.device) -> Autocast:
        """Return the current autocast state for `device`; its `device_type` is None on meta."""
        # A model without data may run on any device: its autocast regions tell which.
        if device.type == "meta":
            return cls(None)
        within = torch.is_autocast_enabled(device.type)
        return cls(device.type, torch.get_autocast_dtype(device.type) if within else None)

    @classmethod
    def inside(cls, device: torch.device) -> Autocast:
        """Return the autocast state of a call on `device` outside of autocast regions."""
        return replace(cls.around(device), dtype=None)

    def acts_as(self, device_type: str | None) -> bool:
        """Return whether autocast regions captured for a device type act equally in this state.

        Args:
            device_type: device type for which the regions were captured; None if the model has no
                regions.
        """
        return None in (self.device_type, device_type) or self.device_type == device_type

    def disabled(self) -> AbstractContextManager[Any]:
        """Return a context that disables autocast."""
        device_type = self.device_type
        return nullcontext() if device_type is None else torch.autocast(device_type, enabled=False)


ON_CPU = Autocast()

_METHODS = ("__init__", "__enter__", "__exit__")


class TracedRegions:
    """Record of the autocast regions that a trace of a model enters.

    Args:
        device_type: type of the device that the model runs on; None if unknown.
    """

    def __init__(self, device_type: str | None) -> None:
        self._device_type = device_type
        self._any_enabled = False
        self._entered: list[tuple[AutocastState, ExitStack]] = []

    @property
    def device_type(self) -> str | None:
        """Device type of the captured enabled autocast regions; None if no region was enabled."""
        # None makes the graph valid for every device (`acts_as`).
        return self._device_type or CPU if self._any_enabled else None

    def enter(self, region: torch.autocast, enabled: bool, enter: Callable[[Any], Any]) -> Any:
        """Enter an autocast region, on the CPU in place of the model's device.

        Args:
            region: the region.
            enabled: value of the region's `enabled` argument.
            enter: PyTorch's `__enter__`.

        Raises:
            CaptureError: for an accelerator whose operator lists differ from the lists of CUDA.
        """
        (named, _), stack = autocast_state_of(region), ExitStack()
        # Saved, as one object may be entered again: a decorator enters it in each call.
        self._entered.append((autocast_state_of(region), stack))
        self._any_enabled |= enabled
        # On the meta device, the first enabled region names the device.
        if self._device_type is None and enabled and named != CPU:
            self._device_type = named
        on = self._device_type or CPU
        # A region for "cpu" counts as one for the model's device, since traced tensors are on the
        # CPU and `torch.autocast(x.device.type)` names it.
        if named not in (CPU, on):
            return enter(region)
        if on != CPU and enabled:
            if on not in LIKE_CUDA:
                raise CaptureError(
                    f"cannot capture autocast for {on!r}\ncast explicitly with `.to(dtype)`, or "
                    "convert the model to the lower precision"
                )
            stack.enter_context(autocast_kernels(kernels_like_cuda()))
        # The traced tensors are on the CPU, so only CPU autocast casts them.
        set_autocast_state(region, (CPU, enabled))
        result = enter(region)
        if on != CPU:
            # Code of the model may ask `torch.is_autocast_enabled("cuda")`.
            stack.enter_context(_report_autocast_state(on, enabled, region.fast_dtype))
        return result

    def exit(self, region: torch.autocast, leave: Callable[[Any], Any]) -> Any:
        asked, stack = self._entered.pop()
        stack.close()
        result = leave(region)
        set_autocast_state(region, asked)
        return result


def call_in_autocast(module: nn.Module, autocast: Autocast) -> None:
    """Make the traced copy of a module run in the autocast region around the captured call."""
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
    """Return a context in which autocast casts CPU tensors as on the device of the model."""
    regions = TracedRegions(autocast.device_type)
    begin, enter, leave = (vars(torch.autocast)[name] for name in _METHODS)

    def init(region: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # Without an accelerator here, `torch.autocast("cuda")` warns and disables itself.
            if autocast.device_type != CPU:
                warnings.simplefilter("ignore")
            begin(region, device_type, *args, **kwargs)
        # The `enabled` that the model passes: (dtype, enabled, …) follow the device type.
        region.asked = args[1] if len(args) > 1 else kwargs.get("enabled", True)

    def entered(region: Any) -> Any:
        # A region created before the trace, such as a decorator, has no `asked`.
        return regions.enter(region, getattr(region, "asked", autocast_state_of(region)[1]), enter)

    def exited(region: Any, *error: Any) -> Any:
        return regions.exit(region, lambda region: leave(region, *error))

    _set_autocast_methods((init, entered, exited))
    try:
        yield regions
    finally:
        _set_autocast_methods((begin, enter, leave))


def _set_autocast_methods(methods: tuple[Callable[..., Any], ...]) -> None:
    for name, method in zip(_METHODS, methods, strict=True):
        setattr(torch.autocast, name, method)


@contextmanager
def _report_autocast_state(device_type: str, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which PyTorch reports this autocast state for a device."""
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
    """Return kernels by operator name that give CPU autocast the behavior of CUDA autocast."""
    # No operator is cast as on the CPU; then those of CUDA's lists are cast as on CUDA.
    kernels = dict.fromkeys(operators_with_autocast("AutocastCPU"), fallthrough_kernel)
    for names, cast in (
        (LOWER, _cast_to_lower_precision),
        (SINGLE, _cast_to_float32),
        (WIDEST, _cast_to_widest_dtype),
    ):
        for name in names:
            operator, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, operator), overload or "default")
            kernels[f"aten::{name}"] = partial(_run_with_casts, op, cast)
    return kernels


def _run_with_casts(op: OpOverload, cast: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with below_autocast():
        args, kwargs = cast(op, args, kwargs)
        return op(*args, **kwargs)


def _cast_to_lower_precision(op: OpOverload, args: Any, kwargs: Any) -> Any:
    return _cast_arguments(torch.get_autocast_dtype(CPU), args, kwargs)


def _cast_to_float32(op: OpOverload, args: Any, kwargs: Any) -> Any:
    names = (argument.name for argument in schema_of(op).arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # `fp32_set_opt_dtype` in PyTorch's `autocast_mode.h`: a `dtype` that the call passes wins.
    return (args, kwargs) if given.get("dtype") else _cast_arguments(torch.float32, args, kwargs)


def _cast_to_widest_dtype(op: OpOverload, args: Any, kwargs: Any) -> Any:
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _is_castable(leaf)}
    # `promote` in `autocast_mode.h`: the lower precision unless an argument has float32.
    wide = torch.float32 in dtypes
    return _cast_arguments(torch.float32 if wide else torch.get_autocast_dtype(CPU), args, kwargs)


def _cast_arguments(dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(lambda x: x.to(dtype) if _is_castable(x) else x, (args, kwargs))


def _is_castable(leaf: object) -> bool:
    # Autocast leaves float64 alone.
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not torch.float64
