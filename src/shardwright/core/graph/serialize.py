"""Serialize a graph to JSON, for the same version of Shardwright. Loading runs no code.

Numbers, strings and None are written directly; everything else is a list that starts with its type:
`["tuple", 1, 2]`, `["dtype", "float32"]`, `["operator", "aten.mean.dim"]`. A `Value` is written in
full at its first occurrence, and as an index at later occurrences.

A header line with the format version and a SHA-256 digest precedes the JSON, so that loading a
damaged file raises an error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from io import BytesIO
from typing import Any

import torch

from shardwright.core.graph import custom_ops
from shardwright.core.graph.graph import Graph, Op, Origin, Value, WholeBatch
from shardwright.core.torch_internals.operators import OpOverload
from shardwright.core.torch_internals.pytree import TreeSpec, treespec_dumps, treespec_loads
from shardwright.errors import has_control_characters

FORMAT = 5
"""Version of the file format; increment with every change of the format."""

_JSON_TYPES = (type(None), bool, int, float, str)
"""Python types that are written as JSON values without a type name."""

_HEADER = re.compile(rb"shardwright graph, format (\d+), sha256 ([0-9a-f]{64})\n")


def dumps(graph: Graph, key: str = "") -> bytes:
    """Serialize the fields of a graph, without its cached properties and tags of modules.

    Args:
        graph: the graph.
        key: part of the digest; `loads` must be called with the same key.

    Raises:
        TypeError: if the graph contains an unsupported object, such as a tag of a function call,
            or has Python code around it.
    """
    if graph.python is not None:
        raise TypeError(
            "the graph runs captured Python code, which cannot be serialized\n"
            "capture the model on each rank"
        )
    content = json.dumps(_GraphWriter().write(replace(graph, module_tags={})))
    return with_header(content.encode(), key)


def loads(content: bytes, key: str = "") -> Graph:
    """Load a graph that `dumps` wrote with the same `key`.

    Raises:
        ValueError: if the content is damaged, of another format version, or refers to an operator
            that does not exist.
    """
    header = _HEADER.match(content)
    if header is None:
        missing = "header line" if content else "content"
        raise ValueError(f"not a serialized graph: it has no {missing}\ncapture the model again")
    # Before the digest, which depends on the format: an older file is not a damaged file.
    if int(header[1]) != FORMAT:
        raise ValueError(
            f"serialized graph of format {int(header[1])}, but this release reads {FORMAT}\n"
            "capture the model again"
        )
    body = content[header.end() :]
    if header[2].decode() != _compute_sha256(key, body):
        raise ValueError("damaged serialized graph: its checksum differs\ncapture the model again")
    try:
        graph = _GraphReader().read(json.loads(body))
    except Exception as error:  # malformed content may cause any error
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"damaged serialized graph: {problem}\ncapture the model again") from error
    if not isinstance(graph, Graph):
        raise ValueError(
            f"the serialized object is a {type(graph).__name__}, not a graph\n"
            "capture the model again"
        )
    return graph


def with_header(body: bytes, key: str = "") -> bytes:
    """Return a serialized graph with the header line that `loads` verifies."""
    return (
        f"shardwright graph, format {FORMAT}, sha256 {_compute_sha256(key, body)}\n".encode() + body
    )


def _compute_sha256(key: str, body: bytes) -> str:
    return hashlib.sha256(f"{FORMAT} {key}\n".encode() + body).hexdigest()


class _GraphWriter:
    def __init__(self) -> None:
        self._value_indices: dict[Value, int] = {}

    def write(self, obj: Any) -> Any:
        # Exact types: an `IntEnum` would be read as an int.
        if type(obj) in _JSON_TYPES:
            return obj
        if isinstance(obj, Value) and obj in self._value_indices:
            return ["value", self._value_indices[obj]]
        for name, (leaf_type, to_text, _) in _LEAF_FORMATS.items():
            if isinstance(obj, leaf_type):
                return [name, to_text(obj)]
        if isinstance(obj, (Value, Op, Graph, WholeBatch)):
            if isinstance(obj, Value):
                # Values contain no other values, so the reader numbers them in the same order.
                self._value_indices[obj] = len(self._value_indices)
            # In the order of the fields, which is that of the arguments of the constructor.
            contents: Iterable[Any] = (getattr(obj, each.name) for each in fields(obj))
            return [type(obj).__name__, *map(self.write, contents)]
        if isinstance(obj, dict):
            # A flat list, because the keys of JSON objects are strings.
            return ["dict", *(self.write(entry) for item in obj.items() for entry in item)]
        # Only exact types: a named tuple would be read as a tuple.
        if isinstance(obj, list) or type(obj) in (tuple, torch.Size):
            name = "list" if isinstance(obj, list) else "tuple"
            return [name, *map(self.write, obj)]
        raise TypeError(
            f"a graph that contains a {type(obj).__name__} ({obj!r}) cannot be serialized\n"
            "capture the model on each rank"
        )


class _GraphReader:
    def __init__(self) -> None:
        self._values: list[Value] = []

    def read(self, content: Any) -> Any:
        if not isinstance(content, list):
            # Strings become part of a program's text, to which a line break could add a statement.
            if isinstance(content, str) and has_control_characters(content):
                raise ValueError(
                    f"the graph contains {content!r}, a string with control characters\n"
                    "remove them from the model, and capture it again"
                )
            return content
        name, *entries = content
        if name == "value":
            return self._values[entries[0]]
        if name in _LEAF_FORMATS:
            leaf_type, _, from_text = _LEAF_FORMATS[name]
            # A damaged name may be that of any attribute of torch.
            return _require_leaf_type(leaf_type, from_text(entries[0]))
        if name == "Value":
            value = Value(*map(self.read, entries))
            self._values.append(value)
            return value
        return _CONSTRUCTORS[name](*map(self.read, entries))


def _make_checked_op(*entries: Any) -> Op:
    """Construct an `Op` from a file; its keywords appear in generated source, so they are checked.

    Raises:
        ValueError: if a keyword is not an identifier.
    """
    op = Op(*entries)
    if not all(keyword.isidentifier() for keyword in op.kwargs):
        raise ValueError(
            f"operator {op.name} has keywords that are not identifiers: {list(op.kwargs)}\n"
            "capture the model again"
        )
    return op


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "Op": _make_checked_op,
    "Graph": Graph,
    "WholeBatch": WholeBatch,
    "dict": lambda *entries: dict(zip(entries[::2], entries[1::2], strict=True)),
    "list": lambda *entries: list(entries),
    "tuple": lambda *entries: entries,
}


def _find_operator(name: str) -> Any:
    # `loads` reports a name that has not three parts as damage.
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _get_torch_constant(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _encode_tensor(tensor: torch.Tensor) -> str:
    buffer = BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _decode_tensor(text: str) -> Any:
    # weights_only: a pickle could otherwise run code, and this file comes from a cache on disk.
    return torch.load(BytesIO(base64.b64decode(text)), weights_only=True)


# Only functions that are defined in `custom_ops`, not those that it imports.
_FUNCTIONS_BY_NAME = {
    name: each
    for name, each in vars(custom_ops).items()
    if getattr(each, "__module__", "") == custom_ops.__name__
}


def _get_importable_name(function: Callable[..., Any]) -> str:
    if _FUNCTIONS_BY_NAME.get(function.__name__) is not function:
        raise TypeError(
            f"a graph that calls {function.__qualname__} cannot be serialized\n"
            "capture the model on each rank"
        )
    return str(function.__name__)


_LEAF_FORMATS: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "dtype": (torch.dtype, str, _get_torch_constant),
    "layout": (torch.layout, str, _get_torch_constant),
    "memory format": (torch.memory_format, str, _get_torch_constant),
    "device": (torch.device, str, torch.device),
    "kind": (Origin, lambda origin: origin.value, Origin),
    "operator": (OpOverload, str, _find_operator),
    # `types.FunctionType`, the type of functions that are defined in Python.
    "function": (type(_find_operator), _get_importable_name, _FUNCTIONS_BY_NAME.__getitem__),
    "structure": (TreeSpec, treespec_dumps, treespec_loads),
    "tensor": (torch.Tensor, _encode_tensor, _decode_tensor),
}
"""Types that are written as strings, by name in the file: (type, encoder, decoder)."""


def _require_leaf_type(leaf_type: Any, obj: Any) -> Any:
    if not isinstance(obj, leaf_type):
        raise TypeError(
            f"damaged graph: it contains {obj!r} in place of a {leaf_type.__name__}\n"
            "capture the model again"
        )
    return obj
