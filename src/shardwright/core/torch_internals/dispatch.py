"""Modes that see every operator, and contexts in which they do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd import forward_ad
from torch.library import Library
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from shardwright.core.torch_internals.operators import unregister

plain_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass of tensors that does nothing of its own there."""

without_torch_function = torch._C.DisableTorchFunction
"""A context in which no `__torch_function__` is called, neither of subclasses nor of modes."""

without_torch_dispatch = torch._C._DisableTorchDispatch
"""A context in which no `__torch_dispatch__` is called, neither of subclasses nor of modes."""

without_torch_function_of_subclasses = torch._C.DisableTorchFunctionSubclass
"""A context in which no `__torch_function__` of subclasses is called; those of modes are."""

without_dispatch_modes = _disable_current_modes
"""A context in which no `__torch_dispatch__` of a mode is called; those of subclasses are."""


@contextmanager
def without_function_modes() -> Iterator[None]:
    """A context in which the modes for functions that are entered now see nothing; those that are
    entered in it do."""
    with ExitStack() as popped:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            popped.enter_context(_pop_mode_temporarily())
        yield


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for code that is not compiled: PyTorch calls what its subclasses do with an operator
    as it is, and not through a function that keeps `torch.compile` away, which takes as long as
    the operator itself on the meta device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def dispatch_modes() -> list[TorchDispatchMode]:
    """The modes that are entered now, the innermost last."""
    return _get_current_dispatch_mode_stack()


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """A context in which autograd records what is called inside of an operator, too."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        yield


def names_with_autocast(key: str) -> list[str]:
    """The names of the operators for which a dispatch key of autocast (`"AutocastCPU"`) has a
    kernel."""
    names = torch._C._dispatch_get_all_op_names()
    return [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)]


@contextmanager
def autocast_kernels(kernels: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """A context in which autocast of the CPU runs these kernels, by the names of operators."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*overridden")
            for name, kernel in kernels.items():
                library.impl(name, kernel, "AutocastCPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        unregister(library)


Region = tuple[str, bool]
"""The type of the device for which a region of autocast is, and whether it is enabled."""


def region_of(autocast: torch.autocast) -> Region:
    """What a region does once it is entered."""
    return autocast.device, autocast._enabled


def set_region(autocast: torch.autocast, region: Region) -> None:
    """Changes that before it is entered or after it is left."""
    autocast.device, autocast._enabled = region


@contextmanager
def below_autocast() -> Iterator[None]:
    """A context in which a kernel of autocast calls the operator that it casts for."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(key), without_torch_function():
        yield


def in_backward_pass() -> bool:
    """Whether autograd calls: on this thread it carries out a backward pass."""
    return torch._C._current_graph_task_id() >= 0


def in_transform() -> bool:
    """Whether a transform of `torch.func` (`vmap`, `grad`, `jvp`) calls, derivatives are taken in
    forward mode, or `torch.jit.trace` records."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    traced = torch._C._get_tracing_state() is not None
    return transforms or traced or forward_ad._current_level >= 0
