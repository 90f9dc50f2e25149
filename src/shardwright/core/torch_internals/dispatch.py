"""Dispatch and function modes, contexts that disable them, and the autocast dispatch key."""

from __future__ import annotations

import gc
import re
import sys
import traceback
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
"""Default `__torch_function__` for subclasses of `Tensor` that override no function."""

without_torch_function = torch._C.DisableTorchFunction
"""Context manager that disables `__torch_function__` of tensor subclasses and of modes."""

without_torch_dispatch = torch._C._DisableTorchDispatch
"""Context manager that disables `__torch_dispatch__` of tensor subclasses and of modes."""

without_torch_function_of_subclasses = torch._C.DisableTorchFunctionSubclass
"""Context manager that disables `__torch_function__` of tensor subclasses, but not of modes."""

without_dispatch_modes = _disable_current_modes
"""Context manager that disables dispatch modes, but not tensor subclasses' `__torch_dispatch__`."""


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Context manager that suspends the active function modes; modes entered inside are active."""
    with ExitStack() as popped:
        # Each round pops the innermost of the modes that are left.
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            popped.enter_context(_pop_mode_temporarily())
        yield


def default_device() -> torch.device | None:
    """Return the device that `torch.set_default_device` has set; None if none is set.

    Unlike `torch.get_default_device`, ignores an active `with torch.device`.
    """
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base class of dispatch modes for code that is never compiled.

    PyTorch wraps `__torch_dispatch__` of other modes in `torch._disable_dynamo`. On the meta device
    the wrapper takes as long as the operator itself.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the active dispatch modes, the innermost last."""
    return _get_current_dispatch_mode_stack()


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """Context manager in which autograd records the operators that an operator's implementation
    calls."""
    # The dispatcher excludes the keys of autograd while an operator's implementation runs.
    key = torch._C.DispatchKey.AutogradFunctionality
    # Gradient mode too: a custom operator runs in the `forward` of an autograd function, where it
    # is off.
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        yield


def operators_with_autocast(key: str) -> list[str]:
    """Return the names of the operators that have a kernel for an autocast dispatch key.

    Args:
        key: a dispatch key such as `"AutocastCPU"`.
    """
    names = torch._C._dispatch_get_all_op_names()
    return [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)]


@contextmanager
def autocast_kernels(kernels: Mapping[str, Callable[..., object]]) -> Iterator[None]:
    """Context manager in which `kernels` replace PyTorch's kernels of CPU autocast.

    Args:
        kernels: replacements of autocast kernels, by operator name.
    """
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            # PyTorch warns of each kernel that replaces another one.
            warnings.filterwarnings("ignore", "(?s).*overridden")
            for name, kernel in kernels.items():
                library.impl(name, kernel, "AutocastCPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        unregister(library)


AutocastState = tuple[str, bool]
"""(device type, whether autocast is enabled) of a `torch.autocast` context."""


def autocast_state_of(autocast: torch.autocast) -> AutocastState:
    """Return the device type of an autocast context, and whether autocast is enabled."""
    return autocast.device, autocast._enabled


def set_autocast_state(autocast: torch.autocast, region: AutocastState) -> None:
    """Set the device type of an autocast context, and whether autocast is enabled.

    Args:
        autocast: a context that has not been entered.
        region: the new device type and state.
    """
    autocast.device, autocast._enabled = region


@contextmanager
def preserved_dispatch_keys(frees_frames: bool = False) -> Iterator[None]:
    """Context manager that restores the dispatch keys of this thread.

    Frames of an error hold guards, of which each restores the keys that it found when it is freed.
    A guard that the garbage collector frees later would leave the process without autograd.

    Args:
        frees_frames: whether to free the local variables in the frames of an error, where they are
            not needed any more.
    """
    with torch._C._PreserveDispatchKeyGuard():
        num_guards = _num_guards()
        try:
            yield
        except Exception as error:
            raised: BaseException | None = error if frees_frames else None
            while raised is not None:
                traceback.clear_frames(raised.__traceback__)
                raised = raised.__cause__ or raised.__context__
            # PyTorch keeps other errors, such as of the text of a tensor, in cycles. A collection
            # can take as long as the capture, and few errors leave guards.
            if _num_guards() > num_guards:
                gc.collect()
            raise


_GUARD_CLASSES = tuple(
    value
    for name, value in vars(torch._C).items()
    if isinstance(value, type)
    and hasattr(value, "__exit__")
    and re.search("Guard|Disable|Enable|Below|Restore", name)
)
"""Classes whose objects change the dispatch keys of a thread and restore them when they are
freed."""


def _num_guards() -> int:
    """Return the number of live guards, plus that of other references to their classes."""
    # Each object of a class refers to the class.
    return sum(map(sys.getrefcount, _GUARD_CLASSES))


@contextmanager
def below_autocast() -> Iterator[None]:
    """Context manager that disables CPU autocast, so that an autocast kernel of an operator can
    call the operator without recursion."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(key), without_torch_function():
        yield


def in_backward_pass() -> bool:
    """Whether this thread is running a backward pass."""
    # The id is -1 outside of backward passes.
    return torch._C._current_graph_task_id() >= 0


def in_transform() -> bool:
    """Whether a `torch.func` transform, forward-mode AD or `torch.jit.trace` is active."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    traced = torch._C._get_tracing_state() is not None
    # The level is -1 outside of forward-mode AD.
    return transforms or traced or forward_ad._current_level >= 0
