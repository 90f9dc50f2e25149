"""Attributes of objects in a trace of TorchDynamo: guards on missing ones, and assignments.

PyTorch 2.13 guards on the result of `hasattr`, but not on an `AttributeError`, which `forward` may
catch to create the attribute in its first call, nor on `name in vars(self)`. It traces an
assignment only if the class inherits `__setattr__` from `object`; `SimpleNamespace` has an equal
method of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import (
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    user_defined,
)
from torch._dynamo.variables.dicts import DunderDictVariable


@contextmanager
def guarding_missing_attributes() -> Iterator[None]:
    """Context manager in which Dynamo guards on each missing attribute that a trace reads."""
    with (
        _patch_attribute_reads(UserDefinedObjectVariable),
        _patch_attribute_reads(UserDefinedClassVariable),
        patch.object(DunderDictVariable, "install_dict_contains_guard", _guard_on_entry),
    ):
        yield


def _guard_on_entry(variable: Any, tx: Any, keys: Sequence[Any]) -> None:
    """Guard on whether an object has an attribute of its own, as `self.__dict__.get(name)` and
    `name in vars(self)` read."""
    key = keys[0]
    if variable.source is None or not key.is_python_constant():
        return
    name = key.as_python_constant()
    # Before the trace, whatever it assigns.
    is_present = name in variable.items.item_dict
    guard = GuardBuilder.DICT_CONTAINS if is_present else GuardBuilder.DICT_NOT_CONTAINS
    install_guard(variable.source.make_guard(partial(guard, key=name)))


def _patch_attribute_reads(variable_type: type) -> Any:
    # Each of the two classes has a method of its own.
    read = vars(variable_type)["var_getattr"]

    def guarded(variable: Any, tx: Any, name: str) -> Any:
        try:
            return read(variable, tx, name)
        except ObservedAttributeError:
            # Without a source, the object was created in the trace and cannot differ between calls.
            if variable.source is not None:
                missing = partial(GuardBuilder.HASATTR, attr=name)
                install_guard(variable.source.make_guard(missing))
            raise

    return patch.object(variable_type, "var_getattr", guarded)


@contextmanager
def assigning_to_namespaces() -> Iterator[None]:
    """Context manager in which Dynamo traces assignments to attributes of a `SimpleNamespace`."""
    is_standard = user_defined.is_standard_setattr

    def accepts(method: object) -> bool:
        return is_standard(method) or method is SimpleNamespace.__setattr__

    with patch.object(user_defined, "is_standard_setattr", accepts):
        yield
