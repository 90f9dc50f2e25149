"""Replacement of in-place operators by operators that return a new tensor.

A mutated tensor is a *base* or a view of a base. A write to a view computes a new base (with
`slice_scatter`, `select_scatter`, the inverse permutation, …). A later read of any view of that
base repeats the view operators on the new base.
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
from shardwright.core.capture.saved_values import check_is_unsaved
from shardwright.core.capture.signature import is_floating_point
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
_RESIZING = {"aten::resize_", "aten::resize_as_"}
"""Operators that change the shape of their argument; views of it would be those of another."""

_DETACH = {aten.detach.default}


def mutated_arguments(node: fx.Node) -> list[str]:
    """Return the names of the arguments that an operator mutates."""
    if not isinstance(node.target, OpOverload):
        return []
    # The schemas of norms do not declare that running statistics are updated.
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
    """Return an equivalent graph without mutations.

    Args:
        graph: the traced graph.
        trained: placeholders that require a gradient; gradients of later reads of a mutated
            placeholder still reach the placeholder.

    Returns:
        The functional graph, and the node of the final value of each mutated placeholder.

    Raises:
        CaptureError: for an in-place operator that has no functional form.
    """
    if not any(mutated_arguments(node) for node in graph.nodes):
        return graph, {}
    program = _FunctionalProgram(frozenset(trained))
    for node in graph.nodes:
        program.run(node)
    return program.graph, program.mutated_placeholders()


class _FunctionalProgram:
    """The functional graph under construction, and the current value of every original node."""

    def __init__(self, trained: frozenset[fx.Node]) -> None:
        self.trained = trained
        self.graph = fx.Graph()
        self.leaf: dict[fx.Node, fx.Node] = {}
        self.view_of: dict[fx.Node, fx.Node] = {}
        # Number of writes to each base.
        self.version: dict[fx.Node, int] = {}
        # Current node of each original node, with the version of its base at which it was computed.
        self.holds: dict[fx.Node, tuple[int, fx.Node]] = {}

    def base(self, node: fx.Node) -> fx.Node:
        while node in self.view_of:
            node = self.view_of[node]
        return node

    def read(self, node: fx.Node) -> fx.Node:
        """Return the node of the functional graph with the current value of an original node."""
        version = self.version.get(self.base(node), 0)
        seen, new = self.holds[node]
        # The base was written since: repeat the view on its current value.
        if seen != version:
            new = replay_view(self.graph, node, self.read(self.view_of[node]))
            self.holds[node] = (version, new)
        return new

    def write(self, node: fx.Node, new: fx.Node, by: fx.Node) -> None:
        """Set the current value of an original node to `new`, and update the base that it views."""
        # From the written view to its base, each a view of the next.
        path = [node]
        while path[-1] in self.view_of:
            path.append(self.view_of[path[-1]])
        base = path[-1]
        # Written without autograd, or through a `detach`: no gradient flows through the new value.
        is_detached = is_floating_point(new) and (
            bool(by.meta.get("no_grad"))
            or any(IN_PLACE.get(view.target, view.target) in _DETACH for view in path)
        )
        if is_detached:
            new = call(self.graph, aten.detach.default, (new,), like=by)
        old = self.read(base)
        # Autograd does not know of the write, so gradients of the new value are those of the old.
        passes_gradient = is_detached and not self._is_leaf_tensor(base)
        if passes_gradient:
            check_is_unsaved(old, by)
        updated = new
        # From the innermost view outward, until the base is new.
        for view, source in pairwise(path):
            updated = write_through(self.graph, view, self.read(source), updated)
        version = self.version[base] = self.version.get(base, 0) + 1
        if base in self.trained or passes_gradient:
            # Later reads of a parameter, whatever was written, send their gradient to it. Its views
            # are replayed, so that their gradients reach it too.
            updated = call(self.graph, aten.detach.default, (updated,), like=by)
            function: Any = (
                assigned if base in self.trained else torch.ops.shardwright.with_gradient_of.default
            )
            source = self.leaf[base] if base in self.trained else old
            updated = new = call(self.graph, function, (source, updated), like=by)
            updated.meta["no_grad"] = False
        self.holds[base] = (version, updated)
        # Otherwise the view keeps its old version, so that its next read is replayed.
        if node is base or not (base in self.trained or passes_gradient):
            self.holds[node] = (version, new)

    def _is_leaf_tensor(self, base: fx.Node) -> bool:
        return (
            base.op == "placeholder" or bool(base.meta.get("no_grad")) or not base.all_input_nodes
        )

    def run(self, node: fx.Node) -> None:
        """Copy one node of the original graph, or replace its mutations."""
        changed = mutated_arguments(node)
        if changed:
            if node.target in _NORMS:
                self._replace_batch_norm_updates(node)
            else:
                self._replace_in_place(node, changed)
            return
        copied = self.graph.node_copy(node, self.read)
        if node.op == "placeholder":
            self.leaf[node] = copied
            # `torch.fx` renames a copy whose name is a Python builtin (`input`).
            copied.name = node.name
        self.holds[node] = (0, copied)
        source = view_base(node)
        if source is not None:
            self.view_of[node] = source
            # A new view already has the current value of its base.
            self.holds[node] = (self.version.get(self.base(node), 0), self.holds[node][1])

    def _replace_in_place(self, node: fx.Node, changed: list[str]) -> None:
        arguments = node_arguments(node)
        # An `out` argument becomes a write of the returned tensor.
        function = _find_overload_without_out(node.target) if changed == ["out"] else None
        is_supported = function is not None or changed == [next(iter(arguments))]
        if not is_supported or not isinstance(arguments[changed[0]], fx.Node):
            raise CaptureError(
                f"{line_of(node)}: cannot capture `{node.target}`, which writes into its argument "
                f"{changed[0]!r}\nuse the operator that returns a new tensor"
            )
        target = arguments[changed[0]]
        # An in-place operator returns the tensor that it mutates.
        self.view_of[node] = target
        # In-place views, such as `squeeze_`, change no value.
        if node.target in IN_PLACE:
            version = self.version.get(self.base(node), 0)
            self.holds[node] = (version, replay_view(self.graph, node, self.read(target)))
            return
        if function is not None:
            kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
            args, kwargs = fx.map_arg((node.args, kwargs), self.read)
            new = call(self.graph, function, args, kwargs, like=node)
            self.write(target, self._cast_and_broadcast(new, self.read(target), node), node)
        else:
            self.write(target, self._compute_new_value(node, self.read(target)), node)
        self.holds[node] = self.holds[target]

    def _compute_new_value(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """Return the new value of the tensor that an in-place operator mutates."""
        assert isinstance(node.target, OpOverload)
        arguments: Any = fx.map_arg(node.args[1:], self.read)
        kwargs = fx.map_arg(node.kwargs, self.read)
        name, overload = schema_of(node.target).name, overload_name(node.target)
        if name == "aten::copy_":
            return self._cast_and_broadcast(arguments[0], old, node)
        if name == "aten::zero_":
            return call(self.graph, aten.zeros_like.default, (old,), like=node)
        if name == "aten::fill_" and overload == "Scalar":
            return call(self.graph, aten.full_like.default, (old, arguments[0]), like=node)
        if name == "aten::fill_":
            return self._cast_and_broadcast(arguments[0], old, node)
        if node.target in _RANDOM:
            parameters = [
                v for k, v in node_arguments(node).items() if k not in ("self", "generator")
            ]
            # Only the shape of the old value is read, so it gets no gradient.
            old = call(self.graph, aten.detach.default, (old,), like=node)
            return call(self.graph, _RANDOM[node.target], (old, *parameters), like=node)
        if name == "aten::fill_diagonal_" and len(node_shape(old)) == 2 and not any(arguments[1:]):
            return self._insert_fill_diagonal(old, arguments[0], node)
        target = _find_functional_variant(node.target)
        if target is None or name in _RESIZING:
            raise CaptureError(
                f"{line_of(node)}: cannot capture `{node.target}`, which works in place and has no "
                "variant that returns a new tensor\ncompute the result with `torch.where`, or "
                "write an operator that returns it"
            )
        given = (old, *arguments)
        if target is aten.polygamma.default:  # Its arguments are in another order.
            given = (*arguments, old)
        new = call(self.graph, target, given, kwargs, like=node)
        return self._cast_and_broadcast(new, old, node)

    def _insert_fill_diagonal(self, old: fx.Node, value: Any, node: fx.Node) -> fx.Node:
        """Insert a masked fill, whose rows can be sharded, in place of `fill_diagonal_`."""
        mask = call(self.graph, aten.ones_like.default, (old,), {"dtype": torch.bool}, like=node)
        # The lower and the upper triangle have only the diagonal in common.
        lower = call(self.graph, aten.tril.default, (mask,), like=node)
        mask = call(self.graph, aten.triu.default, (lower,), like=node)
        return call(self.graph, aten.masked_fill.Scalar, (old, mask, value), like=node)

    def _cast_and_broadcast(self, new: fx.Node, old: fx.Node, node: fx.Node) -> fx.Node:
        """Cast and broadcast `new` to the dtype and shape of the mutated tensor `old`."""
        if tensor(new).dtype != tensor(old).dtype:
            new = call(self.graph, aten.to.dtype, (new, tensor(old).dtype), like=node)
        if node_shape(new) != node_shape(old):
            new = call(self.graph, aten.expand.default, (new, list(node_shape(old))), like=node)
        return new

    def _replace_batch_norm_updates(self, node: fx.Node) -> None:
        arguments = node_arguments(node)
        target: Any = _NORMS[node.target][1]  # type: ignore[index]
        names = ("input", "weight", "bias", "running_mean", "running_var")
        tensors = [fx.map_arg(arguments[name], self.read) for name in names]
        result = call(
            self.graph, target, (*tensors, arguments["momentum"], arguments["eps"]), like=node
        )
        results = [call(self.graph, operator.getitem, (result, i), like=node) for i in range(3)]
        self.holds[node] = (0, results[0])
        self.write(arguments["running_mean"], results[1], node)
        self.write(arguments["running_var"], results[2], node)

    def mutated_placeholders(self) -> dict[fx.Node, fx.Node]:
        """Return the mutated placeholders of the new graph, with nodes of their final values."""
        # The keys of `version` are nodes of the original graph; copies have the same names.
        placeholders = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        return {
            placeholders[base.name]: self.holds[base][1]
            for base in self.version
            if base.op == "placeholder"
        }


def _find_functional_variant(target: OpOverload) -> Any:
    """Return the functional variant of an in-place operator, or None if PyTorch has no such
    variant.

    Examples: `add_.Tensor` → `add.Tensor`, `pow_.Scalar` → `pow.Tensor_Scalar`, `__iand__.Tensor` →
    `__and__.Tensor`.
    """
    name = schema_of(target).name.removeprefix("aten::")
    # `__iand__` → `__and__`, or `add_` → `add`.
    is_python = name.startswith("__i")
    name = name.replace("__i", "__", 1) if is_python else name.removesuffix("_")
    packet = getattr(aten, name, None)
    return packet and (
        _find_functional_overload(packet, target) or getattr(packet, overload_name(target), None)
    )


def _find_overload_without_out(target: Any) -> Any:
    """Return the overload without `out`, such as `div.Tensor` for `div.out`; None if the operator
    has no such overload."""
    return _find_functional_overload(
        getattr(aten, schema_of(target).name.removeprefix("aten::")), target
    )


def _find_functional_overload(packet: Any, target: OpOverload) -> Any:
    """Return the functional overload with the arguments of `target` except `out`; None if the
    operator has no such overload."""

    def described(overload: OpOverload) -> list[tuple[str, str]]:
        arguments = ((a.name, str(a.type)) for a in schema_of(overload).arguments)
        return [argument for argument in arguments if argument[0] != "out"]

    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next(
        (o for o in overloads if not schema_of(o).is_mutable and described(o) == described(target)),
        None,
    )
