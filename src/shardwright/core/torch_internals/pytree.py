"""PyTorch's pytrees: nested containers flattened into a list of leaves and a `TreeSpec`.

`torch.export` describes arguments and results by a `TreeSpec`, so no other pytree library is used.
"""

from __future__ import annotations

import json
import sys
from typing import Any

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

from shardwright.core.torch_internals.flex import register_block_masks
from shardwright.core.torch_internals.pytree_objects import (
    is_registered_object as is_registered_object,
)
from shardwright.core.torch_internals.pytree_objects import register_keys as register_keys
from shardwright.core.torch_internals.pytree_objects import register_named_classes
from shardwright.core.torch_internals.pytree_objects import register_objects as register_objects

_BUILTIN_TYPES = (bool, dict, float, int, list, set, str, tuple)
_ALLOWED_FACTORIES = {(each.__module__, each.__name__) for each in _BUILTIN_TYPES}
"""Module and name of each default factory that a serialized `defaultdict` may have."""


def treespec_loads(text: str) -> TreeSpec:
    """Deserialize a `TreeSpec` that `treespec_dumps` has written.

    Args:
        text: the `TreeSpec` as JSON.

    Raises:
        ValueError: if the text is malformed, or loading could run code, as a default factory is not
            a built-in type or an enumeration belongs to a module that is not imported.
    """
    try:
        # The first element is the version of the format.
        _, structure = json.loads(text)
        # First, since PyTorch runs code while it reads some structures.
        _check_runs_no_code(structure)
        # PyTorch looks classes up by name, so they are registered before it reads the text.
        register_block_masks(text)
        register_named_classes(text)
        return _pytree.treespec_loads(text)
    except Exception as error:  # malformed text may cause any error
        raise ValueError(f"this is not a serialized `TreeSpec`: {error}") from error


def _check_runs_no_code(structure: dict[str, Any]) -> None:
    """Raise ValueError if loading a serialized `TreeSpec` could run code.

    PyTorch imports the modules of default factories and enumerations.
    """
    context = structure["context"]
    if isinstance(context, dict) and "default_factory_name" in context:
        factory = context["default_factory_module"], context["default_factory_name"]
        if factory not in _ALLOWED_FACTORIES:
            raise ValueError(
                f"the serialized `TreeSpec` calls `{'.'.join(factory)}`, which could run code\n"
                "only load files that Shardwright has written"
            )
    # Other contexts are JSON text, in which an enumeration is an object with its module.
    if isinstance(context, str) and structure["type"] is not None:
        json.loads(context, object_hook=_check_enum_is_imported)
    for child in structure["children_spec"]:
        _check_runs_no_code(child)


def _check_enum_is_imported(context: dict[str, Any]) -> None:
    """Raise ValueError if a JSON object is an enumeration of a module that is not imported."""
    if "__enum__" in context and context["fqn"].partition(":")[0] not in sys.modules:
        raise ValueError(
            f"the serialized `TreeSpec` refers to `{context['fqn']}` of a module that is not"
            " imported\nimport the module before loading the file"
        )
