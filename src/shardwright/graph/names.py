"""Names operators after the modules they were called in."""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import fx

from shardwright.graph.functional import batch_norm_train, instance_norm_train
from shardwright.graph.nodes import module_path

aten = torch.ops.aten

_MAIN = (
    aten.linear.default,
    aten.matmul.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.embedding.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.batch_norm.default,
    batch_norm_train,
    instance_norm_train,
)
"""What gives a leaf module its name if it has several operators, the first in this order."""


def operator_name(target: Any) -> str:
    """`linear` of `aten.linear.default`, the name of a Python function."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1].strip("_")
    return str(getattr(target, "__name__", target))


def name_operators(graph: fx.Graph, leaves: frozenset[str]) -> dict[fx.Node, str]:
    """A unique name for every operator of the graph (list elements are no operators).

    The main operator of a module without children has the module's path as its name, others have
    `path.operator`, `path.operator_1`, …; the second call of a module is `path@2`; an added bias is
    `<name of the operator>.bias`.
    """
    calls: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            calls[call_path(node)].append(node)
    names: dict[fx.Node, str] = {}
    seen: Counter[str] = Counter()
    for path, nodes in calls.items():
        main = _main(nodes) if path and plain_path(path) in leaves else None
        for node in nodes:
            product = node.meta.get("bias_of")
            if node is main:
                wanted = path
            elif product in names:
                wanted = f"{names[product]}.bias"
            else:
                wanted = ".".join(filter(None, (path, operator_name(node.target))))
            names[node] = wanted if not seen[wanted] else f"{wanted}_{seen[wanted]}"
            while seen[names[node]] and names[node] != wanted:
                seen[wanted] += 1
                names[node] = f"{wanted}_{seen[wanted]}"
            seen[wanted] += 1
            if names[node] != wanted:
                seen[names[node]] += 1
    return names


def call_path(node: fx.Node) -> str:
    """`layers.0@2.act` for an operator in the second call of `layers.0`."""
    return re.sub(r"@(\d+)", lambda m: f"@{int(m[1]) + 1}", module_path(node))


def plain_path(path: str) -> str:
    """The path without the numbers of the calls."""
    return re.sub(r"@\d+", "", path)


def _main(nodes: list[fx.Node]) -> fx.Node | None:
    own = [node for node in nodes if "bias_of" not in node.meta]
    for target in _MAIN:
        for node in own:
            if node.target is target:
                return node
    return own[-1] if own else None
