"""Access to the hooks of modules, tensors and autograd nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

grad_fn_getter: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]
"""The getter of `tensor.grad_fn`, as a `TorchFunctionMode` receives it."""

Hooks = MutableMapping[int, Callable[..., Any]]
"""Hooks by the id of their handle."""

HooksOfModules = Mapping[str, tuple[Hooks, Hooks]]
"""(hooks before `forward`, hooks after `forward`) of each module, by path."""


def forward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Return the hooks before and after `forward` of a module."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_of_modules(module: nn.Module) -> HooksOfModules:
    """Return the forward hooks of a module and its submodules, without modules that have none."""
    children = ((path, forward_hooks(child)) for path, child in module.named_modules())
    return {path: hooks for path, hooks in children if any(hooks)}


def swap_forward_hooks(module: nn.Module, other: nn.Module) -> None:
    """Exchange the forward hooks of two modules."""
    for name in vars(nn.Module()):
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            hooks, other_hooks = vars(module)[name], vars(other)[name]
            vars(module)[name], vars(other)[name] = other_hooks, hooks


def add_forward_hooks(module: nn.Module, other: nn.Module) -> None:
    """Add the forward hooks of `other` to `module`."""
    for name in vars(nn.Module()):
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            vars(module)[name].update(vars(other)[name])


def backward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Return the hooks before and after the backward pass of a module."""
    return module._backward_pre_hooks, module._backward_hooks


def any_global_hook() -> bool:
    """Whether a global module hook is registered."""
    return bool(global_hooks._has_any_global_hook())  # type: ignore[no-untyped-call]


def gradient_hooks(parameter: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Return the hooks of a leaf that `register_hook` has registered."""
    return parameter._backward_hooks or {}


def hooks_of_tensor(tensor: Tensor) -> Mapping[str, Hooks]:
    """Return the hooks of a non-leaf tensor, by the method that registers them.

    The dictionaries are live: hooks that are registered later appear in them. A hook without effect
    is registered, since only its handle gives access to the dictionary.
    """
    return _hook_dictionaries({"register_hook": tensor.register_hook})


def hooks_of_result(tensor: Tensor) -> Mapping[str, Hooks]:
    """Return the hooks of a non-leaf tensor and its `grad_fn`, by the method that registers them.

    The dictionaries are live: hooks that are registered later appear in them.
    """
    node: Any = tensor.grad_fn
    node_methods = {
        "grad_fn.register_hook": node.register_hook,
        "grad_fn.register_prehook": node.register_prehook,
    }
    return {**hooks_of_tensor(tensor), **_hook_dictionaries(node_methods)}


def _hook_dictionaries(methods: Mapping[str, Callable[..., Any]]) -> Mapping[str, Hooks]:
    return {name: method(_no_op).hooks_dict_ref() for name, method in methods.items()}


def _no_op(*_: object) -> None:
    """A hook that leaves the gradient unchanged."""


def accumulation_hooks(parameter: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Return the hooks that `register_post_accumulate_grad_hook` has registered."""
    return parameter._post_accumulate_grad_hooks or {}


def num_registered_hooks() -> int:
    """Return the number of hooks of any kind registered in this process so far."""
    return RemovableHandle.next_id


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """A context without saved-tensor hooks, with which `torch.func` transforms refuse to run."""
    autograd: Any = torch._C._autograd
    popped = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        popped.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(popped):
            autograd._push_saved_tensors_default_hooks(*hooks)
