"""Copies of modules on fake tensors, and the contexts in which these copies are exported.

A copy takes no memory and leaves the module unmodified. With a compute dtype its parameters have
that dtype, except in modules with floating-point buffers, such as batch norms.
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
from shardwright.core.capture.flex_attention import traceable_flex_attention
from shardwright.core.capture.hooks import refuse_autograd, refuse_saved_tensor_hooks
from shardwright.core.capture.inner_gradients import gradients
from shardwright.core.capture.known_values import filling_caches
from shardwright.core.capture.local_map import call_locally
from shardwright.core.capture.static_functions import STATIC
from shardwright.core.deferred import copies_of_attributes
from shardwright.core.graph.float64 import grouped_product
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.activation_checkpoint import checkpointed_calls_in
from shardwright.core.torch_internals.dispatch import preserved_dispatch_keys
from shardwright.core.torch_internals.graph_modules import without_generated_code
from shardwright.core.torch_internals.modules import memo_of_process_groups
from shardwright.core.torch_internals.tensors import (
    FakeTensorMode,
    copied_results,
    data_getter,
    data_setter,
)
from shardwright.errors import CaptureError


def fake_copy(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    compute_dtype: torch.dtype | None = None,
    original: nn.Module | None = None,
) -> tuple[nn.Module, Any, Any]:
    """Return copies of the module, `args` and `kwargs` in which every tensor is fake.

    Parameters may be real or on the meta device; tied parameters stay tied. A tensor that is passed
    as two arguments becomes two tensors.

    Args:
        compute_dtype: the dtype of the copies of single-precision parameters and arguments.
        original: another object for `module`, to which its hooks may refer; replaced by the copy.

    Raises:
        CaptureError: if the module has uninitialized (lazy) or sparse parameters or scripted parts,
            or cannot be deep-copied.
    """
    for path, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} is scripted or traced by `torch.jit`, and has no Python "
                "code to capture\nuse the module that it was made from"
            )
    # Tensors in plain attributes stay real, and operators may mix them with fake ones.
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
    # `copy.deepcopy` takes copies from its memo: no data is copied, and tied parameters stay tied.
    memo: dict[int, Any] = {**memo_of_process_groups(module)}
    cast = cast_parameters(module, compute_dtype)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise CaptureError(
                f"{name}: this lazy parameter has no shape yet\nrun the module once before capture"
            )
        _check_dense(name, parameter)
        fake = fake_tensor(mode, parameter, compute_dtype if id(parameter) in cast else None)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for name, buffer in module.named_buffers():
        _check_dense(name, buffer)
        memo[id(buffer)] = fake_tensor(mode, buffer)
    # Clones of tensors in plain attributes, which `forward` may change while it is traced.
    memo = {key: t.clone() for key, t in copies_of_attributes(module).items()} | memo
    try:
        with copied_results():
            twin = copy.deepcopy(module, _AliasMemo(memo, id(original or module), id(module)))
    # TypeError for what cannot be pickled, such as locks.
    except (TypeError, RuntimeError) as error:
        raise CaptureError(
            f"`copy.deepcopy` of {type(module).__name__} failed: {error}\nmove objects that "
            "cannot be copied out of the module's attributes: capture traces a copy of the module"
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


class _AliasMemo(dict[int, Any]):
    """Memo of `copy.deepcopy` that gives two objects the same copy.

    Args:
        copies: copies by `id()`.
        alias: `id()` of the object for which the copy of `copied` is returned.
        copied: `id()` of the object that is copied.
    """

    def __init__(self, copies: Mapping[int, Any], alias: int, copied: int) -> None:
        super().__init__(copies)
        self._alias, self._copied = alias, copied

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._copied if key == self._alias else key, default)


@contextmanager
def calling_forward(twin: nn.Module) -> Iterator[None]:
    """Return a context in which `twin(...)` runs only its hooks and `forward`, not its `__call__`.

    A planned model runs a `__call__` that the user's class overrides, so capture must not trace it.
    """
    cls = type(twin)
    call = cls.__call__
    if call is nn.Module.__call__:
        yield
        return

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Submodules of the class keep their own `__call__`.
        function = nn.Module.__call__ if self is twin else call
        return function(self, *args, **kwargs)

    with patch.object(cls, "__call__", called):
        yield


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise CaptureError(f"{name}: {NESTED}")
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name}: a sparse tensor ({tensor.layout}) cannot be sharded\n"
            "use a dense one: `x.to_dense()`"
        )


def fake_tensor(
    mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a fake CPU tensor with the shape and strides of `tensor`.

    Args:
        mode: mode of the fake tensor.
        tensor: real or meta tensor.
        dtype: dtype of the fake tensor; by default that of `tensor`.

    Raises:
        CaptureError: for a sparse tensor.
    """
    dtype = dtype or tensor.dtype
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"a parameter or buffer is a sparse tensor ({tensor.layout}), which cannot be sharded\n"
            "make it dense, or store its indices and values as two tensors"
        )
    with mode:
        # On the CPU whatever the model's device, so that capture needs no accelerator.
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


TRACING_LOCK = threading.RLock()
"""Lock of the thread that traces; PyTorch's tracers and their patches are global to the process."""


@contextmanager
def isolate_capture() -> Iterator[None]:
    """Return a context that isolates capture from modes of the caller and from other threads.

    Captures in other threads wait for `TRACING_LOCK`.
    """
    with (
        TRACING_LOCK,
        preserved_dispatch_keys(),
        # Left after the contexts below: it computes fake tensors in caches, outside of their modes.
        filling_caches(),
        # Autograd ignores tensors that are made in inference mode.
        torch.inference_mode(False),
        torch.enable_grad(),
        _replace_inference_mode(),
        # Regions around the captured call are a part of it (`CapturedCall.autocast`).
        torch.autocast("cpu", enabled=False),
        # Against a default device of the user: fake tensors are on the CPU.
        torch.device("cpu"),
        trace_custom_backward(),
        refuse_saved_tensor_hooks(),
        checkpointed_calls_in(tagging_checkpoint),
        traceable_flex_attention(),
        silent_tracing(),
        without_generated_code(),
    ):
        yield


