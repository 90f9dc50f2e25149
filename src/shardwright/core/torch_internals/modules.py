"""Internals of modules: their dictionaries of state, their calls; and PyTorch's logging."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import adaptive, transformer
from torch.nn.modules import module as registration

AdaptiveSoftmaxOutput = adaptive._ASMoutput
"""The result of `nn.AdaptiveLogSoftmaxWithLoss`: a named tuple of output and loss."""

detects_causal_mask = transformer._detect_is_causal_mask.__code__
"""Code of the function with which `nn.Transformer` modules test whether a mask is causal."""


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the module's own dictionary of its children."""
    return module._modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's own dictionary of its parameters, without those of children."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the module's own dictionary of its buffers, without those of children."""
    return module._buffers


@dataclass(frozen=True)
class TensorSlots:
    """The attributes of a module's submodules that contain some of its parameters and buffers.

    Args:
        owners: for each tensor the submodules that own it, with its name there; several if tied.
        recurrent: recurrent submodules, which also keep their parameters in a list.
    """

    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]
    recurrent: tuple[nn.RNNBase, ...]

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[Sequence[str]]) -> TensorSlots:
        """Find the slots of tensors by their names in `module`, all names for a tied tensor."""

        def slot(name: str) -> tuple[nn.Module, str]:
            path, _, leaf = name.rpartition(".")
            return module.get_submodule(path), leaf

        owners = tuple(tuple(map(slot, aliases)) for aliases in names)
        recurrent = tuple(m for m in module.modules() if isinstance(m, nn.RNNBase))
        return cls(owners, recurrent)

    def tensors(self) -> list[torch.Tensor]:
        """Returns the current tensor of each slot."""
        firsts = (owners[0] for owners in self.owners)
        return [{**owner._parameters, **owner._buffers}[name] for owner, name in firsts]  # type: ignore[misc]

    @contextmanager
    def holding(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which the slots contain `tensors` instead."""
        held: list[tuple[dict[str, Any], str, Any]] = []
        flat = [module._flat_weights for module in self.recurrent]
        try:
            for owners, tensor in zip(self.owners, tensors, strict=True):
                for owner, name in owners:
                    own: dict[str, Any] = owner._parameters
                    own = own if name in own else owner._buffers
                    held.append((own, name, own[name]))
                    own[name] = tensor
            for module in self.recurrent:
                module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
            yield
        finally:
            for own, name, tensor in reversed(held):
                own[name] = tensor
            for module, weights in zip(self.recurrent, flat, strict=True):
                module._flat_weights = weights


def view_of(module: nn.Module) -> nn.Module:
    """Another object of the present class of `module` that shares all of its state: the methods of
    this class remain in reach when `module` gets another one."""
    view = object.__new__(type(module))
    object.__setattr__(view, "__dict__", vars(module))
    return view


def drop_buffer_assignments_of_export() -> None:
    """Remove the hook with which `torch.export` appends copies for buffers assigned by `forward`.

    It does so for the root module only, whereas capture handles the buffers of all modules. The
    handle with which `torch.export` removes the hook later ignores that it is gone.
    """
    hooks = registration._global_buffer_registration_hooks
    for number, hook in list(hooks.items()):
        if hook.__module__.startswith("torch._functorch."):
            del hooks[number]


def state_names(module: nn.Module) -> set[str]:
    """Returns the names of parameters and persistent buffers in the state dict; calls no hooks."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        buffers = (name for name, buffer in child._buffers.items() if buffer is not None)
        persistent = (n for n in buffers if n not in child._non_persistent_buffers_set)
        names.update(prefix + name for name in persistent)
    return names


def share_state(wrapper: nn.Module, module: nn.Module) -> None:
    """Let `wrapper` share the parameters, buffers, submodules and state dict hooks of `module`.

    The dictionaries are the same objects: registrations in one module appear in the other.
    """
    wrapper._modules = module._modules
    wrapper._parameters = module._parameters
    wrapper._buffers = module._buffers
    wrapper._non_persistent_buffers_set = module._non_persistent_buffers_set
    wrapper._state_dict_hooks = module._state_dict_hooks
    wrapper._state_dict_pre_hooks = module._state_dict_pre_hooks
    wrapper._load_state_dict_pre_hooks = module._load_state_dict_pre_hooks
    wrapper._load_state_dict_post_hooks = module._load_state_dict_post_hooks


def forget_flat_weights(module: nn.RNNBase) -> None:
    """Drop a recurrent module's weak references to its parameters.

    `torch.utils.swap_tensors` refuses tensors with weak references.
    """
    module._flat_weight_refs = []


def restore_flat_weights(module: nn.RNNBase) -> None:
    """Rebuild the flat weights and weak references of a recurrent module from its parameters."""
    module._init_flat_weights()


def observe_calls(module: nn.Module, called: Callable[[], object]) -> Callable[[], None]:
    """Call `called` before each call of `module`; copies of the module are not observed.

    Not a hook, since the model's hooks are captured and checked.

    Returns:
        A function that ends the observation, to be called once.
    """
    module_ref, before = weakref.ref(module), module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        called()
        module = module_ref()
        assert module is not None
        return (before or module._call_impl)(*args, **kwargs)

    def end() -> None:
        module = module_ref()
        if module is not None and module._compiled_call_impl is call:
            module._compiled_call_impl = before

    module._compiled_call_impl = call
    return end


def log_only(level: int) -> None:
    """Set the level of all loggers of PyTorch."""
    torch._logging.set_logs(all=level)  # type: ignore[attr-defined]
