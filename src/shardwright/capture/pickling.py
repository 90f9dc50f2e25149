"""A graph as bytes that the same version of Shardwright can read back.

Unpickling executes code in the bytes, so read only bytes that this user has written. PyTorch
operators are pickled by name.
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
    """The fields of the graph, without its cached properties."""
    written = BytesIO()
    _Pickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(graph)
    return written.getvalue()


def loads(content: bytes) -> Graph:
    """The graph that `dumps` wrote.

    Raises:
        ValueError: if the bytes are corrupt, or refer to something that no longer exists.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own tree structures
            graph = pickle.loads(content)
    except Exception as error:  # Corrupt bytes can raise anything.
        raise ValueError(f"not a graph: {type(error).__name__}: {error}") from error
    if not isinstance(graph, Graph):
        raise ValueError(f"not a graph: {type(graph).__name__}")
    return graph


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            return _operator, (value.namespace, operator_name(value), overload_name(value))
        if isinstance(value, (Graph, Op)):
            return type(value), tuple(getattr(value, each.name) for each in fields(value))
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> OpOverload:
    overload_op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(overload_op, OpOverload)
    return overload_op
