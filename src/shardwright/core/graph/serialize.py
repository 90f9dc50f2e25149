"""A graph as JSON that the same version of Shardwright can read back. Reading it runs no code.

Numbers, texts and None stand for themselves; everything else is a list that starts with what it is:
`["tuple", 1, 2]`, `["dtype", "float32"]`, `["operator", "aten.mean.dim"]`. A value is written where
it occurs first, and by its number from then on.

The JSON follows a line with the format's number and a SHA-256 digest of it, so that bytes that were
changed since they were written are an error and not another model.
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
from shardwright.core.graph.graph import Graph, Kind, Op, Value
from shardwright.core.torch_internals.operators import OpOverload
from shardwright.core.torch_internals.pytree import TreeSpec, treespec_dumps, treespec_loads

FORMAT = 1
"""Number of the format. A change to what is written or how needs the next number."""

_PLAIN = (type(None), bool, int, float, str)
_HEADER = re.compile(rb"shardwright graph, format (\d+), sha256 ([0-9a-f]{64})\n")


def dumps(graph: Graph, key: str = "") -> bytes:
    """The fields of the graph, without its cached properties and the annotations of modules.

    Args:
        key: part of the digest; `loads` must be called with the same.

    Raises:
        TypeError: if it has something that this format does not know, such as annotations of
            function calls.
    """
    return with_header(json.dumps(_Writer().write(replace(graph, module_tags={}))).encode(), key)


def loads(content: bytes, key: str = "") -> Graph:
    """The graph that `dumps` wrote with this `key`.

    Raises:
        ValueError: if the bytes are not what `dumps` wrote, or of another format, or refer to
            something that does not exist.
    """
    header = _HEADER.match(content)
    if header is None:
        raise ValueError("not a graph: no header" if content else "not a graph: empty")
    if int(header[1]) != FORMAT:
        raise ValueError(f"not a graph of format {FORMAT}: format {int(header[1])}")
    body = content[header.end() :]
    if header[2].decode() != _digest(key, body):
        raise ValueError("not a graph as it was written: its checksum differs")
    try:
        graph = _Reader().read(json.loads(body))
    except Exception as error:  # Malformed content can raise anything.
        raise ValueError(f"not a graph: {type(error).__name__}: {error}") from error
    if not isinstance(graph, Graph):
        raise ValueError(f"not a graph: {type(graph).__name__}")
    return graph


def with_header(body: bytes, key: str = "") -> bytes:
    """JSON after the line that `loads` verifies it with."""
    return f"shardwright graph, format {FORMAT}, sha256 {_digest(key, body)}\n".encode() + body


def _digest(key: str, body: bytes) -> str:
    return hashlib.sha256(f"{FORMAT} {key}\n".encode() + body).hexdigest()


class _Writer:
    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}

    def write(self, thing: Any) -> Any:
        if type(thing) in _PLAIN:
            return thing
        if isinstance(thing, Value) and thing in self._numbers:
            return ["value", self._numbers[thing]]
        for name, (kind, text, _) in _LEAVES.items():
            if isinstance(thing, kind):
                return [name, text(thing)]
        if isinstance(thing, (Value, Op, Graph)):
            if isinstance(thing, Value):
                self._numbers[thing] = len(self._numbers)
            parts: Iterable[Any] = (getattr(thing, each.name) for each in fields(thing))
            return [type(thing).__name__, *map(self.write, parts)]
        if isinstance(thing, dict):
            return ["dict", *(self.write(part) for item in thing.items() for part in item)]
        if isinstance(thing, list) or type(thing) in (tuple, torch.Size):
            name = "list" if isinstance(thing, list) else "tuple"
            return [name, *map(self.write, thing)]
        raise TypeError(f"a graph with a {type(thing).__name__} ({thing!r}) cannot be written")


class _Reader:
    def __init__(self) -> None:
        self._values: list[Value] = []

    def read(self, content: Any) -> Any:
        if not isinstance(content, list):
            if isinstance(content, str) and not content.isprintable():
                raise ValueError(f"{content!r} cannot be part of a program")
            return content
        name, *parts = content
        if name == "value":
            return self._values[parts[0]]
        if name in _LEAVES:
            kind, _, thing_of = _LEAVES[name]
            return _of_type(kind, thing_of(parts[0]))
        if name == "Value":
            value = Value(*map(self.read, parts))
            self._values.append(value)
            return value
        return _NODES[name](*map(self.read, parts))


def _op(*parts: Any) -> Op:
    """Its keywords become part of a program's text."""
    op = Op(*parts)
    if not all(keyword.isidentifier() for keyword in op.kwargs):
        raise ValueError(f"{op.name} has arguments that cannot be keywords: {list(op.kwargs)}")
    return op


_NODES: dict[str, Callable[..., Any]] = {
    "Op": _op,
    "Graph": Graph,
    "dict": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "list": lambda *parts: list(parts),
    "tuple": lambda *parts: parts,
}


def _operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _of_torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _tensor_text(tensor: torch.Tensor) -> str:
    written = BytesIO()
    torch.save(tensor, written)
    return base64.b64encode(written.getvalue()).decode()


def _tensor(text: str) -> Any:
    return torch.load(BytesIO(base64.b64decode(text)), weights_only=True)


_FUNCTIONS = {
    name: each
    for name, each in vars(custom_ops).items()
    if getattr(each, "__module__", "") == custom_ops.__name__
}


def _function_name(function: Callable[..., Any]) -> str:
    if _FUNCTIONS.get(function.__name__) is not function:
        raise TypeError(f"a graph with the function {function.__qualname__} cannot be written")
    return str(function.__name__)


_LEAVES: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "dtype": (torch.dtype, str, _of_torch),
    "layout": (torch.layout, str, _of_torch),
    "memory format": (torch.memory_format, str, _of_torch),
    "device": (torch.device, str, torch.device),
    "kind": (Kind, lambda kind: kind.value, Kind),
    "operator": (OpOverload, str, _operator),
    "function": (type(_operator), _function_name, _FUNCTIONS.__getitem__),
    "structure": (TreeSpec, treespec_dumps, treespec_loads),
    "tensor": (torch.Tensor, _tensor_text, _tensor),
}
"""What is written as a text: its type, its text, and what has that text."""


def _of_type(kind: Any, thing: Any) -> Any:
    if not isinstance(thing, kind):
        raise TypeError(f"{thing!r} is not a {kind.__name__}")
    return thing
