"""Modules that wrap another module and share its parameters, buffers and attributes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from shardwright.core.torch_internals.modules import share_state
from shardwright.errors import PlanError

_NN_MODULE_NAMES = frozenset(dir(nn.Module()))


class ModuleWrapper(nn.Module):
    """A module with the parameters, buffers, submodules, mode and attributes of a wrapped module.

    Attributes that the wrapper has before `wrap` is called remain attributes of the wrapper.
    Methods of the wrapped module are forwarded only once that module is planned. Before, a method
    would call the `forward` of the wrapped module, not of the wrapper.
    """

    _wrapped: tuple[nn.Module]
    """The wrapped module, in a tuple so that `nn.Module` does not register it as a submodule."""

    def wrap(self, module: nn.Module) -> None:
        """Make this module a wrapper of `module`.

        Raises:
            PlanError: if the wrapper and `module` have an attribute of the same name.
        """
        # A wrapper may wrap again, for example the planned model; until then assignments are its
        # own.
        vars(self).pop("_wrapped", None)
        # Names of parameters stay those of the wrapped module, also in checkpoints.
        share_state(self, module)
        self.training = module.training
        own_names = {"_wrapped", "_own_names", *vars(self), *dir(type(self))}
        self._own_names = _NN_MODULE_NAMES | own_names
        model = wrapped_model(module)
        for name in sorted((vars(model).keys() & own_names) - _NN_MODULE_NAMES):
            raise PlanError(
                f"{type(model).__name__} has an attribute {name!r}, which the "
                f"{type(self).__name__} that wraps it defines too\nrename the attribute of the "
                f"model, for instance to {name + '_'!r}"
            )
        self._wrapped = (module,)

    def __getattr__(self, name: str) -> Any:
        # By `vars`: looking up a missing attribute would call `__getattr__` again.
        if "_wrapped" in vars(self):
            (wrapped,) = self._wrapped
            value = getattr(wrapped, name, inspect.Parameter.empty)
            planned = "execution" in vars(wrapped)
            if value is not inspect.Parameter.empty and (planned or not inspect.ismethod(value)):
                return value
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = vars(self).get("_wrapped")
        is_own = wrapped is None or name in self._own_names
        if is_own:
            super().__setattr__(name, value)
        # `train()` sets the mode of both, as `forward` of the wrapped module reads its own mode.
        if wrapped is not None and (not is_own or name == "training"):
            setattr(wrapped[0], name, value)

    def __delattr__(self, name: str) -> None:
        if "_wrapped" in vars(self) and name not in self._own_names:
            delattr(self._wrapped[0], name)
        else:
            super().__delattr__(name)


def wrapped_model(module: nn.Module) -> nn.Module:
    """Return the model inside nested wrappers; `module` itself if it is not a wrapper."""
    while isinstance(module, ModuleWrapper):
        (module,) = module._wrapped
    return module
