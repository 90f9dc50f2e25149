"""Conversion of a canonical `torch.fx` graph to a `Graph` of named operators and values."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from shardwright.core.capture.annotations import tags_of
from shardwright.core.capture.autocast import ON_CPU, Autocast
from shardwright.core.capture.fx_nodes import (
    is_tensor,
    module_calls,
    module_path,
    node_shape,
    tensor,
)
from shardwright.core.capture.global_variables import reads_gradient_mode
from shardwright.core.capture.naming import name_operators, source_of
from shardwright.core.capture.signature import (
    Signature,
    differentiable_from,
    nodes_with_gradients,
    placeholders,
    results,
)
from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError


@dataclass(frozen=True)
class CapturedCall:
    """Captured call: module, arguments, and the autocast and gradient modes around the call.

    Args:
        module: the captured module.
        args, kwargs: arguments of the call.
        autocast: autocast state around the call.
        gradients: whether gradients are enabled around the call; always True for a module that does
            not read `torch.is_grad_enabled()`.
        original: the module of which `module` is a copy, to which user code outside of the module
            may refer; None if `module` is not a copy.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast = ON_CPU
    gradients: bool = True
    original: nn.Module | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: Autocast,
        original: nn.Module | None = None,
    ) -> CapturedCall:
        """Return this call with the current gradient mode."""
        gradients = torch.is_grad_enabled() or not reads_gradient_mode(module)
        return cls(module, args, kwargs, autocast, gradients, original)