@contextmanager
def _replace_inference_mode() -> Iterator[None]:
    """Make `torch.inference_mode` regions act as `torch.no_grad`, which `torch.export` records."""
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
"""Regular expressions that match the start of warnings of `torch.export` and TorchDynamo."""


@contextmanager
def silent_tracing() -> Iterator[None]:
    """Return a context that silences PyTorch's logs, prints and warnings about tracing.

    The output would obscure the error of a failed trace, and warn about cases that Shardwright
    supports.
    """
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
"""Dtype of parameters and arguments that a compute dtype replaces; other dtypes are not cast."""

LOSSES = frozenset(
    getattr(functional, name)
    for name in dir(functional)
    if name.endswith("_loss")
    or name in ("cross_entropy", "kl_div")
    or name.startswith("binary_cross_entropy")
)


def caching_configs(module: nn.Module) -> list[Any]:
    """Return the configurations of `transformers` modules that enable a key-value cache."""
    # By identity, as submodules share one configuration object.
    configs = {id(c): c for child in module.modules() if (c := getattr(child, "config", None))}
    return [each for each in configs.values() if getattr(each, "use_cache", None) is True]


_PACKED = (
    "%s is captured without a key-value cache, so packed documents (`position_ids` that restart) "
    "do not attend to each other; with a cache, the default, the model lets them\npass "
    "`use_cache=False` to compare both"
)


def warn_of_packing(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Warn that a model of `transformers` masks packed documents differently without its cache.

    Packed documents are recognized by `position_ids` that decrease within a sample.
    """
    positions = kwargs.get("position_ids")
    # A call that passes `use_cache` has decided.
    if not isinstance(positions, Tensor) or positions.is_meta or "use_cache" in kwargs:
        return
    if caching_configs(module) and bool((positions.diff(dim=-1) < 0).any()):
        log.warning(_PACKED, type(module).__name__)


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> frozenset[int]:
    """Return the `id()`s of the parameters to cast to `dtype`.

    Parameters of modules with floating-point buffers keep their dtype: a batch norm computes in the
    dtype of its statistics.
    """
    cast: set[int] = set()
    for child in module.modules() if dtype is not None else ():
        if not any(buffer.is_floating_point() for buffer in child.buffers(recurse=False)):
            cast.update(id(p) for p in child.parameters(recurse=False) if p.dtype == STORED)
    return frozenset(cast)


_UNCOMMON_SEED = 0x5EED_0F_C4B7
"""Seed of PyTorch's generator during a trace; another seed shows that the user's code set one."""

SEEDED = (
    "`forward` seeds PyTorch's random numbers (`torch.manual_seed`), which a captured model would "
    "not\nseed in the training loop"
)


class RecordedEffects(TorchFunctionMode):
    """Context in which tracing records effects that `torch.export` would miss.

    - Reads of `tensor.data` become `detach`, and writes a copy into the detached tensor.
    - `torch.autograd.grad` becomes operators; hooks on tensors raise CaptureError.
    - Functions that read values are replaced by functions that do not (`STATIC`).
    - `mixture_of_experts`, `local_map` and grouped matrix products become one operator each.
    - Seeding PyTorch's random generator raises CaptureError, even if the state is restored later.
    """

    def __enter__(self) -> Any:
        self._state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_UNCOMMON_SEED)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        is_seeded = torch.default_generator.initial_seed() != _UNCOMMON_SEED
        torch.default_generator.set_state(self._state)
        # An error of `forward` itself is not replaced.
        if is_seeded and error[0] is None:
            raise CaptureError(SEEDED)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Traced operators draw nothing, so only a seed changes the generator.
        if torch.default_generator.initial_seed() != _UNCOMMON_SEED:
            raise CaptureError(SEEDED)
        refuse_autograd(func, args)
        if func is torch.autograd.grad:
            return gradients(*args, **(kwargs or {}))
        if (static := STATIC.get(func)) is not None:
            return static(*args, **(kwargs or {}))
        if func is mixture_of_experts:
            return dispatched(*args, **(kwargs or {}))
        # PyTorch's fake implementation takes bfloat16 only.
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return grouped_product(*args, **(kwargs or {}))
        if func is call_locally:
            function, call_args, call_kwargs = args
            return function.traced(call_args, call_kwargs)
        # Compared by `==`, since each access of `__get__` makes a new object.
        if func == data_getter:
            return args[0].detach()
        if func == data_setter:
            target, value = args
            # Written without autograd, like `.data`.
            if (target.shape, target.dtype) == (value.shape, value.dtype):
                return target.detach().copy_(value)
            raise CaptureError(
                f"cannot capture an assignment to `.data` that changes {tuple(target.shape)} "
                f"{target.dtype} to {tuple(value.shape)} {value.dtype}\n"
                "assign a tensor of the same shape and dtype"
            )
        return func(*args, **(kwargs or {}))


class LossesInSinglePrecision(TorchFunctionMode):
    """Context in which losses of half-precision tensors are computed in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in LOSSES:
            args, kwargs = pytree.tree_map_only(Tensor, _cast_to_stored_dtype, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _cast_to_stored_dtype(tensor: Tensor) -> Tensor:
    half = tensor.is_floating_point() and tensor.dtype.itemsize < STORED.itemsize
    return tensor.to(STORED) if half else tensor
