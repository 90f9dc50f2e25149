"""Hooks during capture: forward hooks become part of the graph, other hooks raise CaptureError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from shardwright.core.graph.saved_tensors import RecordedTensors
from shardwright.core.torch_internals.hooks import (
    backward_hooks,
    forward_hooks,
    grad_fn_getter,
    has_global_hook,
)
from shardwright.errors import CaptureError

_IN_PLACE = ("__setitem__", "__set__")
_LIBRARIES = ("shardwright", "torch", "transformers")
"""Libraries whose hooks keep no state between calls."""


def check_hooks(module: nn.Module) -> None:
    """Check that capture preserves all hooks of a module.

    Raises:
        CaptureError: for backward hooks and hooks registered for all modules.
    """
    if has_global_hook():
        raise CaptureError(
            "a global module hook is registered (as by `register_module_forward_hook`), which a "
            "captured model would not call\nremove the hook, or register it on each module by "
            "`module.register_forward_hook`"
        )
    for path, child in module.named_modules():
        if any(backward_hooks(child)):
            raise CaptureError(
                f"{_format_module(path)} has a backward hook, which a captured model would not "
                "call\nregister hooks on its parameters, or write the change of the gradient as a "
                "custom operator (`torch.library.custom_op` with `register_autograd`)"
            )


def count_hooks(module: nn.Module) -> int:
    """Return the number of hooks of a module, not counting hooks of libraries."""
    registries = (*forward_hooks(module), *backward_hooks(module))
    return sum(not _is_library_hook(hook) for hooks in registries for hook in hooks.values())


def _is_library_hook(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] in _LIBRARIES


def observe_forward_hooks(twin: nn.Module) -> None:
    """Wrap the forward hooks of a module to raise CaptureError for effects that capture would lose.

    Args:
        twin: the copy of the model to trace.
    """
    for path, child in twin.named_modules():
        before_forward, after_forward = forward_hooks(child)
        for hooks in (before_forward, after_forward):
            # Values of existing keys may be replaced during the iteration.
            for number, hook in hooks.items():
                if not _is_library_hook(hook):
                    hooks[number] = _wrap_hook(path, hook, hooks is before_forward)


def _wrap_hook(path: str, hook: Callable[..., Any], sets_inputs: bool) -> Callable[..., Any]:
    """Wrap a hook to raise CaptureError for an effect that capture would lose.

    Args:
        path: path of the module.
        hook: the hook.
        sets_inputs: whether `forward` of the module may read attributes that the hook sets.
    """

    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(module))
        with _InPlaceChangeRecorder() as changes:
            result = hook(module, *args, **kwargs)
        after = vars(module)
        # An attribute that is set before `forward` may be its input.
        is_set = sets_inputs and any(after[key] is not before.get(key) for key in after)
        changed = changes.seen or is_set
        # The trace records the changes of tensors and results, so only other effects are lost.
        if result is None and not changed:
            name = getattr(hook, "__qualname__", repr(hook))
            raise CaptureError(
                f"the forward hook `{name}` of {_format_module(path)} returns nothing and changes "
                "no tensor of the model: it would run once, at capture, and not in each step\n"
                "remove it, or return the tensor from `forward`"
            )
        return result

    return observed


def _format_module(path: str) -> str:
    return f"module {path!r}" if path else "the model"


class _InPlaceChangeRecorder(TorchFunctionMode):
    """Mode that records whether a hook changes a tensor in place."""

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # Methods such as `add_`, and operators such as `__iadd__`.
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        self.seen = self.seen or in_place or name in _IN_PLACE
        return func(*args, **(kwargs or {}))


_BACKWARD = (torch.autograd.backward, Tensor.backward)
_OF_TENSORS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, grad_fn_getter)


def refuse_hooks(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse hooks on tensors during tracing.

    Raises:
        CaptureError: if `func` registers a hook on a tensor, or returns the `grad_fn` of a non-leaf
            tensor, on which hooks could be registered.
    """
    # `grad_fn` of a leaf is None, so reading it is harmless.
    if func in _OF_TENSORS and not (func == grad_fn_getter and args[0].is_leaf):
        raise CaptureError(
            "`forward` registers a hook on a tensor that it computes, or reads its `grad_fn`; a "
            "captured model would not call hooks of tensors\nchange the gradient in the backward "
            "of a custom operator (`torch.library.custom_op` with `register_autograd`)"
        )


def refuse_autograd(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse hooks on tensors and backward passes during tracing.

    Raises:
        CaptureError: as `refuse_hooks`, and if `func` runs a backward pass.
    """
    refuse_hooks(func, args)
    if func in _BACKWARD:
        raise CaptureError(
            "`forward` calls `backward`, which cannot be captured because it adds gradients to "
            "`.grad`\ncompute gradients by `torch.autograd.grad` or `torch.func.grad`, or call "
            "`backward` outside of the model"
        )


@contextmanager
def refuse_saved_tensor_hooks() -> Iterator[None]:
    """Return a context in which saved-tensor hooks raise CaptureError.

    `save_on_cpu` is allowed, since it does not change gradients, and so is `RecordedTensors`, which
    capture itself enters.
    """
    enter = saved_tensors_hooks.__enter__

    def refuse(hooks: saved_tensors_hooks) -> None:
        if not isinstance(hooks, (save_on_cpu, RecordedTensors)):
            raise CaptureError(
                "`forward` enters `saved_tensors_hooks`, which a captured model would not call\n"
                "enter the hooks around the call of the model"
            )
        enter(hooks)

    saved_tensors_hooks.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
