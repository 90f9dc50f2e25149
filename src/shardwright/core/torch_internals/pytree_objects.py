"""Objects of the user's classes as pytree nodes: data classes, plain objects and containers derived
from built-in containers.

An object with tensors is flattened by fields, and rebuilt by setting its fields without calling
`__init__`. Fields that are numbers, strings, tensors, or containers of these are children. Other
immutable fields are constants of the structure. For all other fields the structure has only the
class, and a rebuilt object raises an error when the field is used. An object without tensors, such
as a configuration, is a constant.
"""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shardwright.core.torch_internals.object_fields import (
    CONSTANT_TYPES,
    LEAF_TYPES,
    describe_contents,
    find_builtin_base_class,
    get_attributes_by_name,
    get_items_by_key,
    has_items_or_attributes,
    has_only_tensors_and_plain_values,
    has_tensor,
    is_constant_field,
    set_attribute_or_slot,
)
from shardwright.errors import CaptureError

_TRACER_MODULES = ("torch", "shardwright")
_MAX_STRUCTURES = 64


def register_objects(value: Any, only_tensors: bool = False) -> None:
    """Register the classes of the objects in a pytree as pytree nodes.

    Args:
        value: a pytree.
        only_tensors: whether to register classes only if all fields are tensors, numbers, strings,
            or containers or objects of these, so that objects can be rebuilt from their fields.

    Raises:
        CaptureError: if an object contains itself.
    """
    try:
        # Objects of a registered class become nodes, whose leaves may be of further classes.
        while classes := {
            type(leaf) for leaf in _pytree.tree_leaves(value) if _is_unregistered_object(leaf)
        }:
            if only_tensors and not has_only_tensors_and_plain_values(value):
                return
            for cls in classes:
                _register_class(cls)
        register_keys(_pytree.tree_structure(value))
    except RecursionError:
        raise CaptureError(
            "an argument contains itself, so its fields cannot be listed\n"
            "pass the tensors that `forward` reads"
        ) from None


def register_named_classes(text: str) -> None:
    """Register the classes of imported modules that a serialized `TreeSpec` names.

    Args:
        text: the `TreeSpec`, as `treespec_dumps` returns it.
    """
    for name in set(_iterate_class_names(json.loads(text)[1])):
        if name in _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            continue
        # The name of a named tuple is in quotes, as JSON.
        module, _, path = name.strip('"').partition(":")
        named_class: Any = sys.modules.get(module)
        for each in path.split("."):
            named_class = getattr(named_class, each, None)
        if _pytree.is_namedtuple_class(named_class):
            _register_named_tuple(named_class)
        elif isinstance(named_class, type) and find_builtin_base_class(named_class) is not None:
            _register_class(named_class)


def _iterate_class_names(structure: Any) -> Iterator[str]:
    for name in (structure["type"], structure["context"]):
        if isinstance(name, str) and ":" in name:
            yield name
    for child in structure["children_spec"]:
        yield from _iterate_class_names(child)


def _is_unregistered_object(value: Any) -> bool:
    """Whether `value` is an object with fields whose class is not a pytree node yet."""
    cls = type(value)
    # Named tuples are nodes of PyTorch too.
    if _pytree.is_namedtuple_class(cls):
        return False
    return (
        cls not in _pytree.SUPPORTED_NODES
        and find_builtin_base_class(cls) is not None
        and has_items_or_attributes(value)
    )


def is_registered_object(value: Any) -> bool:
    """Whether the class of an object was registered by `register_objects`."""
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_fn is _flatten_object


def _register_class(cls: type) -> None:
    """Register the user's class `cls` as a pytree node that is flattened by fields, or as its
    library registers it."""
    if _is_registered_by_library(cls):
        return
    base = find_builtin_base_class(cls)

    def unflatten(children: Iterable[Any], structure: Any) -> Any:
        return structure.rebuild(cls, base, list(children))

    _pytree.register_pytree_node(
        cls,
        _flatten_object,
        unflatten,
        flatten_with_keys_fn=_flatten_object_with_keys,
        serialized_type_name=_make_serialized_class_name(cls),
        to_dumpable_context=_convert_structure_to_json,
        from_dumpable_context=_convert_structure_from_json,
    )


