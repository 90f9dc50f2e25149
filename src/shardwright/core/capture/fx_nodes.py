"""Access to nodes of a traced `torch.fx` graph, and insertion with correct shapes and origins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import fx

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of

ORIGIN = ("nn_module_stack", "stack_trace", "no_grad", "custom")
"""Metadata keys of the origin of a node: module, source line, gradient mode and tags."""


def tensor(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of the node's result."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), node.format_node()
    return value


def restore_nodes(module: fx.GraphModule) -> None:
    """Correct two defects in graphs and sub-graphs of `torch.export`.

    After `torch.export` rewrites one of two equal arguments of a node, the node is missing in
    `users` of the other argument. Operators whose error the user's code caught are still in the
    graph.
    """
    for submodule in module.modules():
        nodes = list(submodule.graph.nodes) if isinstance(submodule, fx.GraphModule) else []
        for node in nodes:
            for read in node.all_input_nodes:
                read.users.setdefault(node)
        # In reverse, so that operators read only by erased ones are erased too.
        for node in reversed(nodes):
            # An operator that raised an error has no value.
            if node.users or node.meta.get("val") is not None:
                continue
            if isinstance(node.target, OpOverload) and is_functional(node.target):
                node.graph.erase_node(node)


def is_functional(target: OpOverload) -> bool:
    """Whether an operator returns results and mutates no argument."""
    return not schema_of(target).is_mutable and bool(schema_of(target).returns)


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    """Whether an argument of a node is a node whose value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def node_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor."""
    return tuple(tensor(node).shape)


def evaluate(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operator on the fake tensors of its arguments."""
    fake_args, fake_kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
    leaves = pytree.tree_leaves((fake_args, fake_kwargs))
    modes = [mode for leaf in leaves if (mode := getattr(leaf, "fake_mode", None)) is not None]
    # Without autograd: nodes record shapes and dtypes only.
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
    """Add a node at the insertion point, with the module, source line and tags of `like`."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta.update({key: like.meta[key] for key in ORIGIN if key in like.meta})
    node.meta["val"] = evaluate(target, args, kwargs or {})
    return node


def insert(
    before: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    like: fx.Node | None = None,
) -> fx.Node:
    """Add a node before another, with the origin of `like` (by default of `before`)."""
    with before.graph.inserting_before(before):
        return call(before.graph, target, args, kwargs, like=before if like is None else like)


def replace(node: fx.Node, new: fx.Node) -> None:
    """Redirect all users of a node to `new`, and erase the node."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def module_path(node: fx.Node) -> tuple[str, int]:
    """Return the path of the module that calls the operator, and the index of its call, from 1."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    key, (path, _) = list(stack.items())[-1]
    # `torch.export` marks the second call of a module by `@1`.
    _, _, repeated = key.partition("@")
    return str(path).partition("@")[0], int(repeated or 0) + 1


def module_calls(node: fx.Node) -> tuple[str, ...]:
    """Return the module calls that contain the operator, outermost first.

    Example: `""`, `layers.0`, `layers.0.mlp`; the second call of a module is `path@2`.
    """
    calls = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {"": ("", None)}).items():
        _, _, repeated = key.partition("@")
        name = str(path).partition("@")[0]
        calls.append(f"{name}@{int(repeated) + 1}" if repeated else name)
    return tuple(calls)


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an ATen operator by name, including defaults."""
    schema = schema_of(node.target)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            arguments[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        else:
            arguments[argument.name] = (
                argument.default_value if argument.has_default_value() else None
            )
    return arguments


def remove_dead(graph: fx.Graph) -> None:
    """Remove operators whose results reach neither an output nor a buffer update, in place."""
    # In reverse, so that operators read only by unused ones are unused too.
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
