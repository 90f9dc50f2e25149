"""Internals of `nn.Module`: tensors, state and calls; log level of PyTorch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import adaptive, transformer
from torch.nn.modules import module as registration

AdaptiveSoftmaxOutput = adaptive._ASMoutput
"""Class of the result of `nn.AdaptiveLogSoftmaxWithLoss`: a named tuple of output and loss."""

detects_causal_mask = transformer._detect_is_causal_mask.__code__
"""Code object of the function by which `nn.Transformer` modules detect causal masks."""


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's dictionary of children; changes of the dictionary change the module."""
    return module._modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's dictionary of parameters, without the parameters of children; changes of
    the dictionary change the module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's dictionary of buffers, without the buffers of children; changes of the
    dictionary change the module."""
    return module._buffers


@dataclass(frozen=True)
class TensorSlots:
    """The attributes of a module and its submodules that contain given parameters and buffers.

    Args:
        owners: for each tensor, (submodule, attribute name) pairs; several for a tied tensor.
        recurrent: recurrent submodules, whose `_flat_weights` list also contains their parameters.
    """

    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]
    recurrent: tuple[nn.RNNBase, ...]

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[Sequence[str]]) -> TensorSlots:
        """Find the attributes that contain given parameters and buffers of a module.

        Args:
            module: the module.
            names: for each tensor, all its names in `module`; several for a tied tensor.
        """

        def owner_of(name: str) -> tuple[nn.Module, str]:
            path, _, leaf = name.rpartition(".")
            return module.get_submodule(path), leaf

        owners = tuple(tuple(map(owner_of, aliases)) for aliases in names)
        recurrent = tuple(m for m in module.modules() if isinstance(m, nn.RNNBase))
        return cls(owners, recurrent)

    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors of the parameters and buffers in `owners`, in order."""
        # One name suffices: all names of a tied tensor have the same one.
        first_owners = (owners[0] for owners in self.owners)
        return [{**owner._parameters, **owner._buffers}[name] for owner, name in first_owners]  # type: ignore[misc]

    @contextmanager
    def holding(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context manager in which the attributes contain `tensors`, in the order of `owners`."""
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        flat_weights = [module._flat_weights for module in self.recurrent]
        try:
            for owners, tensor in zip(self.owners, tensors, strict=True):
                for owner, name in owners:
                    attributes: dict[str, Any] = owner._parameters
                    attributes = attributes if name in attributes else owner._buffers
                    replaced.append((attributes, name, attributes[name]))
                    attributes[name] = tensor
            # Recurrent modules compute with this list. Their `__setattr__` updates it, but writing
            # to the dictionaries does not.
            for module in self.recurrent:
                module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
            yield
        finally:
            # In reverse, so that an attribute replaced twice gets its original tensor back.
            for attributes, name, tensor in reversed(replaced):
                attributes[name] = tensor
            for module, weights in zip(self.recurrent, flat_weights, strict=True):
                module._flat_weights = weights


def alias_module(
    module: nn.Module, cls: type[nn.Module] | None = None, state: dict[str, Any] | None = None
) -> nn.Module:
    """Make a second object that shares all state of `module`.

    Methods of the original class can be called on the alias after the class of `module` is
    replaced.

    Args:
        module: the module.
        cls: class of the alias; by default the current class of `module`.
        state: `__dict__` of the alias; by default that of `module`.
    """
    # `nn.Module.__setattr__` needs the dictionaries that an object without `__init__` lacks.
    alias: nn.Module = object.__new__(cls or type(module))
    object.__setattr__(alias, "__dict__", vars(module) if state is None else state)
    return alias


def drop_buffer_assignments_of_export() -> None:
    """Remove the global hook by which `torch.export` appends a copy for each buffer assigned in
    `forward`.

    The hook handles buffers of the root module only, whereas capture handles the buffers of all
    modules. `torch.export` does not fail when it removes the missing hook later.
    """
    hooks = registration._global_buffer_registration_hooks
    # By its module, since other libraries may register such hooks too.
    for handle_id, hook in list(hooks.items()):
        if hook.__module__.startswith("torch._functorch."):
            del hooks[handle_id]


def state_names(module: nn.Module) -> set[str]:
    """Return the names of parameters and persistent buffers in the state dict, without calling
    state dict hooks."""
    # A state dict has an entry for each name of a tied tensor.
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        # `register_buffer(name, None)` only reserves a name.
        buffers = (name for name, buffer in child._buffers.items() if buffer is not None)
        persistent = (n for n in buffers if n not in child._non_persistent_buffers_set)
        names.update(prefix + name for name in persistent)
    return names


def share_state(wrapper: nn.Module, module: nn.Module) -> None:
    """Make `wrapper` share the parameters, buffers, submodules and state dict hooks of `module`.

    Both modules have the same dictionaries, so that registrations in one appear in the other.
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
    """Clear a recurrent module's weak references to its parameters.

    `torch.utils.swap_tensors` raises for tensors with weak references.
    """
    module._flat_weight_refs = []


def restore_flat_weights(module: nn.RNNBase) -> None:
    """Rebuild the flat weights and weak references of a recurrent module from its parameters."""
    module._init_flat_weights()


def observe_calls(module: nn.Module, callback: Callable[[], object]) -> Callable[[], None]:
    """Call `callback` before each call of `module`, but not before calls of copies of `module`.

    No forward hook is registered, as capture reads and checks the hooks of a model.

    Returns:
        A function that ends the observation, to be called once.
    """
    # `nn.Module.__call__` runs `_compiled_call_impl` if it is set, and copies of a module lose it.
    # The reference is weak, because the module refers to `call`.
    module_ref, previous_call = weakref.ref(module), module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        callback()
        module = module_ref()
        assert module is not None
        return (previous_call or module._call_impl)(*args, **kwargs)

    def stop() -> None:
        module = module_ref()
        # Unless `module.compile()` has replaced it since.
        if module is not None and module._compiled_call_impl is call:
            module._compiled_call_impl = previous_call

    module._compiled_call_impl = call
    return stop


def forget_compilation(module: nn.Module) -> bool:
    """Undo `module.compile()`; submodules stay compiled.

    Returns:
        Whether the module was compiled.
    """
    compiled = module._compiled_call_impl is not None
    module._compiled_call_impl = None
    return compiled


def call_before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Call `check` with the arguments of each call of a function, before the function.

    The change is permanent for the process; a second check of a function is ignored.

    Args:
        owner: the class or module of the function.
        name: name of the function.
        check: takes the arguments of the function, and may raise an error.
    """
    function = vars(owner)[name]

    @wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    if not hasattr(function, "checks_arguments"):
        vars(check_and_call)["checks_arguments"] = True
        setattr(owner, name, check_and_call)


def set_log_level(level: int) -> None:
    """Set the level of all loggers of PyTorch."""
    # Setting it again would reset about a hundred loggers, each of which clears the caches of all.
    if logging.getLogger("torch").level != level:
        torch._logging.set_logs(all=level)  # type: ignore[attr-defined]


def memo_of_process_groups(module: nn.Module) -> dict[int, dist.ProcessGroup]:
    """Return a memo for `copy.deepcopy` that shares a model's process groups instead of copying
    them, which is impossible. `SyncBatchNorm`, for example, has a process group."""
    return {
        id(value): value
        for submodule in module.modules()
        for value in vars(submodule).values()
        if isinstance(value, dist.ProcessGroup)
    }