def _is_registered_by_library(cls: type) -> bool:
    """Register a `ModelOutput` class of transformers as transformers does.

    It registers such a class when the class is created or an object is built, but not while
    tracing. An eager call would fail if the class was registered differently before.
    """
    model_output = getattr(sys.modules.get("transformers.utils.generic"), "ModelOutput", None)
    if model_output is None or not issubclass(cls, model_output):
        return False
    is_tracing = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        cls.__init_subclass__()
    finally:
        torch.compiler._is_compiling_flag = is_tracing
    return cls in _pytree.SUPPORTED_NODES


def _make_serialized_class_name(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    # Different classes may have one name, such as classes that are defined in a function.
    while name in _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        name += "'"
    return name


def register_keys(structure: Any) -> None:
    """Give each pytree class in a structure keys, for errors that name a leaf, and a serialized
    name.

    Classes that the user registered may lack both; named tuples lack serialized names.

    Args:
        structure: a `TreeSpec`.
    """
    for child in structure.children():
        register_keys(child)
    cls, context = structure.type, structure.context
    # All named tuples have one node type, with the class as context.
    if cls is namedtuple:
        if context not in _pytree.SUPPORTED_SERIALIZED_TYPES:
            _register_named_tuple(context)
        return
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is None:
        return
    if node.flatten_with_keys_fn is None:
        # The children of such a class are named by their positions.
        with_keys = partial(_flatten_with_sequence_keys, node.flatten_fn)
        # `flatten_with_keys_fn` is the last field.
        _pytree.SUPPORTED_NODES[cls] = type(node)(*node[:-1], with_keys)
    serialized = _pytree.SUPPORTED_SERIALIZED_TYPES[cls]
    if serialized.serialized_type_name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        serialized = type(serialized)(
            cls,
            _make_serialized_class_name(cls),
            _convert_structure_to_json,
            _convert_structure_from_json,
        )
        _pytree.SUPPORTED_SERIALIZED_TYPES[cls] = serialized
        _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[serialized.serialized_type_name] = cls
    if serialized.to_dumpable_context is _convert_structure_to_json:
        _add_structure_to_cache(context)


def _flatten_with_sequence_keys(flatten: Callable[[Any], Any], value: Any) -> tuple[list[Any], Any]:
    children, context = flatten(value)
    return [(_pytree.SequenceKey(i), each) for i, each in enumerate(children)], context


def _register_named_tuple(cls: Any) -> None:
    # The name is the context of the structure, which must be JSON.
    _pytree._register_namedtuple(cls, serialized_type_name=f'"{_make_serialized_class_name(cls)}"')


@dataclass(frozen=True)
class _ObjectStructure:
    """Pytree context of an object with tensors, from which the object is rebuilt.

    Args:
        items: keys of a dictionary's items, or indices of a sequence's items.
        attributes: names of the attributes that are children.
        constants: names and values of all other attributes.
        is_own_dict: whether the object is its own `__dict__`, so that its items are its attributes.
    """

    items: tuple[Hashable, ...]
    attributes: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...] = ()
    is_own_dict: bool = False

    def rebuild(self, cls: type, base: Any, children: list[Any]) -> Any:
        count = len(self.items)
        items = children[:count]
        # A tuple takes its items when it is created.
        rebuilt = base.__new__(cls, items) if base is tuple else base.__new__(cls)
        if issubclass(base, dict):
            for key, item in zip(self.items, items, strict=True):
                base.__setitem__(rebuilt, key, item)
        elif base is list:
            list.extend(rebuilt, items)
        if self.is_own_dict:
            object.__setattr__(rebuilt, "__dict__", rebuilt)
        named = zip(self.attributes, children[count:], strict=True)
        for name, value in (*named, *((name, constant.value) for name, constant in self.constants)):
            # Not `setattr`, which the class may override, as a frozen data class does.
            set_attribute_or_slot(rebuilt, name, value)
        return rebuilt


