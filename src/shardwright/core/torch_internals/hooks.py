"""The hooks that modules and parameters bear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

grad_fn_getter: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]
"""What `tensor.grad_fn` calls, as a mode for functions sees it."""

Hooks = MutableMapping[int, Callable[..., Any]]
"""By the number of its handle each hook."""

HooksOfModules = Mapping[str, tuple[Hooks, Hooks]]
"""By the path of a module the hooks before and after its `forward`."""


def forward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Those before and after `forward`."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_of_modules(module: nn.Module) -> HooksOfModules:
    """The forward hooks of a module and its submodules."""
    children = ((path, forward_hooks(child)) for path, child in module.named_modules())
    return {path: hooks for path, hooks in children if any(hooks)}


def swap_forward_hooks(module: nn.Module, other: nn.Module) -> None:
    """Gives each of two modules the forward hooks of the other."""
    for name in vars(nn.Module()):
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            mine, theirs = vars(module)[name], vars(other)[name]
            vars(module)[name], vars(other)[name] = theirs, mine


def add_forward_hooks(module: nn.Module, other: nn.Module) -> None:
    """Gives a module those of another besides its own."""
    for name in vars(nn.Module()):
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
            vars(module)[name].update(vars(other)[name])


def backward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """Those before and after its backward pass."""
    return module._backward_pre_hooks, module._backward_hooks


def any_global_hook() -> bool:
    """Whether a hook is called for every module that there is."""
    return bool(global_hooks._has_any_global_hook())  # type: ignore[no-untyped-call]


def gradient_hooks(parameter: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Those of `register_hook`."""
    return parameter._backward_hooks or {}


def hooks_of_tensor(tensor: Tensor) -> Mapping[str, Hooks]:
    """The hooks of a tensor that is no leaf, by the call that registers them: the dictionary that
    later ones are added to, too. Registers one that does nothing."""
    return _registered({"register_hook": tensor.register_hook})


def hooks_of_result(tensor: Tensor) -> Mapping[str, Hooks]:
    """The same, and the hooks of its `grad_fn`."""
    node: Any = tensor.grad_fn
    of_node = {
        "grad_fn.register_hook": node.register_hook,
        "grad_fn.register_prehook": node.register_prehook,
    }
    return {**hooks_of_tensor(tensor), **_registered(of_node)}


def _registered(calls: Mapping[str, Callable[..., Any]]) -> Mapping[str, Hooks]:
    return {name: call(_nothing).hooks_dict_ref() for name, call in calls.items()}


def _nothing(*_: object) -> None:
    """Leaves the gradient as it is."""


def accumulation_hooks(parameter: Tensor) -> Mapping[int, Callable[..., Any]]:
    """Those of `register_post_accumulate_grad_hook`."""
    return parameter._post_accumulate_grad_hooks or {}


def hooks_registered() -> int:
    """How many hooks of any kind were registered so far, in the whole process."""
    return RemovableHandle.next_id


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Disables saved-tensor hooks, under which `torch.func` transforms refuse to run."""
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
