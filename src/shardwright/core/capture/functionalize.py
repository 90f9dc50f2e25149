"""Replaces in-place operators by ones that return a new tensor.

A mutated tensor is a *base* or a view of one. Writing to a view computes the new base (with
`slice_scatter`, `select_scatter`, the inverse permutation, …); a later read of any view of that
base repeats the view on the new base.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.fx_nodes import call, node_arguments, node_shape, tensor
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.views import IN_PLACE, replay_view, view_base, write_through
from shardwright.core.graph.custom_ops import assigned, batch_norm_train, instance_norm_train
from shardwright.core.torch_internals.operators import OpOverload, overload_name, schema_of
from shardwright.errors import CaptureError

aten = torch.ops.aten

_RANDOM = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
    aten.uniform_.default: aten.uniform.default,
    aten.exponential_.default: aten.exponential.default,
}
_NORMS = {
    aten.batch_norm.default: ("training", batch_norm_train),
    aten.instance_norm.default: ("use_input_stats", instance_norm_train),
}


_DETACH = {aten.detach.default}


def mutated_arguments(node: fx.Node) -> list[str]:
    """Names of the arguments that an operator mutates."""
    if not isinstance(node.target, OpOverload):
        return []
    if node.target in _NORMS:
        arguments = node_arguments(node)
        names = ["running_mean", "running_var"]
        updates = arguments[_NORMS[node.target][0]] and all(arguments[name] for name in names)
        return names if updates else []
    return [
        argument.name
        for argument in schema_of(node.target).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def functionalize(
    graph: fx.Graph, trained: Collection[fx.Node] = ()
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph without mutations.

    Args:
        trained: placeholders that require a gradient; it is theirs after a change as before.

    Returns:
        The functional graph, and for each of its mutated placeholders the node of the final value.

    Raises:
        CaptureError: for an in-place operator that has no functional form.
    """
    if not any(mutated_arguments(node) for node in graph.nodes):
        return graph, {}
    program = _Program(frozenset(trained))
    for node in graph.nodes:
        program.run(node)
    return program.graph, program.mutated_placeholders()