class _ConstantObject:
    """An object or field that does not change between calls, as part of a structure.

    Two constants are equal if their contents are equal; constants of a class without `__eq__` must
    also be the same object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.contents = describe_contents(value)

    def rebuild(self, cls: type, base: Any, children: list[Any]) -> Any:
        return self.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ConstantObject) or type(self.value) is not type(other.value):
            return False
        if self.contents != other.contents:
            return False
        own_eq: Any = type(self.value).__eq__
        return own_eq is not object.__eq__ or self.value is other.value

    def __hash__(self) -> int:
        return hash(self.contents)

    def __repr__(self) -> str:
        return self.contents


class _UnknownField:
    """A field whose contents are not captured; equal to other uncaptured fields of the same
    class."""

    def __init__(self, value: Any) -> None:
        # An object that was rebuilt from a structure may be flattened again.
        is_placeholder = isinstance(value, UnreadField)
        self.value = value if is_placeholder else UnreadField(type(value).__qualname__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UnknownField) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"an object of class {self.value.class_name}"


class UnreadField:
    """Placeholder for a field of an argument whose contents are not captured; reading the
    placeholder raises an error."""

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks up optional protocol methods.
            raise AttributeError(name)
        self.refuse()

    def refuse(self, *_: object) -> NoReturn:
        raise CaptureError(
            f"`forward` reads a field of class {self.class_name} of an argument, whose contents are"
            " not captured\npass the tensors and numbers that `forward` reads as arguments"
        )

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __call__ = refuse
    __getitem__ = __setitem__ = __contains__ = __enter__ = __lt__ = __gt__ = refuse


_classes_with_tensors: set[type] = set()
"""Classes whose objects have contained tensors; their objects are never constants.

An object may be flattened again after other leaves, such as names, have replaced its tensors.
"""


def _flatten_object(value: Any) -> tuple[list[Any], Any]:
    if type(value) not in _classes_with_tensors:
        if not has_tensor(value):
            return [], _add_structure_to_cache(_ConstantObject(value))
        _classes_with_tensors.add(type(value))
    items, attributes = get_items_by_key(value), get_attributes_by_name(value)
    children = {name: item for name, item in attributes.items() if _is_child_of_structure(item)}
    constants = tuple(
        (name, _ConstantObject(item) if is_constant_field(item) else _UnknownField(item))
        for name, item in attributes.items()
        if name not in children
    )
    is_own_dict = getattr(value, "__dict__", None) is value
    structure = _ObjectStructure(tuple(items), tuple(children), constants, is_own_dict)
    # Structures without constants are written to files in full, and need no cache.
    return [*items.values(), *children.values()], _add_structure_to_cache(
        structure
    ) if constants else structure


def _flatten_object_with_keys(value: Any) -> tuple[list[Any], Any]:
    children, structure = _flatten_object(value)
    if isinstance(structure, _ConstantObject):
        return [], structure
    key_of = _pytree.MappingKey if isinstance(value, dict) else _pytree.SequenceKey
    keys = [
        *map(key_of, structure.items),
        *map(_pytree.GetAttrKey, structure.attributes),
    ]
    return list(zip(keys, children, strict=True)), structure


_cached_structures: dict[str, Any] = {}
"""Cache of pytree structures that contain constants, by `repr` of the structure.

Rank 0 broadcasts only the `repr`; each other rank looks up the structure of its own call.
"""


def _add_structure_to_cache(structure: Any) -> Any:
    structure_text = repr(structure)
    # Moved to the end, so that the structure that was used least recently is dropped.
    _cached_structures.pop(structure_text, None)
    _cached_structures[structure_text] = structure
    if len(_cached_structures) > _MAX_STRUCTURES:
        del _cached_structures[next(iter(_cached_structures))]
    return structure


def _convert_structure_to_json(structure: Any) -> Any:
    simple = isinstance(structure, _ObjectStructure) and not structure.constants
    if simple and all(isinstance(key, (str, int)) for key in structure.items):
        return [list(structure.items), list(structure.attributes), structure.is_own_dict]
    return [repr(_add_structure_to_cache(structure))]


def _convert_structure_from_json(content: Any) -> Any:
    # A single entry is the `repr` of a structure with constants.
    if len(content) > 1:
        items, attributes, is_own_dict = content
        return _ObjectStructure(tuple(items), tuple(attributes), (), is_own_dict)
    if content[0] not in _cached_structures:
        raise ValueError(
            "an argument has fields that cannot be read from a file\n"
            "pass the tensors and numbers that `forward` reads as arguments"
        )
    return _cached_structures[content[0]]


def _is_child_of_structure(value: Any) -> bool:
    # By the exact class: an `IntEnum` is an integer too, but a constant.
    cls = type(value)
    if cls in LEAF_TYPES or isinstance(value, (Tensor, np.ndarray)):
        return True
    if isinstance(value, (*CONSTANT_TYPES, nn.Module, UnreadField)):
        return False
    # Tracers replace numbers and tensors by objects of their own.
    if cls is object or cls.__module__.partition(".")[0] in _TRACER_MODULES:
        return True
    if _pytree.is_namedtuple_class(cls) or cls in _pytree.SUPPORTED_NODES:
        return True
    return find_builtin_base_class(cls) is not None and has_items_or_attributes(value)
