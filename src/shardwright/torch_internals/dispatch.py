"""Modes that see every operator, and contexts in which they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

__all__ = [
    "TorchDispatchMode",
    "autograd_in_operators",
    "dispatch_modes",
    "in_backward_pass",
    "in_transform",
    "plain_torch_function",
    "without_dispatch_modes",
    "without_torch_dispatch",
    "without_torch_function",
    "without_torch_function_of_subclasses",
]

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


def dispatch_modes() -> list[TorchDispatchMode]:
    """The modes that are entered now, the innermost last."""
    return _get_current_dispatch_mode_stack()


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """A context in which autograd records what is called inside of an operator, too."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
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