def build_graph(
    call: CapturedCall, graph: fx.Graph, signature: Signature, sources: Sequence[fx.Node]
) -> Graph:
    """Return the `Graph` of a canonical `torch.fx` graph.

    Args:
        call: the captured module and arguments.
        graph: the canonical graph.
        signature: placeholders of the graph: parameters, buffers, constants and inputs.
        sources: the placeholders that require a gradient.

    Raises:
        CaptureError: if a tensor is sparse.
    """
    leaves, in_spec = pytree.tree_flatten((call.args, call.kwargs))
    nodes = placeholders(graph)
    outputs, updates = results(graph)
    tensors = [leaf for leaf in outputs if is_tensor(leaf)]
    # After the leaves of the result come tensors that `forward` leaves in Python objects.
    losses = _find_losses(graph, signature, sources, outputs[: signature.out_spec.num_leaves])
    # Without a loss the caller computes one, and may differentiate every output.
    trained = nodes_with_gradients(graph, sources, losses or tensors)
    values = _ValueTable(signature, trained, nodes_with_gradients(graph, sources, tensors))

    # Dtypes of storage, which differ from those of the graph for parameters that are cast.
    stored = {name: p.dtype for name, p in call.module.named_parameters(remove_duplicate=False)}

    def used(named: dict[str, str], origin: Origin) -> tuple[Value, ...]:
        # Unused parameters and buffers have no value in the graph.
        used_nodes = [
            (name, node) for name, node in named.items() if nodes[node].users or node in updates
        ]
        return tuple(
            values.add(nodes[node], name, origin, stored.get(name)) for name, node in used_nodes
        )

    parameters = used(signature.parameters, Origin.PARAMETER)
    buffers = used(signature.buffers, Origin.BUFFER)
    constants = {
        values.add(nodes[name], f"constant_{index}", Origin.CONSTANT): constant
        for index, (name, constant) in enumerate(signature.constants.items())
        if nodes[name].users
    }
    inputs = tuple(
        values.add(nodes[node], name, Origin.INPUT, leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for node, name, leaf in zip(signature.inputs, input_names(call), leaves, strict=True)
    )
    modules = call.module.named_modules()
    childless = frozenset(path for path, module in modules if next(module.children(), None) is None)
    names = name_operators(graph, childless)
    ops = tuple(values.operator(n, names[n]) for n in graph.nodes if n in names)
    return Graph(
        ops=ops,
        inputs=inputs,
        in_spec=in_spec,
        outputs=tuple(values.of(leaf) for leaf in outputs),
        out_spec=signature.out_spec,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        updates=tuple(
            (values.of(nodes[name]), values.of(new))
            for name, new in updates.items()
            if name in (*signature.buffers.values(), *signature.parameters.values())
        ),
        loss=values.of(losses[0]) if losses else None,
        other_losses=tuple(values.of(node) for node in losses[1:]),
        frozen=frozen_parameters(call.module),
    )


def frozen_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that do not require a gradient."""
    return tuple(name for name, p in module.named_parameters() if not p.requires_grad)


def _find_losses(
    graph: fx.Graph, signature: Signature, sources: Sequence[fx.Node], outputs: Sequence[Any]
) -> list[fx.Node]:
    """Return the loss, followed by other scalars that a backward pass may start from.

    The loss is the differentiable scalar that the model returns as `loss` in a dict, named tuple or
    dataclass; then there are no others. Otherwise the loss is the first differentiable scalar, and
    the others are scalars that are neither added to the loss nor computed from the loss alone.
    """
    differentiable = differentiable_from(graph, sources)
    leaves = (leaf for leaf in outputs if is_tensor(leaf) and node_shape(leaf) == ())
    # One scalar may be returned twice.
    scalars = list(dict.fromkeys(leaf for leaf in leaves if leaf in differentiable))
    fakes = [tensor(leaf) if is_tensor(leaf) else leaf for leaf in outputs]
    result = pytree.tree_unflatten(fakes, signature.out_spec)
    # The fake tensors themselves are in `result`, so that the loss is found by identity.
    named = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if not scalars:
        return []
    first, *others = [*(n for n in scalars if tensor(n) is named), *scalars]
    if tensor(first) is named:
        return [first]
    terms = nodes_with_gradients(graph, sources, [first])
    beside = differentiable_from(graph, sources, without=first)
    return [first, *(node for node in others if node not in terms and node in beside)]


class _ValueTable:
    """Values of the nodes of a graph, each with a unique name."""

    def __init__(
        self,
        signature: Signature,
        requires_grad: frozenset[fx.Node],
        differentiable: frozenset[fx.Node],
    ) -> None:
        self.requires_grad = requires_grad
        self.differentiable = differentiable
        self.values: dict[fx.Node, Value] = {}
        # Reserved for parameters and buffers, whose names are the user's; others get a suffix.
        self.names: set[str] = {*signature.parameters, *signature.buffers}

    def add(
        self, node: fx.Node, name: str, origin: Origin, outer_dtype: torch.dtype | None = None
    ) -> Value:
        if origin not in (Origin.PARAMETER, Origin.BUFFER):
            name = self._make_unique_name(name, "input" if origin is Origin.INPUT else "output")
        fake, requires_grad = tensor(node), node in self.requires_grad
        requires_other_grad = node in self.differentiable and not requires_grad
        shape, dtype = tuple(fake.shape), fake.dtype
        if fake.layout is not torch.strided:
            raise CaptureError(
                f"{source_of(node) or name}: a sparse tensor ({fake.layout}) cannot be sharded\n"
                "use a dense one: `x.to_dense()`"
            )
        value = Value(name, shape, dtype, origin, requires_grad, requires_other_grad)
        if outer_dtype not in (None, value.dtype):
            value = replace(value, outer_dtype=outer_dtype)
        self.values[node] = value
        return value

    def _make_unique_name(self, name: str, suffix: str) -> str:
        while name in self.names:
            name = f"{name}.{suffix}"
        self.names.add(name)
        return name

    def of(self, leaf: Any) -> Any:
        """Return the value of a node; return any other object unchanged."""
        return self.values[leaf] if isinstance(leaf, fx.Node) else leaf

    def operator(self, node: fx.Node, name: str) -> Op:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
        args, kwargs = to_builtin_containers(args), to_builtin_containers(kwargs)
        path, _ = module_path(node)
        results = self._add_results(node, name)
        target: Any = node.target
        calls, tags = module_calls(node), tags_of(node)
        source, flattened = source_of(node), node.meta.get("flattened", 1)
        return Op(name, target, args, kwargs, results, path, source, tags, calls, flattened)

    def _add_results(self, node: fx.Node, name: str) -> tuple[Value, ...]:
        if is_tensor(node):
            return (self.add(node, name, Origin.ACTIVATION),)
        getitems = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        # One value per tensor result, even if no operator reads it.
        results = []
        for index, fake in enumerate(node.meta["val"]):
            if not isinstance(fake, torch.Tensor):
                continue
            label = f"{name}[{index}]"
            if index in getitems:
                results.append(self.add(getitems[index], label, Origin.ACTIVATION))
            else:
                unread = self._make_unique_name(label, "output")
                results.append(Value(unread, tuple(fake.shape), fake.dtype))
        return tuple(results)


def to_builtin_containers(arguments: Any) -> Any:
    """Replace the immutable lists and dicts of `torch.fx`, which pytree does not support."""
    if isinstance(arguments, tuple):
        return tuple(to_builtin_containers(a) for a in arguments)
    if isinstance(arguments, list):
        return [to_builtin_containers(a) for a in arguments]
    if isinstance(arguments, dict):
        return {key: to_builtin_containers(a) for key, a in arguments.items()}
    return arguments


def input_names(call: CapturedCall) -> list[str]:
    """Return a name for each leaf of the call's arguments: `x`, `batch['labels']`, `states[0]`."""
    signature = inspect.signature(call.module.forward)
    positional = [
        p.name
        for p in signature.parameters.values()
        if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    variadic = next(
        (
            p.name
            for p in signature.parameters.values()
            if p.kind is inspect.Parameter.VAR_POSITIONAL
        ),
        None,
    )
    # Positional arguments from this index on are elements of `*args`.
    num_positional = positional.index(variadic) if variadic in positional else len(positional)
    names = []
    for path, _ in pytree.tree_flatten_with_path((call.args, call.kwargs))[0]:
        # `path[0]` distinguishes args and kwargs, `path[1]` is the argument in them.
        first, suffix = path[1], pytree.keystr(path[2:])
        if isinstance(first, pytree.SequenceKey):
            index = first.idx
            head = (
                positional[index]
                if index < num_positional
                else f"{variadic}[{index - num_positional}]"
            )
        else:
            head = str(first.key)  # type: ignore[attr-defined]
        names.append(f"{head}{suffix}")
    return names
