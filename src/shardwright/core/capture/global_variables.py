"""Global variables of the user's files that the `forward` of a model reads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dis import get_instructions
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

GLOBALS = "globals of "
"""Prefix of a location that is a Python module: `globals of mymodel`.

The prefix distinguishes a Python module from a submodule of the model.
"""

GRADIENT_MODE = (GLOBALS + "torch", "is_grad_enabled")
"""(location, name) of the gradient mode (`torch.no_grad`), which is recorded like a global
variable."""

GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
"""Instructions of Python's virtual machine that read a global variable."""

# `sys.stdlib_module_names` contains `__main__`, which is the user's script.
_LIBRARIES = {*sys.stdlib_module_names, "numpy", "peft", "shardwright", "torch", "transformers"} - {
    "__main__"
}
_VARIABLES = (bool, int, float, complex, str, bytes, type(None), Tensor, np.ndarray)
_CONTAINERS = (list, tuple, dict, set, frozenset)


MODES: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (
        torch.is_grad_enabled,
        torch.get_default_dtype,
        torch.are_deterministic_algorithms_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
        torch.get_deterministic_debug_mode,
        torch.get_float32_matmul_precision,
        torch.is_anomaly_enabled,
    )
}
"""Functions that return a mode of PyTorch, by name; modes are recorded like global variables."""


class _CurrentModes(dict[str, Any]):
    """Mapping from the names in `MODES` to the current modes, as plain values."""

    def __getitem__(self, name: str) -> Any:
        mode = MODES[name]()
        return str(mode) if isinstance(mode, torch.dtype) else mode

    def get(self, name: str, default: object = None) -> Any:
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in MODES


def reads_gradient_mode(model: nn.Module) -> bool:
    """Return whether user code of the model refers to `torch.is_grad_enabled`."""
    return GRADIENT_MODE in globals_read(model)


def modes_read(codes: Iterable[CodeType]) -> Iterator[tuple[str, str]]:
    """Yield (location, name) of the PyTorch modes, such as the gradient mode, that code reads."""
    names = {name for code in codes for name in code.co_names}
    for name in sorted(MODES.keys() & names):
        yield GRADIENT_MODE[0], name


def globals_of(scope: str) -> dict[str, Any]:
    """Return the global variables of a Python module; empty if the module is not imported.

    Args:
        scope: `GLOBALS` + the name of the Python module, or the location of `GRADIENT_MODE`, whose
            variables are PyTorch's modes.
    """
    if scope == GRADIENT_MODE[0]:
        return _CurrentModes()
    file = sys.modules.get(scope.removeprefix(GLOBALS))
    return {} if file is None else vars(file)


def globals_read(
    model: nn.Module, codes: dict[CodeType, None] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of the global variables that the model's Python code may read.

    Searches `forward` of each module class and, transitively, the methods and functions that it
    names. Excludes code and variables of libraries, and closures.

    Args:
        model: the model.
        codes: if given, filled with the code objects of these functions, as keys.
    """
    seen = {} if codes is None else codes
    for cls in dict.fromkeys(map(type, model.modules())):
        if not is_library(cls.__module__):
            yield from _find_variable_reads(getattr(cls, "forward", None), cls, seen)


def _find_variable_reads(
    function: Any, cls: type, seen: dict[CodeType, None]
) -> Iterator[tuple[str, str]]:
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else None
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return
    if is_library(function.__module__):
        return
    seen[function.__code__] = None
    names = set(names_in(function.__code__))
    for name in sorted(MODES.keys() & names):
        yield GRADIENT_MODE[0], name
    # Sorted, because the order of a set differs between ranks.
    for name in sorted(names):
        for base in cls.__mro__:  # `super()` may call any of them.
            yield from _find_variable_reads(vars(base).get(name), cls, seen)
    file = sys.modules.get(function.__module__)
    # Code that was executed in other namespaces, whose variables have no module to be found by.
    if file is None or vars(file) is not function.__globals__:
        return
    # An attribute `self.p` is no global variable `p`, which only some ranks may have.
    own_names = _find_global_names(function.__code__)
    imported = [vars(file)[name] for name in own_names & vars(file).keys()]
    for module in (file, *(value for value in imported if isinstance(value, ModuleType))):
        if is_library(module.__name__):
            continue
        for name in sorted((own_names if module is file else names) & vars(module).keys()):
            if _is_data_variable(vars(module)[name]) and not name.startswith("__"):
                yield GLOBALS + module.__name__, name
            yield from _find_variable_reads(vars(module)[name], cls, seen)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of the global variables and attributes that a function uses."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


# Cached, since disassembling is slow and each capture visits the same functions.
@lru_cache(maxsize=1 << 12)
def _find_global_names(code: CodeType) -> frozenset[str]:
    """Return the names that a function, and functions defined in it, read as global variables."""
    names = {each.argval for each in get_instructions(code) if each.opname in GLOBAL_READS}
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(names.union(*map(_find_global_names, nested)))


def _is_data_variable(value: Any) -> bool:
    """Whether the value of a global variable is data rather than a function, class or module."""
    if isinstance(value, (*_VARIABLES, *_CONTAINERS)):
        return True
    defined = isinstance(value, (type, ModuleType, nn.Module)) or callable(value)
    return hasattr(value, "__dict__") and not defined


def is_library(name: str | None) -> bool:
    """Return whether a Python module belongs to a known library instead of user code.

    Args:
        name: name of the module; None for code that was compiled without one.
    """
    return name is not None and name.partition(".")[0] in _LIBRARIES
