"""Overlap of collectives with adjacent matrix products, where kernels pipeline the two.

Transformer Engine divides the product that follows an all-gather, or precedes a reduce-scatter,
into one part per device, and sends the parts round a ring while it computes others ("userbuffers";
Wang et al., "Overlap communication with dependent computation via decomposition in large deep
learning models", ASPLOS 2023). Only the first or last of p parts remains exposed.
"""

from __future__ import annotations

import torch

from shardwright.core.graph.graph import Graph, Op, Origin
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.overlap import Overlap
from shardwright.core.partition.transfer import Transfer

aten = torch.ops.aten

PIPELINED_OPERATIONS = ("all_gather", "reduce_scatter")
"""Collectives that kernels pipeline with an adjacent matrix product."""


def product_overlaps(graph: Graph, communication: Communication) -> dict[Transfer, Overlap]:
    """Return, for each all-gather and reduce-scatter of an activation, the matrix products right
    before and after it, which kernels can pipeline with the collective.

    Args:
        communication: communication of `graph`.
    """
    products: dict[Transfer, list[Op]] = {}
    for op in filter(_is_linear_layer, graph.ops):
        # Input 0 of a linear layer is its activation, which the last step of a route produces.
        for transfer in communication.routes[op.name, 0][-1:]:
            products.setdefault(transfer, []).append(op)
    result = {}
    for transfer in communication.transfers:
        # Gathers of parameters start in buckets ahead of their operators instead (`step_time.py`).
        if (
            transfer.value.origin is Origin.PARAMETER
            or transfer.step.operation not in PIPELINED_OPERATIONS
        ):
            continue
        producer = graph.producer.get(transfer.value)
        adjacent_products = products.get(transfer, [])
        # Only the first step of a route reads the result of the producer itself.
        if producer is not None and transfer.previous is None and _is_linear_layer(producer):
            adjacent_products = [producer, *adjacent_products]
        if adjacent_products:
            result[transfer] = Overlap(
                tuple(adjacent_products), (), 1 - 1 / transfer.step.group_size
            )
    return result


def _is_linear_layer(op: Op) -> bool:
    return op.target is aten.linear.default