class _Program:
    """The functional graph under construction, and the current value of every original node."""

    def __init__(self, trained: frozenset[fx.Node]) -> None:
        self.trained = trained
        self.graph = fx.Graph()
        self.leaf: dict[fx.Node, fx.Node] = {}
        self.view_of: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}
        self.holds: dict[fx.Node, tuple[int, fx.Node]] = {}

    def base(self, node: fx.Node) -> fx.Node:
        while node in self.view_of:
            node = self.view_of[node]
        return node

    def read(self, node: fx.Node) -> fx.Node:
        """The new node with the current value of an original one."""
        version = self.version.get(self.base(node), 0)
        seen, new = self.holds[node]
        if seen != version:
            new = replay_view(self.graph, node, self.read(self.view_of[node]))
            self.holds[node] = (version, new)
        return new

    def write(self, node: fx.Node, new: fx.Node, by: fx.Node) -> None:
        """Sets the value of an original node, and of all that share its memory, to `new`."""
        path = [node]
        while path[-1] in self.view_of:
            path.append(self.view_of[path[-1]])
        base = path[-1]
        if by.meta.get("no_grad") or any(IN_PLACE.get(v.target, v.target) in _DETACH for v in path):
            new = self._without_gradient(base, new, by)
        updated = new
        for view, source in pairwise(path):
            updated = write_through(self.graph, view, self.read(source), updated)
        version = self.version[base] = self.version.get(base, 0) + 1
        if base in self.trained:
            # The gradient of what is read from here on is the parameter's, whatever was written;
            # views of it are repeated, so that theirs flows there too.
            updated = call(self.graph, aten.detach.default, (updated,), like=by)
            updated = new = call(self.graph, assigned, (self.leaf[base], updated), like=by)
            updated.meta["no_grad"] = False
        self.holds[base] = (version, updated)
        if base not in self.trained or node is base:
            self.holds[node] = (version, new)

    def _without_gradient(self, base: fx.Node, new: fx.Node, by: fx.Node) -> fx.Node:
        if not tensor(new).is_floating_point():
            return new
        if not self._is_leaf(base):
            raise CaptureError(
                f"{line_of(by)}: this modifies a tensor in place without autograd, so its gradient "
                f"would not match its value. Compute a new tensor instead."
            )
        return call(self.graph, aten.detach.default, (new,), like=by)

    def _is_leaf(self, base: fx.Node) -> bool:
        return (
            base.op == "placeholder" or bool(base.meta.get("no_grad")) or not base.all_input_nodes
        )

    def run(self, node: fx.Node) -> None:
        """Transfers one node of the original graph."""
        changed = mutated_arguments(node)
        if changed:
            if node.target in _NORMS:
                self._norm(node)
            else:
                self._change(node, changed)
            return
        copied = self.graph.node_copy(node, self.read)
        if node.op == "placeholder":
            self.leaf[node] = copied
            # A copy that is called like a Python function (`input`) would be renamed.
            copied.name = node.name
        self.holds[node] = (0, copied)
        source = view_base(node)
        if source is not None:
            self.view_of[node] = source
            self.holds[node] = (self.version.get(self.base(node), 0), self.holds[node][1])

    def _change(self, node: fx.Node, changed: list[str]) -> None:
        arguments = node_arguments(node)
        function = _without_out(node.target) if changed == ["out"] else None
        known = function is not None or changed == [next(iter(arguments))]
        if not known or not isinstance(arguments[changed[0]], fx.Node):
            raise CaptureError(
                f"{line_of(node)}: cannot capture `{node.target}`, which writes into its argument "
                f"{changed[0]!r}. Use the operator that returns a new tensor."
            )
        target = arguments[changed[0]]
        self.view_of[node] = target
        if node.target in IN_PLACE:
            version = self.version.get(self.base(node), 0)
            self.holds[node] = (version, replay_view(self.graph, node, self.read(target)))
            return
        if function is not None:
            kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
            args, kwargs = fx.map_arg((node.args, kwargs), self.read)
            new = call(self.graph, function, args, kwargs, like=node)
            self.write(target, self._fit(new, self.read(target), node), node)
        else:
            self.write(target, self._functional(node, self.read(target)), node)
        self.holds[node] = self.holds[target]

    def _functional(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """The new value of the tensor that an in-place operator mutates."""
        assert isinstance(node.target, OpOverload)
        arguments: Any = fx.map_arg(node.args[1:], self.read)
        kwargs = fx.map_arg(node.kwargs, self.read)
        name, overload = schema_of(node.target).name, overload_name(node.target)
        if name == "aten::copy_":
            return self._fit(arguments[0], old, node)
        if name == "aten::zero_":
            return call(self.graph, aten.zeros_like.default, (old,), like=node)
        if name == "aten::fill_" and overload == "Scalar":
            return call(self.graph, aten.full_like.default, (old, arguments[0]), like=node)
        if name == "aten::fill_":
            return self._fit(arguments[0], old, node)
        if node.target in _RANDOM:
            parameters = [
                v for k, v in node_arguments(node).items() if k not in ("self", "generator")
            ]
            old = call(self.graph, aten.detach.default, (old,), like=node)
            return call(self.graph, _RANDOM[node.target], (old, *parameters), like=node)
        if name == "aten::fill_diagonal_" and len(node_shape(old)) == 2 and not any(arguments[1:]):
            return self._fill_diagonal(old, arguments[0], node)
        target = _out_of_place(node.target)
        if target is None:
            raise CaptureError(
                f"{line_of(node)}: cannot capture `{node.target}`, which works in place and has no "
                f"variant that returns a new tensor. Compute the result with `torch.where`, or let "
                f"an operator of your own return it."
            )
        new = call(self.graph, target, (old, *arguments), kwargs, like=node)
        return self._fit(new, old, node)

    def _fill_diagonal(self, old: fx.Node, value: Any, node: fx.Node) -> fx.Node:
        """By a mask, so that rows can be cut."""
        ones = call(self.graph, aten.ones_like.default, (old,), {"dtype": torch.bool}, like=node)
        lower = call(self.graph, aten.tril.default, (ones,), like=node)
        mask = call(self.graph, aten.triu.default, (lower,), like=node)
        return call(self.graph, aten.masked_fill.Scalar, (old, mask, value), like=node)

    def _fit(self, new: fx.Node, old: fx.Node, node: fx.Node) -> fx.Node:
        """Casts and broadcasts `new` to the dtype and shape of the mutated tensor."""
        if tensor(new).dtype != tensor(old).dtype:
            new = call(self.graph, aten.to.dtype, (new, tensor(old).dtype), like=node)
        if node_shape(new) != node_shape(old):
            new = call(self.graph, aten.expand.default, (new, list(node_shape(old))), like=node)
        return new

    def _norm(self, node: fx.Node) -> None:
        arguments = node_arguments(node)
        target: Any = _NORMS[node.target][1]  # type: ignore[index]
        names = ("input", "weight", "bias", "running_mean", "running_var")
        tensors = [fx.map_arg(arguments[name], self.read) for name in names]
        result = call(
            self.graph, target, (*tensors, arguments["momentum"], arguments["eps"]), like=node
        )
        parts = [call(self.graph, operator.getitem, (result, i), like=node) for i in range(3)]
        self.holds[node] = (0, parts[0])
        self.write(arguments["running_mean"], parts[1], node)
        self.write(arguments["running_var"], parts[2], node)

    def mutated_placeholders(self) -> dict[fx.Node, fx.Node]:
        """The mutated placeholders of the new graph, each with the node of its final value."""
        placeholders = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        return {
            placeholders[base.name]: self.holds[base][1]
            for base in self.version
            if base.op == "placeholder"
        }


def _out_of_place(target: OpOverload) -> Any:
    """`add_.Tensor` → `add.Tensor`, `pow_.Scalar` → `pow.Tensor_Scalar`; None if there is none."""
    name = schema_of(target).name.removeprefix("aten::").removesuffix("_")
    packet = getattr(aten, name.strip("_") if name.startswith("__i") else name, None)
    return packet and (_pure(packet, target) or getattr(packet, overload_name(target), None))


def _without_out(target: Any) -> Any:
    """`div.out` → `div.Tensor`; None if there is none."""
    return _pure(getattr(aten, schema_of(target).name.removeprefix("aten::")), target)


def _pure(packet: Any, target: OpOverload) -> Any:
    """The overload that takes what `target` does but for `out`, and mutates nothing."""

    def described(overload: OpOverload) -> list[tuple[str, str]]:
        arguments = ((a.name, str(a.type)) for a in schema_of(overload).arguments)
        return [argument for argument in arguments if argument[0] != "out"]

    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next(
        (o for o in overloads if not schema_of(o).is_mutable and described(o) == described(target)),
        None,
    )
