"""Attention along the sequence whose keys and values go round a ring, where they were gathered.

What is predicted to be fastest mostly gathers them, as a ring sends more. But it is a ring that
holds few of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from shardwright.graph.graph import Graph
from shardwright.layout.layout import Layout
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts


def ring_cuts(
    graph: Graph, mesh: Layout, cuts: Mapping[str, Cuts], pinned: Container[str]
) -> Mapping[str, Cuts] | None:
    """`cuts` with operators cut by the factor that cuts further inputs too, where there is one;
    None if there is nothing to change."""
    changed: dict[str, Cuts] = {}
    for op in graph.ops:
        rule, mine = rule_of(op), cuts.get(op.name, {})
        if rule is None or op.name in pinned:
            continue
        for factor, other in rule.joined.items():
            axes = mine.get(other)
            if axes and rule.capacity[factor] % mesh.size(axes) == 0:
                renamed = {factor if f == other else f: each for f, each in mine.items()}
                changed[op.name] = renamed
    return {**cuts, **changed} if changed else None
