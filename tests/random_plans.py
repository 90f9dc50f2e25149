"""Random plans: any cut of any operator that its rule allows, and any storage of any parameter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

import shardwright as sw
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import Plan, make_plan
from shardwright.core.rules import rule_of

Cuts = dict[str, dict[str, tuple[int, ...]]]


def random_cuts(graph: Graph, mesh: Layout, seed: int, cut: float = 0.7) -> Cuts:
    """For every operator and every axis, with probability `cut`, any factor that still divides."""
    draw = random.Random(seed)
    cuts: Cuts = {}
    for op in graph.ops:
        found = rule_of(op)
        if found is None:
            continue
        mine: dict[str, tuple[int, ...]] = {}
        axes = list(range(len(mesh.device_matrix)))
        draw.shuffle(axes)
        for axis in axes:
            size = mesh.device_matrix[axis]
            possible = [
                f
                for f in found.factors
                if found.capacity[f] % (mesh.size(mine.get(f, ())) * size) == 0
                and not found.indivisible_factor(mesh, {**mine, f: (*mine.get(f, ()), axis)})
            ]
            if possible and draw.random() < cut:
                factor = draw.choice(possible)
                mine[factor] = (*mine.get(factor, ()), axis)
        cuts[op.name] = mine
    return cuts


def random_layouts_of_layers(
    net: Any, graph: Graph, mesh: Layout, seed: int
) -> Iterator[tuple[nn.Module, Op, tuple[TensorLayout, ...]]]:
    """Each layer of a random net that is one operator, with layouts of the operator's inputs."""
    cuts = random_cuts(graph, mesh, seed)
    for name, module in net.layers.named_children():
        op = graph.by_name.get(f"layers.{name}")
        rule = rule_of(op) if op is not None else None
        inside = {o.name for o in graph.ops if o.module == f"layers.{name}"}
        if op is not None and rule is not None and inside <= {op.name, f"{op.name}.bias"}:
            yield module, op, rule.layouts(mesh, cuts[op.name])[0]


Axes = tuple[tuple[int, ...], ...]


def random_layout(shape: tuple[int, ...], mesh: Layout, draw: random.Random) -> Axes:
    """Any axes on any dimensions that divide."""
    dims: list[tuple[int, ...]] = [()] * len(shape)
    axes = list(range(len(mesh.device_matrix)))
    draw.shuffle(axes)
    for axis in axes:
        size = mesh.device_matrix[axis]
        fits = [d for d, n in enumerate(shape) if n % (mesh.size(dims[d]) * size) == 0]
        if fits and draw.random() < 0.5:
            dim = draw.choice(fits)
            dims[dim] = (*dims[dim], axis)
    return tuple(dims)


def random_storage(graph: Graph, mesh: Layout, seed: int) -> dict[str, Axes]:
    """Every parameter in any layout: also sharded where it is used whole."""
    draw = random.Random(seed)
    return {value.name: random_layout(value.shape, mesh, draw) for value in graph.parameters}


def random_outputs(graph: Graph, mesh: Layout, seed: int) -> dict[str, tuple[Axes | None, ...]]:
    """One operator in ten is told to leave its outputs in any layout."""
    draw = random.Random(seed)
    return {
        op.name: tuple(random_layout(value.shape, mesh, draw) for value in op.outputs)
        for op in graph.ops
        if draw.random() < 0.1
    }


def random_plan(graph: Graph, devices: int, seed: int) -> Plan:
    return random_plan_on(prime_mesh(devices), graph, seed)


def random_plan_on(mesh: Layout, graph: Graph, seed: int) -> Plan:
    decisions = Decisions(
        random_cuts(graph, mesh, seed),
        random_storage(graph, mesh, seed),
        random_outputs(graph, mesh, seed),
    )
    return make_plan(
        Partitioned(graph, mesh, decisions),
        mode="random",
        options={"seed": seed},
        search_seconds=0.0,
        training=True,
    )


def check_random_plan(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], graph: Graph, plan: Plan
) -> None:
    """The planned program gives the loss and gradients of one device, and sends what it says."""
    result = sw.check(net, args, kwargs, replace(plan, graph=graph))
    assert result.passes(1e-9), f"{result}\n{plan}"


def random_recompute(graph: Graph, seed: int) -> dict[str, Recompute]:
    """Runs of about seven operators, three of four of each computed again; with redistributions or
    without."""
    draw = random.Random(seed)
    found: dict[str, Recompute] = {}
    said = Recompute("run 0")
    for number, op in enumerate(graph.ops):
        if draw.random() < 0.15:
            said = Recompute(f"run {number}", draw.random() < 0.6)
        if draw.random() < 0.75:
            found[op.name] = said
    return found
