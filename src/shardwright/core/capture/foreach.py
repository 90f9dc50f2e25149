"""`torch._foreach_*`, which does the same to each tensor of a list, as one operator for each."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.fx_nodes import insert, node_arguments, replace
from shardwright.core.torch_internals.operators import OpOverload, operator_name, schema_of

_PREFIX = "_foreach_"
_WITH_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""The operators of one tensor that take a number or a tensor, as these do of many."""


def expand_foreach(graph: fx.Graph) -> None:
    """Replaces the operators in place, so that each tensor keeps its own layout. What has no
    operator for one tensor stays as it is."""
    for node in list(graph.nodes):
        target = node.target
        if isinstance(target, OpOverload) and operator_name(target).startswith(_PREFIX):
            calls = _calls(node)
            if calls is not None:
                _expand(node, [insert(node, *each) for each in calls])


def _expand(node: fx.Node, results: list[fx.Node]) -> None:
    for getitem in list(node.users):
        assert getitem.target is operator.getitem
        replace(getitem, results[getitem.args[1]])  # type: ignore[index]
    node.graph.erase_node(node)


_Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def _calls(node: fx.Node) -> list[_Call] | None:
    """One call for each tensor, in the order in which they follow each other."""
    given = {
        a.name: (str(a.type), node_arguments(node)[a.name])
        for a in schema_of(node.target).arguments  # type: ignore[arg-type]
        if not (a.has_default_value() and node_arguments(node)[a.name] == a.default_value)
    }
    kinds = [kind.removeprefix("List[").removesuffix("]") for kind, _ in given.values()]
    target = _of_one_tensor(node.target, kinds)  # type: ignore[arg-type]
    if target is None:
        return None
    count = next(len(value) for kind, value in given.values() if kind == "List[Tensor]")
    calls = []
    for number in range(count):
        values = [v[number] if kind.startswith("List[") else v for kind, v in given.values()]
        named = list(zip(schema_of(target).arguments, values, strict=False))
        args = tuple(value for argument, value in named if not argument.kwarg_only)
        kwargs = {argument.name: value for argument, value in named if argument.kwarg_only}
        calls.append((target, args, kwargs))
    return calls


def _of_one_tensor(target: OpOverload, kinds: list[str]) -> OpOverload | None:
    """`mul_.Scalar` for `_foreach_mul_.Scalar`, if it takes arguments of these types."""
    name = operator_name(target).removeprefix(_PREFIX)
    base = name.removesuffix("_")
    packet = getattr(torch.ops.aten, _WITH_NUMBERS.get(base, base) + name[len(base) :], None)
    for overload in packet.overloads() if packet is not None else ():
        found: OpOverload = getattr(packet, overload)
        arguments, results = schema_of(found).arguments, schema_of(found).returns
        one = [str(argument.type) for argument in arguments[: len(kinds)]] == kinds
        optional = all(argument.has_default_value() for argument in arguments[len(kinds) :])
        if one and optional and [str(result.type) for result in results] == ["Tensor"]:
            return found
    return None
