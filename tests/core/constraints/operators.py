"""Operators by themselves, for tests of strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.constraints.parse import StrategyParser
from shardwright.core.graph.graph import Op, Value
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh

aten = torch.ops.aten


def of(*shape: int) -> torch.Tensor:
    """A tensor of which only the shape matters."""
    return torch.empty(shape, device="meta")


def op_of(target: Any, *args: Any) -> Op:
    """The operator `fc` on tensors `x`, `w`, `v`."""
    results = target(*args)
    results = results if isinstance(results, (tuple, list)) else [results]
    names = iter("xwv")
    values = tuple(
        Value(next(names), tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else a
        for a in args
    )
    outputs = tuple(Value(f"y{i}", tuple(r.shape), r.dtype) for i, r in enumerate(results))
    return Op("fc", target, values, {}, outputs)


def linear(rows: int = 16, k: int = 32, j: int = 64) -> Op:
    """`x [rows, k]`, `w [j, k]`; rule `b k, j k -> b j`."""
    return op_of(aten.linear.default, of(rows, k), of(j, k))


def reading(
    op: Op, inputs: Any, outputs: Any = None, mesh: Layout | None = None, devices: int = 8
) -> StrategyParser:
    return StrategyParser(op, OperatorStrategy(inputs, outputs), mesh or prime_mesh(devices))


def cuts_of(op: Op, *inputs: Any, devices: int = 8, mesh: Layout | None = None) -> Any:
    return reading(op, inputs, None, mesh, devices).cuts()


def named(mesh: Layout, cuts: Any) -> dict[str, str]:
    """Cuts with the names of the axes: `{"b": "a", "k": "bc"}`."""

    def text(axes: Sequence[int]) -> str:
        return "".join(mesh.alias_names[a] for a in axes)

    return {factor: text(axes) for factor, axes in cuts.items()}
