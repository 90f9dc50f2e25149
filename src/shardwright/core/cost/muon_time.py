"""Seconds that Muon takes to orthogonalize matrices in an optimizer step.

The n devices that shard a matrix process n matrices at a time (`core/runtime/muon.py`): an
all-to-all gives each device one full matrix, each device orthogonalizes it, and an all-to-all
returns the shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import chain
from math import prod

import torch

from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes, Shape
from shardwright.core.partition.communication import Communication

ITERATIONS = 5
"""Default number of Newton-Schulz iterations of `torch.optim.Muon`."""

ITERATION_OPERATORS = 3
"""Number of matrix products in a Newton-Schulz iteration."""


def orthogonalization_seconds(
    graph: Graph, communication: Communication, names: Collection[str], model: TimeModel
) -> float:
    """Return the seconds that orthogonalizing parameter updates adds to a step.

    Args:
        names: names of the parameters whose updates Muon orthogonalizes.
    """
    shapes: dict[Axes, list[Shape]] = defaultdict(list)
    for value in graph.parameters:
        if value.name in names and value.requires_grad:
            # Matrices that are sharded over the same devices are exchanged together, whatever
            # dimensions the axes shard.
            axes = tuple(sorted(chain.from_iterable(communication.initial_layouts[value].axes)))
            shapes[axes].append(value.shape)
    seconds = 0.0
    for axes, axes_shapes in shapes.items():
        # In the order in which `core/runtime/muon.py` forms batches.
        axes_shapes.sort(key=prod, reverse=True)
        devices = model.mesh.size(axes)
        for first in range(0, len(axes_shapes), devices):
            batch_shapes = axes_shapes[first : first + devices]
            # All devices wait for the largest matrix.
            seconds += _newton_schulz_seconds(batch_shapes[0], model) * ITERATIONS
            if devices > 1:
                # Updates are sent in bfloat16, in which `torch.optim.Muon` orthogonalizes.
                local = sum(map(prod, batch_shapes)) * torch.bfloat16.itemsize / devices
                # One to collect the full matrices, one to return the shards.
                seconds += 2 * model.links.seconds("all_to_all", axes, local)
    return seconds


def _newton_schulz_seconds(shape: Shape, model: TimeModel) -> float:
    """Return the seconds of a Newton-Schulz iteration: `A = X Xᵀ`, `A²` and their product with
    `X`."""
    # `torch.optim.Muon` transposes tall matrices, so that `X Xᵀ` has the smaller size.
    m, k = sorted(shape)
    dtype, device = torch.bfloat16, model.device
    wide, square = device.rate(dtype, (m, k, m)), device.rate(dtype, (m, m, m))
    # 2 m²k FLOPs each for `X Xᵀ` and the product with `X`, 2 m³ for `A²`.
    products = 4 * m * m * k / wide + 2 * m * m * m / square
    return products + ITERATION_OPERATORS * device.overhead
