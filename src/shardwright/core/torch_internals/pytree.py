"""PyTorch's pytrees: nested containers as a list of leaves and a structure.

`torch.export` describes arguments and results by these structures, so no other pytree library is
used.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._pytree import SequenceKey as SequenceKey
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils._pytree import treespec_dumps as treespec_dumps

from shardwright.core.torch_internals.tensors import version

_BUILTIN_TYPES = (bool, dict, float, int, list, set, str, tuple)
_ALLOWED_FACTORIES = {(each.__module__, each.__name__) for each in _BUILTIN_TYPES}
"""(module, name) of default factories of a `defaultdict` that may be loaded."""


def treespec_loads(text: str) -> TreeSpec:
    """Load a structure that `treespec_dumps` wrote.

    Raises:
        ValueError: if the text is malformed, or could run code: it has default factories other than
            built-in types, or enumerations of modules that are not imported.
    """
    try:
        _, structure = json.loads(text)
        _check_imported_names(structure)
        return _pytree.treespec_loads(text)
    except Exception as error:  # malformed text may cause any error
        raise ValueError(f"the text is not the structure of a call: {error}") from error


def _check_imported_names(structure: dict[str, Any]) -> None:
    """Raise ValueError if loading a structure could run code: PyTorch imports the modules of the
    names in it."""
    context = structure["context"]
    if isinstance(context, dict) and "default_factory_name" in context:
        factory = context["default_factory_module"], context["default_factory_name"]
        if factory not in _ALLOWED_FACTORIES:
            raise ValueError(f"the text refers to the function `{'.'.join(factory)}`")
    if isinstance(context, str) and structure["type"] is not None:
        json.loads(context, object_hook=_check_enumeration)
    for part in structure["children_spec"]:
        _check_imported_names(part)


def _check_enumeration(context: dict[str, Any]) -> None:
    """Raise ValueError if a structure has an enumeration of a module that is not imported."""
    if "__enum__" in context and context["fqn"].partition(":")[0] not in sys.modules:
        raise ValueError(f"the text refers to the enumeration `{context['fqn']}`")


def register_dataclasses(value: Any) -> None:
    """Register the dataclasses in `value` as pytree nodes (`torch.export.register_dataclass`).

    Dataclasses that cannot be rebuilt from their fields, because `__init__` or `__post_init__` does
    more than store them, remain leaves.
    """
    for leaf in tree_leaves(value):
        cls = type(leaf)
        if is_dataclass(cls):
            parts = {field.name: getattr(leaf, field.name, None) for field in fields(cls)}
            if _can_rebuild(cls, parts) and getattr(leaf, "__dict__", {}).keys() <= parts.keys():
                torch.export.register_dataclass(cls)
                register_dataclasses(parts)


def _can_rebuild(cls: type, parts: dict[str, Any]) -> bool:
    """Whether a dataclass called with its fields has the same fields, and changes none in place."""
    before = _ids_and_versions(parts)
    try:
        rebuilt = cls(**parts)
    except Exception:  # the user's `__init__` may raise any error
        return False
    has_same_fields = all(getattr(rebuilt, name) is part for name, part in parts.items())
    return has_same_fields and _ids_and_versions(parts) == before


def _ids_and_versions(parts: dict[str, Any]) -> list[tuple[int, int]]:
    """(id, version) of each leaf, to detect changes in place."""
    leaves = tree_leaves(parts)
    return [(id(leaf), version(leaf) if isinstance(leaf, Tensor) else 0) for leaf in leaves]
