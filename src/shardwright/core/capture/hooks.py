"""Hooks while a model is captured: forward hooks become part of the graph, others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from shardwright.core.torch_internals.hooks import (
    any_global_hook,
    backward_hooks,
    forward_hooks,
    grad_fn_getter,
)
from shardwright.errors import CaptureError

_IN_PLACE = ("__setitem__", "__set__")
_LIBRARIES = ("shardwright", "torch", "transformers")
"""Their hooks keep nothing that outlives a call."""


def check_hooks(module: nn.Module) -> None:
    """Raises:
    CaptureError: for hooks that capture would drop.
    """
    if any_global_hook():
        raise CaptureError(
            "a hook is registered for all modules (`register_module_forward_hook` and its like): "
            "in a captured model there are none to call it for. Remove it, or register forward "
            "hooks on the modules themselves."
        )
    for path, child in module.named_modules():
        if any(backward_hooks(child)):
            raise CaptureError(
                f"{_where(path)} has a backward hook, which a captured model would not call. "
                "Register hooks on its parameters, or write the change of the gradient as a custom "
                "operator (`torch.library.custom_op` with `register_autograd`)."
            )


def count_hooks(module: nn.Module) -> int:
    """How many hooks a module has that no library has registered for its own use."""
    kinds = (*forward_hooks(module), *backward_hooks(module))
    return sum(not _is_of_library(hook) for hooks in kinds for hook in hooks.values())


def _is_of_library(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] in _LIBRARIES


def observe_forward_hooks(twin: nn.Module) -> None:
    """Lets the forward hooks of a module that is about to be traced raise CaptureError if they do
    nothing that can be captured."""
    for path, child in twin.named_modules():
        for hooks in forward_hooks(child):
            for number, hook in hooks.items():
                if not _is_of_library(hook):
                    hooks[number] = _observed(path, hook)


def _observed(path: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(module))
        with _Changes() as changes:
            result = hook(module, *args, **kwargs)
        after = vars(module)
        changed = changes.seen or any(after[key] is not before.get(key) for key in after)
        if result is None and not changed:
            name = getattr(hook, "__qualname__", repr(hook))
            raise CaptureError(
                f"the forward hook `{name}` of {_where(path)} returns nothing and changes no "
                "tensor of the model: a captured model would call it once, when it is captured, "
                "and not in each step. Remove it, or return the tensor from `forward`"
            )
        return result

    return observed


def _where(path: str) -> str:
    return f"module {path!r}" if path else "the model"


class _Changes(TorchFunctionMode):
    """Sees whether a tensor is changed in place."""

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        self.seen = self.seen or in_place or name in _IN_PLACE
        return func(*args, **(kwargs or {}))


_BACKWARD = (torch.autograd.backward, Tensor.backward)
_OF_TENSORS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, grad_fn_getter)


def refuse_hooks(func: Any, args: tuple[Any, ...]) -> None:
    """Raises:
    CaptureError: if `func`, called while a model is traced, registers a hook of a tensor, or hands
        out the node of autograd where one could be registered.
    """
    if func in _OF_TENSORS and not (func == grad_fn_getter and args[0].is_leaf):
        raise CaptureError(
            "a hook of a tensor that `forward` computes, or of its `grad_fn`, would not be called "
            "by a captured model. Write the change of its gradient as a custom operator "
            "(`torch.library.custom_op` with `register_autograd`)"
        )


def refuse_autograd(func: Any, args: tuple[Any, ...]) -> None:
    """Raises:
    CaptureError: as `refuse_hooks`, and if `func` runs a backward pass.
    """
    refuse_hooks(func, args)
    if func in _BACKWARD:
        raise CaptureError(
            "`forward` runs a backward pass (`backward`), whose gradients are added to `.grad`, "
            "which cannot be captured. Take them by `torch.autograd.grad` or `torch.func.grad`, or "
            "run it outside of the model"
        )


@contextmanager
def refuse_saved_tensor_hooks() -> Iterator[None]:
    """Raises CaptureError where `forward` packs what autograd saves, which a captured model would
    not do; where it is only moved, gradients are the same."""
    enter = saved_tensors_hooks.__enter__

    def refuse(hooks: saved_tensors_hooks) -> None:
        if not isinstance(hooks, save_on_cpu):
            raise CaptureError(
                "hooks of saved tensors (`saved_tensors_hooks`) would not be called by a captured "
                "model. Enter them around the call of the model"
            )
        enter(hooks)

    saved_tensors_hooks.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
