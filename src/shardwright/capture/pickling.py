"""A graph as bytes that this version of Shardwright reads back.

Pickle runs code that stands in the bytes: read only what this user has written. Operators of
PyTorch are written by their names.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import fields
from io import BytesIO
from typing import Any

import torch

from shardwright.graph.graph import Graph, Op
from shardwright.torch_internals.operators import OpOverload, operator_name, overload_name


def dumps(graph: Graph) -> bytes:
    """The graph without what follows from it."""
    written = BytesIO()
    _Pickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(graph)
    return written.getvalue()


def loads(content: bytes) -> Graph:
    """The graph that `dumps` wrote.

    Raises:
        ValueError: if the bytes are damaged, or name what is not there any more.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own tree structures
            found = pickle.loads(content)
    except Exception as error:  # Damaged bytes raise whatever the code that they name raises.
        raise ValueError(f"not a graph: {type(error).__name__}: {error}") from error
    if not isinstance(found, Graph):
        raise ValueError(f"not a graph: {type(found).__name__}")
    return found


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, OpOverload):
            return _operator, (thing.namespace, operator_name(thing), overload_name(thing))
        if isinstance(thing, (Graph, Op)):
            return type(thing), tuple(getattr(thing, each.name) for each in fields(thing))
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> OpOverload:
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(found, OpOverload)
    return found
