"""Readers of the Python state of modules, classes and functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

from torch import nn

from shardwright.core.capture.state_contents import (
    MISSING,
    OF_TORCH,
    Parts,
)

METHOD_TYPES = (FunctionType, property, functools.cached_property, staticmethod, classmethod)
_CALLED_TYPES = (FunctionType, BuiltinFunctionType, functools.partial)


@dataclass(frozen=True)
class GlobalsReader:
    """Reader of the given global variables of a module, or of the file that defines a function."""

    names: frozenset[str]

    @staticmethod
    def namespace(holder: ModuleType | FunctionType) -> dict[str, Any]:
        return holder.__globals__ if isinstance(holder, FunctionType) else vars(holder)

    def __call__(self, holder: ModuleType | FunctionType) -> Parts:
        held = self.namespace(holder)
        # `__name__`, `__file__` and the like are no state.
        return {name: held.get(name, MISSING) for name in self.names if name[:2] != "__"}


@dataclass(frozen=True)
class FunctionsReader:
    """Reader of the given functions of a module or class of a library."""

    names: frozenset[str]

    def __call__(self, owner: ModuleType | type) -> Parts:
        functions = {name: vars(owner).get(name) for name in self.names & vars(owner).keys()}
        return {name: each for name, each in functions.items() if isinstance(each, _CALLED_TYPES)}


def vars_of(value: Any) -> Parts:
    """Return the attributes of an object by name, as a copy."""
    return dict(vars(value))


def read_module_attributes(module: nn.Module) -> Parts:
    """Return the attributes of a module that PyTorch does not set itself."""
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH}


def read_class_attributes(cls: type[Any]) -> Parts:
    """Return the attributes of a class that are not methods."""
    members = read_class_members(cls).items()
    return {name: value for name, value in members if not isinstance(value, METHOD_TYPES)}


def read_class_members(cls: type[Any]) -> Parts:
    """Return the attributes and methods of a class, except those of Python itself."""
    return {
        name: value
        for name, value in vars(cls).items()
        # `_abc_impl` caches the subclass checks of `abc`, which `isinstance` fills.
        if not (name.startswith("__") or name == "_abc_impl")
    }


def read_forward(cls: type[nn.Module]) -> Parts:
    """Return `forward` of a class of modules, by name."""
    return {"forward": cls.forward}


def reads_library_functions(read: Callable[[Any], Parts]) -> bool:
    """Whether `read` returns functions of libraries."""
    return read is read_forward or isinstance(read, FunctionsReader)


def is_function(value: Any) -> bool:
    """Whether a value is a function or method, or the absence of one."""
    return value is MISSING or isinstance(value, METHOD_TYPES) or callable(value)


def read_defaults(function: FunctionType) -> Parts:
    """Return the default values of the parameters of a function, by name."""
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    named: Parts = dict(zip(names[len(names) - len(values) :], values, strict=True))
    return named | cast(Parts, function.__kwdefaults__ or {})
