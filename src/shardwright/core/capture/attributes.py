"""Values of the plain attributes and global variables on which a captured program depends.

They are compared by contents, and told apart by texts that are equal on all ranks.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.core.capture.global_variables import GLOBALS, globals_of
from shardwright.core.torch_internals.hooks import forward_hooks
from shardwright.core.torch_internals.modules import own_buffers
from shardwright.core.torch_internals.tensors import storage_id, version

MISSING = "<no such attribute>"
"""Sentinel that represents the value of a missing attribute."""

SET = "<set by forward>"
"""Recorded value of an attribute that `forward` sets before it reads the attribute."""

HOOKS = "forward hooks"
"""Name of the `attribute_texts` entry that is the number of forward hooks of a module."""

CLASSES = "classes of submodules"
"""Name of the `attribute_texts` entry that is a hash of the paths and classes of all submodules."""

OF_MODULES = frozenset((HOOKS, CLASSES))

BUFFERS = "buffers of "
"""Prefix of the module path in `attribute_texts` entries of buffers whose values were read."""

PLAIN_TYPES = (int, float, complex, str, bytes, type(None))
"""Types whose values are their own fingerprints."""

NUMBERS = (int, float)
"""Types of Python numbers; booleans are modes rather than numbers."""

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)


def content(value: Any, name: str = "", omitted: Collection[str] = ()) -> Hashable:
    """Return a fingerprint of an attribute's value, equal as long as the value is unchanged.

    Args:
        value: the value.
        name: name of the value, from which those of its parts begin (`named_items`).
        omitted: names of numbers of which only the type counts.
    """
    if name in omitted and type(value) in NUMBERS:
        return type(value).__name__
    if isinstance(value, PLAIN_TYPES):
        # With the type, because 1 == 1.0 == True.
        return type(value).__name__, value
    if isinstance(value, nn.Parameter):
        return "parameter", id(value)
    if isinstance(value, Tensor):
        return "tensor", id(value), version(value), storage_id(value)
    if isinstance(value, np.ndarray):
        return "array", id(value), value.tobytes()
    if isinstance(value, _GENERATORS):
        return type(value).__name__, id(value), pickle.dumps(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *_contents_of_items(value, name, omitted)
    if isinstance(value, dict):
        return "dict", *zip(
            map(content, value), _contents_of_items(value, name, omitted), strict=True
        )
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(content, value))
    # Modules and classes count by identity; `ReachableState` compares their attributes.
    if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        items = named_items(value, name)
        contents = (_compute_shallow_fingerprint(*item, omitted) for item in items)
        # Guards compare objects with omitted numbers, which may be replaced for each value.
        identity = type(value) if omitted else id(value)
        return "object", identity, *zip(vars(value), contents, strict=True)
    return type(value).__name__, id(value)


def _contents_of_items(value: Any, name: str, omitted: Collection[str]) -> Iterator[Hashable]:
    if omitted:
        return (content(*item, omitted) for item in named_items(value, name))
    # Without names, which would take most of the time.
    return map(content, value.values() if isinstance(value, dict) else value)


def named_items(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the items of a container, or the attributes of another object, with their names.

    Args:
        value: the container or object.
        name: name of `value`: the item of key `scale` is named `self.options['scale']`.
    """
    if isinstance(value, (list, tuple)):
        yield from ((item, f"{name}[{index}]") for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((item, f"{name}[{key!r}]") for key, item in value.items())
    else:
        yield from ((item, f"{name}.{attribute}") for attribute, item in vars(value).items())


def numbers_of(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield the Python numbers whose values are in `content(value)`, with their names.

    Numbers in tuples are left out, as TorchDynamo compares each tuple as a whole.
    """
    if type(value) in NUMBERS:
        yield name, value
    elif isinstance(value, (list, dict)):
        for item in named_items(value, name):
            yield from numbers_of(*item)
    elif hasattr(value, "__dict__") and not isinstance(value, (tuple, Tensor, nn.Module, type)):
        for item in named_items(value, name):
            # As in `_compute_shallow_fingerprint`.
            if isinstance(item[0], (*NUMBERS, list)):
                yield from numbers_of(*item)


def variables_at(modules: Mapping[str, nn.Module], path: str) -> dict[str, Any]:
    """Return the attributes or buffers of a module, or the global variables of a Python module.

    Args:
        modules: all modules of a model by path.
        path: the path of a module for its attributes, `BUFFERS` + the path of a module for its
            buffers, or `GLOBALS` + the name of a Python module for its global variables.
    """
    if path.startswith(GLOBALS):
        return globals_of(path)
    if path.startswith(BUFFERS):
        # `modules` may be those of another model than the captured one (`has_attributes`).
        bearer = modules.get(path.removeprefix(BUFFERS))
        held: dict[str, Any] = {} if bearer is None else own_buffers(bearer)
        return held
    return vars(modules[path])


def variable(modules: Mapping[str, nn.Module], path: str, name: str) -> Any:
    """Return the value of an attribute or global variable; `MISSING` if it does not exist.

    A class attribute is returned only if its value is plain (number, string, None) or a tuple.
    """
    variables = variables_at(modules, path)
    if name in variables or path.startswith((GLOBALS, BUFFERS)):
        return variables.get(name, MISSING)
    # Methods and properties of a class are code rather than state.
    of_class = getattr(type(modules[path]), name, MISSING)
    return of_class if isinstance(of_class, (*PLAIN_TYPES, tuple)) else MISSING


def plain_text(value: Any) -> str:
    """Return the `repr` of a plain value (number, string, None, or tuple of plain values); `""` for
    other values."""
    items = value if isinstance(value, tuple) else (value,)
    return repr(value) if all(isinstance(item, PLAIN_TYPES) for item in items) else ""


def state_text(path: str, value: Any) -> str:
    """Return dtype, shape and hash of a buffer with data; for other values, `plain_text(value)`."""
    if not path.startswith(BUFFERS) or type(value) is not Tensor or value.is_meta:
        return plain_text(value)
    # Hashed as bytes, because numpy has no bfloat16.
    held = value.detach().cpu().contiguous()
    digest = hashlib.sha256(held.flatten().view(torch.uint8).numpy().tobytes())
    return f"{held.dtype} {tuple(held.shape)} {digest.hexdigest()[:16]}"


def attribute_texts(
    module: nn.Module, read: Iterable[tuple[str, str]], written: Iterable[tuple[str, str]] = ()
) -> tuple[tuple[str, str, str], ...]:
    """Return the state that a captured program depends on, as (path, name, fingerprint) entries.

    Entries: attributes and global variables that `forward` reads or sets, the number of forward
    hooks of each module that has any, and a hash of the classes of all submodules.

    Args:
        read, written: (path, name) of the variables that `forward` reads, and sets.
    """
    modules = dict(module.named_modules())
    classes = "\n".join(
        f"{path} {_get_qualified_class_name(child)}" for path, child in modules.items()
    )
    hooks = (
        (path, HOOKS, str(sum(map(len, forward_hooks(child)))))
        for path, child in modules.items()
        if any(forward_hooks(child))
    )
    attributes = (
        (
            path,
            name,
            state_text(path, variable(modules, path, name)),
        )
        for path, name in read
        # A path that this model lacks has no entry, and so differs from the captured entries.
        if path in modules or path.startswith((GLOBALS, BUFFERS))
    )
    structure = ("", CLASSES, hashlib.sha256(classes.encode()).hexdigest()[:16])
    return (*attributes, *((*key, SET) for key in written), *hooks, structure)


def _get_qualified_class_name(module: nn.Module) -> str:
    module_class = type(module)
    return f"{module_class.__module__}.{module_class.__qualname__}"


def has_attributes(module: nn.Module, captured: tuple[tuple[str, str, str], ...]) -> bool:
    """Return whether a module has the same attributes, hooks and submodule classes as at its
    capture."""
    # `attribute_texts` adds the entries of hooks and classes by itself.
    of_attributes = [entry for entry in captured if entry[1] not in OF_MODULES]
    read = [(path, name) for path, name, value in of_attributes if value != SET]
    written = [(path, name) for path, name, value in captured if value == SET]
    return attribute_texts(module, read, written) == captured


def _compute_shallow_fingerprint(
    value: Any, name: str = "", omitted: Collection[str] = ()
) -> Hashable:
    if isinstance(value, (list, tuple)):
        items = named_items(value, name)
        fingerprints = (_compute_shallow_fingerprint(*item, omitted) for item in items)
        return type(value).__name__, *fingerprints
    # Other objects by identity: they may refer to each other in circles, and `ReachableState`
    # compares their contents.
    plain = isinstance(value, (*PLAIN_TYPES, Tensor, np.ndarray))
    return content(value, name, omitted) if plain else ("object", id(value))
