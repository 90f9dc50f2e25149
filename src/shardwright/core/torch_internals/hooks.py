"""Access to the hooks of modules, tensors and autograd nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

grad_fn_getter: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]
"""The `func` argument that a `TorchFunctionMode` receives for `tensor.grad_fn`."""

Hooks = MutableMapping[int, Callable[..., Any]]
"""Map from the id of a `RemovableHandle` to its hook."""

HooksOfModules = Mapping[str, tuple[Hooks, Hooks]]
"""Pre-forward hooks and forward hooks of each module, by module path."""


def forward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Return the pre-forward hooks and the forward hooks of a module."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_of_modules(module: nn.Module) -> HooksOfModules:
    """Return the pre-forward and forward hooks of all submodules that have any, by module path."""
    children = ((path, forward_hooks(child)) for path, child in module.named_modules())
    return {path: hooks for path, hooks in children if any(hooks)}


_NUMBERED_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))
)
"""Attributes of a module with dictionaries of forward hooks, or of their options, by hook id."""


@contextmanager
def renumbered_forward_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which the forward hooks of modules have the ids -1, -2, ...

    Each registration gets a new id in the process, on which guards would depend.
    """
    # The entries of each dictionary, with which it is filled again at the end.
    registered = [
        (hooks, dict(hooks)) for m in modules for hooks in map(vars(m).__getitem__, _NUMBERED_HOOKS)
    ]
    for module in modules:
        # In order of registration, so that equal models get equal numbers.
        ids = dict.fromkeys(key for hooks in forward_hooks(module) for key in hooks)
        numbers = {key: -1 - index for index, key in enumerate(ids)}
        for hooks in map(vars(module).__getitem__, _NUMBERED_HOOKS):
            # Options are in dictionaries of their own, with entries for some hooks only.
            renumbered = {numbers[key]: value for key, value in hooks.items() if key in numbers}
            # In place, since handles refer to the dictionaries.
            hooks.clear()
            hooks.update(renumbered)
    try:
        yield
    finally:
        for hooks, before in registered:
            hooks.clear()
            hooks.update(before)


def swap_forward_hooks(module: nn.Module, other: nn.Module) -> None:
    """Exchange the pre-forward and forward hooks of two modules."""
    for name in _NUMBERED_HOOKS:
        vars(module)[name], vars(other)[name] = vars(other)[name], vars(module)[name]


def add_forward_hooks(module: nn.Module, other: nn.Module) -> None:
    """Add the pre-forward and forward hooks of `other` to `module`."""
    for name in _NUMBERED_HOOKS:
        vars(module)[name].update(vars(other)[name])


def backward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Return the pre-backward hooks and the backward hooks of a module."""
    return module._backward_pre_hooks, module._backward_hooks


def has_global_hook() -> bool:
    """Whether a hook is registered for all modules, as by `register_module_forward_hook`."""
    return bool(global_hooks._has_any_global_hook())  # type: ignore[no-untyped-call]


def gradient_hooks(parameter: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Return the hooks of a leaf tensor that were registered by `register_hook`."""
    return parameter._backward_hooks or {}


def hooks_of_tensor(tensor: Tensor) -> Mapping[str, Hooks]:
    """Return the hooks of a non-leaf tensor, by the name of the method that registers them.

    The returned dictionaries also show hooks that are registered later. Registers a hook without
    effect, as only a handle gives access to the dictionary.
    """
    return _collect_hooks_by_method({"register_hook": tensor.register_hook})


def hooks_of_result(tensor: Tensor) -> Mapping[str, Hooks]:
    """Return the hooks of a non-leaf tensor and its `grad_fn`, by the name of the method that
    registers them.

    The returned dictionaries also show hooks that are registered later. Registers hooks without
    effect, as only a handle gives access to a dictionary.
    """
    node: Any = tensor.grad_fn
    node_methods = {
        "grad_fn.register_hook": node.register_hook,
        "grad_fn.register_prehook": node.register_prehook,
    }
    return {**hooks_of_tensor(tensor), **_collect_hooks_by_method(node_methods)}


def _collect_hooks_by_method(methods: Mapping[str, Callable[..., Any]]) -> Mapping[str, Hooks]:
    # The handle refers to the dictionary weakly.
    return {name: method(_ignore_gradient).hooks_dict_ref() for name, method in methods.items()}


def _ignore_gradient(*_: object) -> None:
    """Hook that does not change the gradient."""


def accumulation_hooks(parameter: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Return the hooks of a leaf tensor from `register_post_accumulate_grad_hook`."""
    return parameter._post_accumulate_grad_hooks or {}


def num_registered_hooks() -> int:
    """Return the number of hooks of any kind registered in this process so far."""
    return RemovableHandle.next_id


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Context manager that suspends saved-tensor hooks, which `torch.func` does not support."""
    autograd: Any = torch._C._autograd
    popped = []
    # True: report hooks during tracing too.
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        popped.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        # In reverse, so that the innermost hooks are innermost again.
        for hooks in reversed(popped):
            autograd._push_saved_tensors_default_hooks(*hooks)
