"""Nested tuples, lists and dictionaries as a list of leaves and a structure.

PyTorch exports models with these structures, so no other library's would do.
"""

from torch.utils._pytree import (
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "SequenceKey",
    "TreeSpec",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
