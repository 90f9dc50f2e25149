"""Calls that give each rank its own part of the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.decided import CutAxes
from shardwright.graph.graph import Graph, Value
from shardwright.layout import Layout, TensorLayout


def whole_leaves(
    graph: Graph, mesh: Layout, arrivals: Mapping[str, CutAxes], leaves: Sequence[Any]
) -> list[Any]:
    """The leaves of a call as the model is to see them: in place of parts of inputs that arrive
    cut, tensors of the whole's shape without data."""
    if not arrivals or len(leaves) != len(graph.inputs):
        return list(leaves)
    found = []
    for value, leaf in zip(graph.inputs, leaves, strict=True):
        cut = isinstance(value, Value) and value.name in arrivals
        if cut and isinstance(leaf, Tensor) and leaf.ndim == len(value.shape):
            counts = TensorLayout(mesh, arrivals[value.name]).shard_counts
            shape = [size * count for size, count in zip(leaf.shape, counts, strict=True)]
            leaf = torch.empty(shape, dtype=leaf.dtype, device="meta")
        found.append(leaf)
    return found
