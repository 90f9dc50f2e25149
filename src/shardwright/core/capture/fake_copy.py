"""A copy of the module on fake tensors, and the contexts in which it is exported.

The copy takes no memory and leaves the module untouched. With a compute dtype its parameters have
that dtype, except those of modules with statistics.
"""

from __future__ import annotations

import copy
import io
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.core.capture.annotations import tagging_checkpoint
from shardwright.core.capture.autograd_functions import trace_custom_backward
from shardwright.core.capture.experts import (
    dispatch_in_one_operator,
    dispatched,
    mixture_of_experts,
)
from shardwright.core.capture.explanation import NESTED
from shardwright.core.capture.hooks import refuse_autograd, refuse_saved_tensor_hooks
from shardwright.core.capture.inner_gradients import gradients
from shardwright.core.capture.known_values import filling_caches
from shardwright.core.capture.local_map import call_locally
from shardwright.core.capture.static_functions import STATIC
from shardwright.core.deferred import copies_of_attributes
from shardwright.core.graph.float64 import grouped_product
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.activation_checkpoint import checkpointed_calls_in
from shardwright.core.torch_internals.modules import process_groups
from shardwright.core.torch_internals.tensors import (
    FakeTensorMode,
    copied_results,
    data_getter,
    data_setter,
)
from shardwright.errors import CaptureError


def fake_copy(
    module: nn.Module, args: Any, kwargs: Any, compute_dtype: torch.dtype | None = None
) -> tuple[nn.Module, Any, Any]:
    """Copies of the module, `args` and `kwargs` in which every tensor is fake.

    Parameters may be real or on the meta device; tied ones stay tied. An argument that is passed
    twice becomes two tensors.

    Args:
        compute_dtype: the dtype of the copies of single-precision parameters and arguments.

    Raises:
        CaptureError: if the module has uninitialized (lazy) or sparse parameters or scripted parts,
            or cannot be deep-copied.
    """
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} is scripted or traced by `torch.jit`, and has no Python "
                "code to capture. Use the module of which it was made."
            )
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
    memo: dict[int, Any] = {**process_groups(module)}
    cast = cast_parameters(module, compute_dtype)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise CaptureError(
                f"{name}: this lazy parameter has no shape yet. Run the module once before "
                f"capturing it."
            )
        _check_dense(name, parameter)
        fake = fake_tensor(mode, parameter, compute_dtype if id(parameter) in cast else None)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for name, buffer in module.named_buffers():
        _check_dense(name, buffer)
        memo[id(buffer)] = fake_tensor(mode, buffer)
    # Tracing changes these where `forward` does.
    memo = {key: t.clone() for key, t in copies_of_attributes(module).items()} | memo
    try:
        with copied_results():
            twin = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise CaptureError(
            f"`copy.deepcopy` of {type(module).__name__} failed: {error}. Capture works on a copy "
            f"without weights; move objects that cannot be copied out of the module's attributes."
        ) from error
    for config in caching_configs(twin):
        config.use_cache = False
    dispatch_in_one_operator(twin)
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            _check_dense("an argument", leaf)
    fake_args, fake_kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: fake_tensor(mode, t, compute_dtype if t.dtype == STORED else None),
        (args, kwargs),
    )
    return twin, fake_args, fake_kwargs


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise CaptureError(f"{name}: {NESTED}")
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name}: a sparse tensor ({tensor.layout}), and only dense ones can be sharded. Use "
            f"`to_dense()`."
        )


