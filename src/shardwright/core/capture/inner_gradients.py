"""Gradients that `forward` itself computes by `torch.autograd.grad`, as operators.

The operators that were traced so far say how the outputs depend on the inputs. Those between them
are called once more, in a trace of its own that autograd goes back through; its backward operators
are then called in the model's trace, on the values that the first call gave.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree

from shardwright.core.capture.autograd_functions import CUSTOM_GRADIENT, second_derivative
from shardwright.core.capture.fx_nodes import is_tensor, tensor
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.transforms import OperatorsAsCalled, called_again, operators_of
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import without_dispatch_modes, without_function_modes
from shardwright.core.torch_internals.operators import OpOverload, operator_name, schema_of
from shardwright.errors import CaptureError

aten = torch.ops.aten

_MAY_VIEW = {
    *("reshape", "contiguous", "to", "flatten"),
    *("expand_as", "view_as", "reshape_as", "type_as"),
}
_WITHOUT_VALUES = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "randint_like"),
}
"""Operators that read the shape of a tensor alone."""

REMEDY = "compute the gradient outside of the model, or make a `torch.library.custom_op` of it"


def gradients(
    outputs: Any, inputs: Sequence[Tensor], grad_outputs: Any = None, **options: Any
) -> tuple[Tensor | None, ...]:
    """What `torch.autograd.grad` returns, while a model is traced.

    Raises:
        CaptureError: where what lies between cannot be called once more with the same result.
    """
    options.pop("retain_graph", None)
    create_graph = options.pop("create_graph", False)
    trace = TraceSoFar()
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    starts, ends = ([trace.node(t) for t in tensors] for tensors in (inputs, outputs))
    between = _Between.of(trace.graph, starts, ends)
    if create_graph:
        between.check_second_derivatives()
    given, cotangent_spec = pytree.tree_flatten(grad_outputs)
    cotangents = [leaf for leaf in given if isinstance(leaf, Tensor)]
    tensors = [trace.tensor(node) for node in (*between.roots, *between.others)]
    known = [trace.tensor(node) for node in between.kept]
    found: list[Tensor | None] = []

    def back(operators: OperatorsAsCalled, tensors: Sequence[Tensor]) -> list[Tensor]:
        count = len(between.roots) + len(between.others)
        values = between.called(operators, tensors[:count])
        left = iter(tensors[count:])
        directions = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in given]
        found[:] = torch.autograd.grad(
            [values[node] for node in ends],
            [values[node] for node in starts],
            pytree.tree_unflatten(directions, cotangent_spec),
            create_graph=True,
            **options,
        )
        kept = [values[node] for node in between.kept]
        return [*kept, *(gradient for gradient in found if gradient is not None)]

    with without_function_modes(), without_dispatch_modes():
        leaves = [t.detach() for t in (*tensors, *cotangents)]
        for leaf in leaves[: len(between.roots)]:
            leaf.requires_grad_()
    module = operators_of(back, leaves)
    _take_known(module.graph, len(known))
    made = iter(called_again(module, [*tensors, *cotangents, *known]))
    results = [None if gradient is None else next(made) for gradient in found]
    return tuple(r if r is None or create_graph else r.detach() for r in results)


class TraceSoFar:
    """That of the model so far."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._tracer: Any = mode.tracer
        self.graph: fx.Graph = self._tracer.graph
        nodes = ((t, self._slot(t)) for t in list(self._tracer.tensor_tracker.keys()))
        self._held = {slot.proxy.node: tensor for tensor, slot in nodes if slot is not None}

    def node(self, tensor: Tensor) -> fx.Node:
        """What made a tensor.

        Raises:
            CaptureError: if it is none of the model's.
        """
        slot = self._slot(tensor)
        if slot is None:
            raise CaptureError(
                "`forward` computes the gradient of a tensor that is none of the model's "
                f"parameters, buffers and inputs and was not computed from them: {REMEDY}"
            )
        node: fx.Node = slot.proxy.node
        return node

    def tensor(self, node: fx.Node) -> Tensor:
        """What a node made, or where Python has it no more what stands for that."""
        if node in self._held:
            return self._held[node]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise CaptureError(f"`forward` computes gradients of symbolic sizes: {REMEDY}")
        with without_function_modes(), without_dispatch_modes():
            tensor = value.detach().requires_grad_(self._requires_grad(node))
            proxy = fx.Proxy(node, self._tracer)
            track_tensor_tree(tensor, proxy, constant=None, tracer=self._tracer)
        self._held[node] = tensor
        return tensor

    def _requires_grad(self, node: fx.Node) -> bool:
        before = [arg for arg in node.all_input_nodes if is_tensor(arg)]
        return (
            tensor(node).dtype.is_floating_point
            and node.target is not aten.detach.default
            and any(self.tensor(arg).requires_grad for arg in before)
        )

    def _slot(self, tensor: Tensor) -> Any:
        return get_proxy_slot(tensor, self._tracer, None)


