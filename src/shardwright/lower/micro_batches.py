"""Pieces of a batch that follow each other through a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwright.errors import PlanError
from shardwright.pipelining import Pipelining


def of_the_batch(leaves: Sequence[Any]) -> list[bool]:
    """Which leaves of a call are cut into micro-batches: the tensors whose dimension 0 is as long
    as that of the first tensor that has dimensions. Others are given whole to each micro-batch."""
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    return [
        isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == sizes[0] for leaf in leaves
    ]


def micro_batch(leaves: Sequence[Any], number: int, count: int) -> list[Any]:
    """The leaves of a call for one of `count` equal pieces of the batch, as views.

    Raises:
        PlanError: if the batch cannot be cut into so many equal pieces.
    """
    result = []
    for leaf, cut in zip(leaves, of_the_batch(leaves), strict=True):
        if cut:
            rows, rest = divmod(leaf.shape[0], count)
            if rest:
                raise PlanError(
                    f"a batch of {leaf.shape[0]} rows cannot be cut into {count} equal"
                    f" micro-batches; valid numbers are {_divisors(leaf.shape[0])}"
                )
            leaf = leaf[number * rows : (number + 1) * rows]
        result.append(leaf)
    return result


def most_micro_batches(leaves: Sequence[Any], pipeline: Pipelining) -> int:
    """Into how many pieces a batch is cut: as planned, or for a batch of another size the most that
    divide it and that the schedule can run."""
    rows = next(
        (leaf.shape[0] for leaf, cut in zip(leaves, of_the_batch(leaves), strict=True) if cut), 1
    )
    return next(
        count
        for count in range(pipeline.micro_batches, 0, -1)
        if rows % count == 0 and pipeline.can_run(count)
    )


def _divisors(number: int) -> str:
    found = [n for n in range(1, number + 1) if number % n == 0]
    shown = [str(n) for n in found[:12]] + (["…"] if len(found) > 12 else [])
    return ", ".join(shown)
