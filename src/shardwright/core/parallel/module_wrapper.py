"""Modules that wrap another one and share its parameters, buffers and attributes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from shardwright.core.torch_internals.modules import share_state
from shardwright.errors import PlanError

_OF_ANY_MODULE = frozenset(dir(nn.Module()))


class ModuleWrapper(nn.Module):
    """Has the parameters, buffers, submodules, mode and attributes of another module.

    Attributes that the wrapper has when `wrap` is called stay its own. Methods of the wrapped
    module are available once it is planned: before, they would run it without the wrapper.
    """

    _wrapped: tuple[nn.Module]
    """A tuple, so that `nn.Module` does not register it as a submodule."""

    def wrap(self, module: nn.Module) -> None:
        """Wrap `module`.

        Raises:
            PlanError: if an attribute of the model has the name of one of the wrapper's own.
        """
        vars(self).pop("_wrapped", None)
        share_state(self, module)
        self.training = module.training
        own = {"_wrapped", "_own_names", *vars(self), *dir(type(self))}
        self._own_names = _OF_ANY_MODULE | own
        model = wrapped_model(module)
        for name in sorted((vars(model).keys() & own) - _OF_ANY_MODULE):
            raise PlanError(
                f"{type(model).__name__} has an attribute {name!r}, which is the name of one of "
                f"the {type(self).__name__}'s that wraps it\nrename it"
            )
        self._wrapped = (module,)

    def __getattr__(self, name: str) -> Any:
        if "_wrapped" in vars(self):
            (wrapped,) = self._wrapped
            value = getattr(wrapped, name, inspect.Parameter.empty)
            planned = "execution" in vars(wrapped)
            if value is not inspect.Parameter.empty and (planned or not inspect.ismethod(value)):
                return value
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = vars(self).get("_wrapped")
        own = wrapped is None or name in self._own_names
        if own:
            super().__setattr__(name, value)
        if wrapped is not None and (not own or name == "training"):
            setattr(wrapped[0], name, value)

    def __delattr__(self, name: str) -> None:
        if "_wrapped" in vars(self) and name not in self._own_names:
            delattr(self._wrapped[0], name)
        else:
            super().__delattr__(name)


def wrapped_model(module: nn.Module) -> nn.Module:
    """The model inside of a wrapper, or of nested wrappers."""
    while isinstance(module, ModuleWrapper):
        (module,) = module._wrapped
    return module