@dataclass(frozen=True)
class _Between:
    """The operators by which outputs depend on inputs.

    Args:
        roots: inputs that do not depend on other inputs.
        others: what the operators read besides.
        operators: in their order.
    """

    roots: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]
    operators: tuple[fx.Node, ...]

    @classmethod
    def of(cls, graph: fx.Graph, starts: Sequence[fx.Node], ends: Sequence[fx.Node]) -> _Between:
        depending = _depending(graph, starts)
        needed: set[fx.Node] = set()
        stack = [node for node in (*ends, *starts) if node in depending]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += [arg for arg in node.all_input_nodes if arg in depending]
        operators = tuple(node for node in graph.nodes if node in needed)
        roots = tuple(dict.fromkeys(node for node in starts if node not in depending))
        read = (arg for node in operators for arg in node.all_input_nodes)
        outside = [*read, *(node for node in ends if node not in depending)]
        others = dict.fromkeys(n for n in outside if n not in needed and n not in roots)
        result = cls(roots, tuple(others), operators)
        result._check(graph, {*starts, *depending})
        return result

    @property
    def kept(self) -> list[fx.Node]:
        """Those of the operators that return one which is not changed later."""
        changed = {c for node in self.operators for c in (*_changed(node), node) if _changed(node)}
        tensors = (node for node in self.operators if isinstance(node.meta["val"], Tensor))
        return [node for node in tensors if node not in changed]

    def called(self, operators: OperatorsAsCalled, tensors: Sequence[Tensor]) -> dict[fx.Node, Any]:
        """Their values, if roots and others are these."""
        values: dict[fx.Node, Any] = dict(zip((*self.roots, *self.others), tensors, strict=True))
        for node in self.operators:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            if target is aten.detach.default:
                with operators.detaching():
                    values[node] = target(*args, **kwargs)
            else:
                values[node] = target(*args, **kwargs)
        return values

    def check_second_derivatives(self) -> None:
        """Raises:
        CaptureError: if gradients of the gradients would lack a term.
        """
        for node in self.operators:
            if name := node.meta.get(CUSTOM_GRADIENT):
                raise CaptureError(second_derivative(name))

    def _check(self, graph: fx.Graph, depending: Iterable[fx.Node]) -> None:
        """Raises:
        CaptureError: if to call them again is not to call them once.
        """
        read, own = {*depending, *self.others}, set(self.operators)
        for node in graph.nodes:
            if "autocast" in str(node.target):
                raise CaptureError(
                    "`forward` computes gradients in a region of autocast, or after one, which "
                    f"cannot be captured: {REMEDY}"
                )
            changed = read.intersection(_changed(node))
            if changed and not (node in own and changed <= own):
                raise CaptureError(
                    "`forward` computes gradients through tensors of which one is changed in place "
                    f"({line_of(node)}): compute a new tensor instead"
                )
        for node in self.operators:
            if _draws(node):
                raise CaptureError(
                    "`forward` computes gradients through an operator that draws random numbers "
                    f"({line_of(node)}), which would be drawn once more: draw before the tensors "
                    "that gradients are taken of, or set dropout to 0"
                )
            is_traced = node.target is operator.getitem or isinstance(node.target, OpOverload)
            if not is_traced or node.target is torch.ops.shardwright.local_map.default:
                raise CaptureError(
                    f"`forward` computes gradients through `{node.target}`, which cannot be "
                    f"captured ({line_of(node)}): {REMEDY}"
                )


def _depending(graph: fx.Graph, starts: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The nodes through which gradients flow to `starts`; of those the ones that depend on
    others."""
    found: dict[fx.Node, None] = {}
    first, enabled = set(starts), True
    for node in graph.nodes:
        if "set_grad_enabled" in str(node.target):
            enabled = bool(node.args[0])
        elif (
            enabled
            and _name(node) not in _WITHOUT_VALUES
            and any(arg in found or arg in first for arg in node.all_input_nodes)
        ):
            found[node] = None
    return found


def _changed(node: fx.Node) -> list[fx.Node]:
    """The tensors that an operator changes, and those of which they are views."""
    found: list[fx.Node] = []
    arguments = schema_of(node.target).arguments if isinstance(node.target, OpOverload) else ()
    for argument, given in zip(arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for changed in pytree.tree_leaves(given):
                while isinstance(changed, fx.Node):
                    found.append(changed)
                    changed = _viewed(changed)
    return found


def _viewed(node: fx.Node) -> Any:
    """The tensor in whose memory the result of an operator lies, if that may be."""
    if node.target is operator.getitem:
        return node.args[0]
    if not isinstance(node.target, OpOverload) or not node.args:
        return None
    schema = schema_of(node.target)
    # Operators that may return their input, such as `reshape`, do not say so.
    may = schema.returns[0].alias_info is not None or operator_name(node.target) in _MAY_VIEW
    return node.args[0] if may else None


def _name(node: fx.Node) -> str:
    return operator_name(node.target) if isinstance(node.target, OpOverload) else ""


def _draws(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    chance = next((given[name] for name in ("p", "dropout_p", "dropout") if name in given), None)
    training: Any = given.get("train", given.get("training", True))
    if operator_name(node.target) == "scaled_dot_product_attention":
        chance = chance or 0.0
    return bool(training) and bool(chance != 0.0)


def _take_known(graph: fx.Graph, count: int) -> None:
    """Makes inputs of the first `count` results of a trace."""
    *_, output = graph.nodes
    results = list(output.args[0])
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for number, result in enumerate(results[:count]):
        with graph.inserting_after(last):
            last = graph.placeholder(f"known_{number}")
        last.meta["val"] = result.meta.get("val")
        if result.op != "placeholder":
            result.replace_all_uses_with(last)
    output.args = (list(output.args[0])[count:],)
    graph.eliminate_dead_code()