def fake_tensor(
    mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of the same shape and strides on the CPU, without memory.

    Args:
        dtype: its dtype, if another one.

    Raises:
        CaptureError: for a sparse tensor.
    """
    dtype = dtype or tensor.dtype
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"a parameter or buffer is a sparse tensor ({tensor.layout}), which cannot be sharded:"
            " hold it dense, or its indices and values as two tensors"
        )
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


TRACING_LOCK = threading.RLock()
"""Held by the thread that traces a model: tracers of PyTorch, and what they patch, belong to the
whole process."""


@contextmanager
def isolate_capture() -> Iterator[None]:
    """A context in which the captured graph does not depend on modes that the caller has set, nor
    on captures in other threads, which wait."""
    with (
        TRACING_LOCK,
        filling_caches(),
        torch.inference_mode(False),
        torch.enable_grad(),
        _inference_without_gradients(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        trace_custom_backward(),
        refuse_saved_tensor_hooks(),
        checkpointed_calls_in(tagging_checkpoint),
        silent_tracing(),
    ):
        yield


@contextmanager
def _inference_without_gradients() -> Iterator[None]:
    """Lets regions of inference mode be ones without gradients, which `torch.export` records."""
    before: list[bool] = []

    def enter(region: torch.inference_mode) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not region.mode)

    def leave(region: torch.inference_mode, *_: object) -> None:
        torch.set_grad_enabled(before.pop())

    with (
        patch.object(torch.inference_mode, "__enter__", enter),
        patch.object(torch.inference_mode, "__exit__", leave),
    ):
        yield


_WARNINGS = (
    "The tensor attributes? .* assigned during export",
    "torch.compile is ignored when called inside torch.export region",
    "Dynamo does not know how to trace",
    "Dynamo detected a call to a `functools.lru_cache`",
)
"""Regular expressions of the starts of warnings of `torch.export` and TorchDynamo."""


@contextmanager
def silent_tracing() -> Iterator[None]:
    """A context without what PyTorch logs, prints and warns of about a trace: it would bury the
    error of a failed one, and warn of what this library handles."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            for start in _WARNINGS:
                warnings.filterwarnings("ignore", start)
            yield
    finally:
        logging.disable(disabled)


log = logging.getLogger(__name__)

STORED = torch.float32
"""Only tensors of this dtype are cast to the compute dtype."""

LOSSES = frozenset(
    getattr(functional, name)
    for name in dir(functional)
    if name.endswith("_loss")
    or name in ("cross_entropy", "kl_div")
    or name.startswith("binary_cross_entropy")
)


def caching_configs(module: nn.Module) -> list[Any]:
    """The configurations with which models of `transformers` return a cache of keys and values."""
    configs = {id(c): c for child in module.modules() if (c := getattr(child, "config", None))}
    return [each for each in configs.values() if getattr(each, "use_cache", None) is True]


_PACKED = (
    "%s is captured without a cache, so documents whose `position_ids` begin anew are kept apart: "
    "with a cache, as by default, the model itself lets them attend to each other. Pass "
    "`use_cache=False` to compare both"
)


def warn_of_packing(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Warns where a model of `transformers` without its cache is another: where positions begin
    anew in a row, as those of packed documents do."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.is_meta or "use_cache" in kwargs:
        return
    if caching_configs(module) and bool((positions.diff(dim=-1) < 0).any()):
        log.warning(_PACKED, type(module).__name__)


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> frozenset[int]:
    """The ids of the parameters that are computed in `dtype`.

    Modules with floating-point buffers keep the dtype of their parameters: a batch norm computes in
    the dtype of its statistics.
    """
    cast: set[int] = set()
    for child in module.modules() if dtype is not None else ():
        if not any(buffer.is_floating_point() for buffer in child.buffers(recurse=False)):
            cast.update(id(p) for p in child.parameters(recurse=False) if p.dtype == STORED)
    return frozenset(cast)


class RecordedEffects(TorchFunctionMode):
    """A context in which tracing sees what is read from and written to `tensor.data`: a detached
    tensor, and a copy into it; and gradients, as operators. Hooks of tensors are refused.
    Functions that look at values do not, and a mixture of experts is one operator. So are products
    of groups of rows, of whose operator only the kernels have all dtypes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        refuse_autograd(func, args)
        if func is torch.autograd.grad:
            return gradients(*args, **(kwargs or {}))
        if (static := STATIC.get(func)) is not None:
            return static(*args, **(kwargs or {}))
        if func is mixture_of_experts:
            return dispatched(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return grouped_product(*args, **(kwargs or {}))
        if func is call_locally:
            function, call_args, call_kwargs = args
            return function.traced(call_args, call_kwargs)
        if func == data_getter:
            return args[0].detach()
        if func == data_setter:
            target, value = args
            if (target.shape, target.dtype) == (value.shape, value.dtype):
                return target.detach().copy_(value)
            raise CaptureError(
                f"cannot capture that `.data` of {tuple(target.shape)} {target.dtype} becomes"
                f" {tuple(value.shape)} {value.dtype}: a new tensor must have the old one's shape"
                " and dtype"
            )
        return func(*args, **(kwargs or {}))


class LossesInSinglePrecision(TorchFunctionMode):
    """A context in which losses of half-precision tensors are computed in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in LOSSES:
            args, kwargs = pytree.tree_map_only(Tensor, _single, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _single(tensor: Tensor) -> Tensor:
    half = tensor.is_floating_point() and tensor.dtype.itemsize < STORED.itemsize
    return tensor.to(STORED) if half else tensor
