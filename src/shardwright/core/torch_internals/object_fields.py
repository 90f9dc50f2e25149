"""Fields of objects of the user's classes: items of containers, attributes and slots.

Fields are read and set without calling methods of the user's classes, since these may have side
effects or raise errors.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

_LIBRARIES = {*sys.stdlib_module_names, "numpy", "shardwright", "torch"} - {"__main__"}
_WITH_OBJECTS = ("argparse", "collections", "types", "torch.distributions")
"""Modules of libraries whose objects contain the user's data."""

BASE_CLASSES = (OrderedDict, dict, list, tuple, SimpleNamespace, object)
"""Base classes whose objects can be created without `__init__`, subclasses before their bases."""

# Exact types, as a class that is derived from a number or a string may have fields.
LEAF_TYPES = (Tensor, bool, int, float, complex, str, type(None), np.ndarray)
CONSTANT_TYPES = (
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    bytes,
)
# CPython's `Py_TPFLAGS_HEAPTYPE`, which all classes that are defined in Python have.
_HEAP_TYPE = 1 << 9

# Objects may refer to each other in a circle, so that searches end at some depth.
_MAX_DEPTH = 8


def find_builtin_base_class(cls: type) -> Any:
    """Return the built-in class with which objects of the user's class `cls` are created; None if
    objects of `cls` are not flattened by fields."""
    # Built-in containers are nodes of PyTorch.
    if cls in BASE_CLASSES[1:4] or cls is object or cls is OrderedDict:
        return None
    if issubclass(cls, (Tensor, nn.Module, enum.Enum, type, torch.Size, BaseException)):
        return None
    module = str(cls.__module__)
    if module.partition(".")[0] in _LIBRARIES and not module.startswith(_WITH_OBJECTS):
        return None
    # Subclasses come before their bases, so this is the most derived one.
    base = next(base for base in BASE_CLASSES if issubclass(cls, base))
    derived = (each for each in cls.__mro__ if each not in base.__mro__)
    # Classes of extensions have contents besides their fields.
    return base if all(each.__flags__ & _HEAP_TYPE for each in derived) else None


def has_items_or_attributes(value: Any) -> bool:
    """Return whether an object has fields, or is of a class derived from a container."""
    # `forward` may compare an object without items and attributes by identity, as a sentinel.
    return bool(get_items_by_key(value) or get_attributes_by_name(value)) or isinstance(
        value, BASE_CLASSES[:4]
    )


def get_items_by_key(value: Any) -> dict[Hashable, Any]:
    """Return the items of a container by key or index; empty for other objects."""
    # By the methods of the built-in class, which the user's class may override.
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return dict(enumerate(list.__iter__(value)))
    return dict(enumerate(tuple.__iter__(value))) if isinstance(value, tuple) else {}


def get_attributes_by_name(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, including attributes in slots."""
    slot_values: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is MemberDescriptorType and not name.startswith("__"):
                try:
                    slot_values[name] = slot.__get__(value)
                except AttributeError:  # Not set yet.
                    continue
    try:
        # Not `vars()`: the user's class may define `__getattribute__` or `__dict__`.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return slot_values
    # An object that is its own `__dict__` has its attributes as items.
    return slot_values if attributes is value else {**slot_values, **attributes}


def set_attribute_or_slot(rebuilt: Any, name: str, value: Any) -> None:
    """Set an attribute without the `__setattr__` of the object's class."""
    for base in type(rebuilt).__mro__:
        slot = vars(base).get(name)
        if type(slot) is MemberDescriptorType:
            slot.__set__(rebuilt, value)
            return
    object.__getattribute__(rebuilt, "__dict__")[name] = value


def is_constant_field(value: Any) -> bool:
    """Return whether `value`, a field that is not a pytree child, is immutable."""
    if isinstance(value, (*CONSTANT_TYPES, *LEAF_TYPES, type, range, slice)):
        return True
    if isinstance(value, frozenset):
        return not has_tensor(value)
    return callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__qualname__")


def has_tensor(value: Any, depth: int = 0) -> bool:
    """Return whether a value is or contains a tensor or an array, at any depth up to 8."""
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    if depth > _MAX_DEPTH or type(value) in LEAF_TYPES:
        return False
    contents: Iterable[Any] = ()
    if isinstance(value, (set, frozenset)):
        contents = value
    elif isinstance(value, (dict, list, tuple)) or find_builtin_base_class(type(value)) is not None:
        contents = (*get_items_by_key(value).values(), *get_attributes_by_name(value).values())
    elif type(value) in _pytree.SUPPORTED_NODES:
        contents = _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    return any(has_tensor(item, depth + 1) for item in contents)


def has_only_tensors_and_plain_values(value: Any, depth: int = 0) -> bool:
    """Return whether a value contains only tensors, numbers and strings, in any containers and
    objects."""
    if isinstance(value, Tensor) or type(value) in LEAF_TYPES:
        return True
    cls = type(value)
    builtin = cls in (dict, list, tuple, OrderedDict)
    if cls in _pytree.SUPPORTED_NODES and not builtin:
        children = _pytree.SUPPORTED_NODES[cls].flatten_fn(value)[0]
        return all(has_only_tensors_and_plain_values(child, depth + 1) for child in children)
    if depth > _MAX_DEPTH or (
        not builtin and (find_builtin_base_class(cls) is None or not has_tensor(value))
    ):
        return False
    contents = (*get_items_by_key(value).values(), *get_attributes_by_name(value).values())
    return all(has_only_tensors_and_plain_values(item, depth + 1) for item in contents)


def describe_contents(value: Any, depth: int = 0) -> str:
    """Describe the contents of an object as text, equal on all ranks for equal contents."""
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls in LEAF_TYPES or isinstance(value, CONSTANT_TYPES):
        return repr(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if isinstance(value, (set, frozenset)):
        # Sorted, as the order of a set differs between ranks.
        return f"{name}{sorted(describe_contents(item, depth + 1) for item in value)}"
    if depth > _MAX_DEPTH:
        return name
    contents: dict[Any, Any] = {**get_items_by_key(value), **get_attributes_by_name(value)}
    item_texts = (
        f"{key!r}: {describe_contents(item, depth + 1)}" for key, item in contents.items()
    )
    return f"{name}({', '.join(item_texts)})"
