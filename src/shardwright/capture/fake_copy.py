"""A copy of a module that needs no memory: its tensors are fake, the module stays as it is."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from shardwright.deferred import deferred_attributes, value_of
from shardwright.errors import CaptureError
from shardwright.torch_internals import pytree
from shardwright.torch_internals.tensors import FakeTensorMode


def fake_copy(
    module: nn.Module, args: Any, kwargs: Any, compute_dtype: torch.dtype | None = None
) -> tuple[nn.Module, Any, Any]:
    """The module and its arguments with a fake tensor for every parameter, buffer and argument.

    Parameters may be real or on the meta device; tied ones stay tied. The same tensor given twice
    becomes two.

    Args:
        compute_dtype: of parameters and arguments that are in single precision.

    Raises:
        CaptureError: for a module with uninitialized (lazy) parameters, or that cannot be copied.
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


@contextmanager
def isolated() -> Iterator[None]:
    """Captures the same graph whatever modes the caller is in."""
    with (
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        _custom_backward_refused(),
        _quiet(),
    ):
        yield


@contextmanager
def _custom_backward_refused() -> Iterator[None]:
    """Tracing sees the forward of an `autograd.Function` only, so its gradient would be lost.

    Reentrant checkpointing is such a function; what it calls is traced as if called directly.
    """
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        if cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"the autograd function `{cls.__qualname__}` has a backward of its own, which cannot "
            f"be captured. Write it with operators that autograd knows, or as an operator "
            f"(`torch.library.custom_op` with `register_autograd`)."
        )

    setattr(Function, "apply", classmethod(apply))  # noqa: B010
    try:
        yield
    finally:
        setattr(Function, "apply", original)  # noqa: B010


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps away what `torch.export` logs and prints about a failure: pages that hide the error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


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
