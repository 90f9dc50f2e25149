"""Hooks while a model is captured: forward hooks become part of the graph, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.errors import CaptureError
from shardwright.torch_internals.hooks import any_global_hook, backward_hooks, forward_hooks

_IN_PLACE = ("__setitem__", "__set__")
_LIBRARIES = ("torch", "transformers")
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


def observe_forward_hooks(twin: nn.Module) -> None:
    """Lets the forward hooks of a module that is about to be traced raise CaptureError if they do
    nothing that can be captured."""
    for path, child in twin.named_modules():
        for hooks in forward_hooks(child):
            for number, hook in hooks.items():
                library = str(getattr(hook, "__module__", "")).partition(".")[0]
                if library not in _LIBRARIES:
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


def refuse_tensor_hook(func: Any) -> None:
    """Raises:
    CaptureError: if `func`, called while a model is traced, registers a hook of a tensor.
    """
    if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        raise CaptureError(
            "a hook of a tensor that `forward` computes would not be called by a captured model. "
            "Write the change of its gradient as a custom operator (`torch.library.custom_op` with "
            "`register_autograd`)"
        )
