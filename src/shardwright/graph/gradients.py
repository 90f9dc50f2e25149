"""Which nodes of the traced graph a gradient of the loss flows into."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from shardwright.graph.nodes import replace

aten = torch.ops.aten

_CONSTANT = frozenset(
    {
        "detach",
        "ones_like",
        "zeros_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_ones",
        "new_zeros",
        "new_full",
        "new_empty",
        "normal_functional",
        "uniform",
        "exponential",
    }
)
"""Operators that return a floating tensor through which no gradient passes to their input."""

_DIFFERENTIABLE_RESULTS = {"batch_norm_train": 1, "instance_norm_train": 1}


def reached_by_gradients(
    graph: fx.Graph, sources: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> frozenset[fx.Node]:
    """The floating nodes on a differentiable path from `sources` to one of the `outputs`."""
    return depending_on(graph, sources) & _leading_to(graph, outputs)


def drop_needless_detach(graph: fx.Graph, sources: Iterable[fx.Node]) -> None:
    """Removes every `aten.detach` that no gradient would pass anyway."""
    differentiable = depending_on(graph, sources, no_grad=True)
    for node in list(graph.nodes):
        if node.target is aten.detach.default and node.args[0] not in differentiable:
            replace(node, node.args[0])


def depending_on(
    graph: fx.Graph, sources: Iterable[fx.Node], no_grad: bool = False
) -> frozenset[fx.Node]:
    """The floating nodes that depend differentiably on one of the `sources`.

    Args:
        no_grad: whether to count dependencies through no-grad regions, which autograd would see in
            the inlined graph.
    """
    found = set(sources)
    for node in graph.nodes:
        inputs = (n for n in node.all_input_nodes if n in found)
        if node.op == "call_function" and any(_passes(node, n, no_grad) for n in inputs):
            found.add(node)
    return frozenset(found)


def _leading_to(graph: fx.Graph, outputs: Iterable[fx.Node]) -> frozenset[fx.Node]:
    found = set(outputs)
    for node in reversed(graph.nodes):
        if node in found and node.op == "call_function":
            found.update(n for n in node.all_input_nodes if _passes(node, n))
    return frozenset(found)


def _passes(node: fx.Node, source: fx.Node, no_grad: bool = False) -> bool:
    """Whether a gradient passes from a node to one of its inputs."""
    return (
        _name(node) not in _CONSTANT
        and (no_grad or not node.meta.get("no_grad"))
        and _is_floating(node)
        and _is_floating(source)
        and not _is_statistic(node)
    )


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return str(getattr(node.target, "__name__", node.target))


def _is_statistic(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    whole, index = node.args
    assert isinstance(whole, fx.Node) and isinstance(index, int)
    return index >= _DIFFERENTIABLE_RESULTS.get(_name(whole), index + 1)


def _is_floating(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(
        isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values
    )
