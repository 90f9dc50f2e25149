"""Reading and adding nodes of the traced `torch.fx` graph, with shapes and origins kept right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import fx

from shardwright.torch_internals import pytree
from shardwright.torch_internals.operators import schema_of

_ORIGIN = ("nn_module_stack", "stack_trace", "no_grad", "custom")


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor that stands for what the node computes."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), node.format_node()
    return value


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def node_shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(tensor(node).shape)


def evaluate(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs an operator on the fake tensors of its arguments."""
    fake_args, fake_kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
    leaves = pytree.tree_leaves((fake_args, fake_kwargs))
    modes = [mode for leaf in leaves if (mode := getattr(leaf, "fake_mode", None)) is not None]
    with torch.no_grad(), modes[0]:
        return target(*fake_args, **fake_kwargs)


def call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Adds a node at the graph's insertion point, with module, source line and tag of `like`."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta.update({key: like.meta[key] for key in _ORIGIN if key in like.meta})
    node.meta["val"] = evaluate(target, args, kwargs or {})
    return node


def insert(
    before: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    like: fx.Node | None = None,
) -> fx.Node:
    """Adds a node before another; its module and source are those of `like` (or of `before`)."""
    with before.graph.inserting_before(before):
        return call(before.graph, target, args, kwargs, like=before if like is None else like)


def replace(node: fx.Node, new: fx.Node) -> None:
    """Makes every user of a node read another one and removes the node."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def module_path(node: fx.Node) -> tuple[str, int]:
    """Path of the module the operator was called in, and the number of that call, from 1."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    key, (path, _) = list(stack.items())[-1]
    _, _, repeated = key.partition("@")
    return str(path).partition("@")[0], int(repeated or 0) + 1


def module_calls(node: fx.Node) -> tuple[str, ...]:
    """The calls of modules that the operator was made in, the outermost first: `""`, `layers.0`,
    `layers.0.mlp`; the second call of a module is `path@2`."""
    calls = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {"": ("", None)}).items():
        _, _, repeated = key.partition("@")
        name = str(path).partition("@")[0]
        calls.append(f"{name}@{int(repeated) + 1}" if repeated else name)
    return tuple(calls)


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen operator by name, defaults included."""
    schema = schema_of(node.target)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            found[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found
