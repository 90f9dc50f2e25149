"""Capture of gradients that `forward` itself computes with `torch.autograd.grad`.

Capture finds the operators between the inputs and the outputs of the gradient in the graph traced
so far. A second trace calls these operators again with autograd enabled, and differentiates them.
The model's trace then calls the backward operators on the results of the original operators.
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

# Operators that may return their input or a view of it.
_MAY_VIEW = {
    *("reshape", "contiguous", "to", "flatten"),
    *("expand_as", "view_as", "reshape_as", "type_as"),
}
_WITHOUT_VALUES = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "randint_like"),
}
"""Operators that read only the shape of a tensor."""

_OR_CUSTOM_OP = "or make a `torch.library.custom_op` of it"


def gradients(
    outputs: Any, inputs: Sequence[Tensor], grad_outputs: Any = None, **options: Any
) -> tuple[Tensor | None, ...]:
    """Return the result of `torch.autograd.grad` while a model is traced.

    Arguments are the same as for `torch.autograd.grad`. Each gradient has the shape of its input;
    it is None if `allow_unused` is set and no output depends on the input.

    Raises:
        CaptureError: if calling the operators between `inputs` and `outputs` again could give
            another result.
    """
    # The separate trace is differentiated once.
    options.pop("retain_graph", None)
    create_graph = options.pop("create_graph", False)
    trace = TraceSoFar()
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    starts, ends = ([trace.node(t) for t in tensors] for tensors in (inputs, outputs))
    between = _GradientPath.of(trace.graph, starts, ends)
    if create_graph:
        between.check_second_derivatives()
    given, cotangent_spec = pytree.tree_flatten(grad_outputs)
    cotangents = [leaf for leaf in given if isinstance(leaf, Tensor)]
    tensors = [trace.tensor(node) for node in (*between.roots, *between.others)]
    unchanged = [trace.tensor(node) for node in between.unchanged_results]
    input_gradients: list[Tensor | None] = []

    def back(operators: OperatorsAsCalled, tensors: Sequence[Tensor]) -> list[Tensor]:
        count = len(between.roots) + len(between.others)
        values = between.call(operators, tensors[:count])
        derivatives = iter(tensors[count:])
        directions = [next(derivatives) if isinstance(leaf, Tensor) else leaf for leaf in given]
        input_gradients[:] = torch.autograd.grad(
            [values[node] for node in ends],
            [values[node] for node in starts],
            pytree.tree_unflatten(directions, cotangent_spec),
            # Also for gradients without graph, whose results are detached below.
            create_graph=True,
            **options,
        )
        results = [values[node] for node in between.unchanged_results]
        return [*results, *(gradient for gradient in input_gradients if gradient is not None)]

    with without_function_modes(), without_dispatch_modes():
        # Leaves of a new autograd graph, in which only the inputs of the gradient require one.
        leaves = [t.detach() for t in (*tensors, *cotangents)]
        for leaf in leaves[: len(between.roots)]:
            leaf.requires_grad_()
    module = operators_of(back, leaves)
    # The model's trace contains the forward operators already; only those of the backward pass are
    # called.
    _turn_results_into_inputs(module.graph, len(unchanged))
    made = iter(called_again(module, [*tensors, *cotangents, *unchanged]))
    results = [None if gradient is None else next(made) for gradient in input_gradients]
    return tuple(r if r is None or create_graph else r.detach() for r in results)


class TraceSoFar:
    """Graph that `torch.export` has traced so far, with the tensor of each node."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._tracer: Any = mode.tracer
        self.graph: fx.Graph = self._tracer.graph
        nodes = ((t, self._get_proxy_slot(t)) for t in list(self._tracer.tensor_tracker.keys()))
        self._tensors = {slot.proxy.node: tensor for tensor, slot in nodes if slot is not None}

    def node(self, tensor: Tensor) -> fx.Node:
        """Return the node that computes a tensor.

        Raises:
            CaptureError: if the trace does not contain the tensor.
        """
        slot = self._get_proxy_slot(tensor)
        if slot is None:
            raise CaptureError(
                "`forward` computes the gradient with respect to a tensor that does not depend on "
                "parameters, buffers or inputs\n"
                f"compute the gradient outside of the model, {_OR_CUSTOM_OP}"
            )
        node: fx.Node = slot.proxy.node
        return node

    def tensor(self, node: fx.Node) -> Tensor:
        """Return the tensor that a node computed, or a new tensor for the node if it was freed.

        Raises:
            CaptureError: if the result of the node is not a tensor.
        """
        if node in self._tensors:
            return self._tensors[node]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise CaptureError(
                "`forward` computes the gradient of a number that depends on tensor sizes\n"
                f"compute the gradient outside of the model, {_OR_CUSTOM_OP}"
            )
        # Outside of the trace, which would record a `detach`; the new tensor then stands for the
        # node.
        with without_function_modes(), without_dispatch_modes():
            tensor = value.detach().requires_grad_(self._requires_grad(node))
            proxy = fx.Proxy(node, self._tracer)
            track_tensor_tree(tensor, proxy, constant=None, tracer=self._tracer)
        self._tensors[node] = tensor
        return tensor

    def _requires_grad(self, node: fx.Node) -> bool:
        # Autograd's rule for the freed tensor, without regard to no-grad regions.
        before = [arg for arg in node.all_input_nodes if is_tensor(arg)]
        return (
            tensor(node).dtype.is_floating_point
            and node.target is not aten.detach.default
            and any(self.tensor(arg).requires_grad for arg in before)
        )

    def _get_proxy_slot(self, tensor: Tensor) -> Any:
        return get_proxy_slot(tensor, self._tracer, None)


@dataclass(frozen=True)
class _GradientPath:
    """Traced operators between the inputs and outputs of a `torch.autograd.grad` call.

    Args:
        roots: inputs of the call that do not depend on its other inputs.
        others: other nodes that the operators read.
        operators: nodes between inputs and outputs, in graph order.
    """

    roots: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]
    operators: tuple[fx.Node, ...]

    @classmethod
    def of(
        cls, graph: fx.Graph, starts: Sequence[fx.Node], ends: Sequence[fx.Node]
    ) -> _GradientPath:
        depending = _find_dependents(graph, starts)
        needed: set[fx.Node] = set()
        # An input that depends on another one is on the path, too.
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
        result._check_repeatable(graph, {*starts, *depending})
        return result

    @property
    def unchanged_results(self) -> list[fx.Node]:
        """Operators that return one tensor that no later operator changes in place."""
        writers = {
            node: tensors for node in self.operators if (tensors := _list_mutated_tensors(node))
        }
        changed = {*writers, *(tensor for tensors in writers.values() for tensor in tensors)}
        of_tensors = (node for node in self.operators if isinstance(node.meta["val"], Tensor))
        return [node for node in of_tensors if node not in changed]

    def call(self, operators: OperatorsAsCalled, tensors: Sequence[Tensor]) -> dict[fx.Node, Any]:
        """Run the operators for given values of `roots` and `others`; return values by node."""
        values: dict[fx.Node, Any] = dict(zip((*self.roots, *self.others), tensors, strict=True))
        for node in self.operators:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            # Marked as the model's own: `operators_of` removes those that autograd adds for saved
            # tensors.
            if target is aten.detach.default:
                with operators.detaching():
                    values[node] = target(*args, **kwargs)
            else:
                values[node] = target(*args, **kwargs)
        return values

    def check_second_derivatives(self) -> None:
        """Check that no operator has a custom gradient, which second derivatives would ignore.

        Raises:
            CaptureError: if an operator has a custom gradient.
        """
        for node in self.operators:
            if name := node.meta.get(CUSTOM_GRADIENT):
                raise CaptureError(second_derivative(name))

    def _check_repeatable(self, graph: fx.Graph, depending: Iterable[fx.Node]) -> None:
        """Check that a second call of the operators gives the same result.

        Raises:
            CaptureError: if an operator draws random numbers, cannot be captured, or reads a tensor
                that is changed in place.
        """
        read, operators = {*depending, *self.others}, set(self.operators)
        for node in graph.nodes:
            # The operators of the path have been cast by their region, and would be called outside
            # of it.
            if "autocast" in str(node.target):
                raise CaptureError(
                    "`forward` computes gradients in or after an autocast region, which cannot be "
                    f"captured\ncompute the gradient outside of the model, {_OR_CUSTOM_OP}"
                )
            changed = read.intersection(_list_mutated_tensors(node))
            # A change is repeated with the call if the operator and all that it changes are on the
            # path.
            if changed and not (node in operators and changed <= operators):
                raise CaptureError(
                    "`forward` computes gradients through a tensor that it changes in place "
                    f"({line_of(node)})\ncompute a new tensor instead: `x = x + y`, not `x += y`"
                )
        for node in self.operators:
            if _draws_random_numbers(node):
                raise CaptureError(
                    "`forward` computes gradients through an operator that draws random numbers "
                    f"({line_of(node)}), which a second call would draw again\ndraw them before "
                    "the tensors whose gradients are computed, or set dropout to 0"
                )
            # The code of a `local_map` is not traced, so its backward pass is unknown here.
            is_traced = node.target is operator.getitem or isinstance(node.target, OpOverload)
            if not is_traced or node.target is torch.ops.shardwright.local_map.default:
                raise CaptureError(
                    f"`forward` computes gradients through `{node.target}`, which cannot be "
                    f"captured ({line_of(node)})\n"
                    f"compute the gradient outside of the model, {_OR_CUSTOM_OP}"
                )


def _find_dependents(graph: fx.Graph, starts: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes computed from `starts` with gradients enabled, in graph order.

    A node of `starts` is included only if it is computed from another one.
    """
    dependents: dict[fx.Node, None] = {}
    first, enabled = set(starts), True
    for node in graph.nodes:
        # During the trace, gradient modes are calls; `torch.export` makes regions of them later.
        if "set_grad_enabled" in str(node.target):
            enabled = bool(node.args[0])
        elif (
            enabled
            and _get_operator_name(node) not in _WITHOUT_VALUES
            and any(arg in dependents or arg in first for arg in node.all_input_nodes)
        ):
            dependents[node] = None
    return dependents


def _list_mutated_tensors(node: fx.Node) -> list[fx.Node]:
    """List the tensors that an operator changes in place, and the bases of which they are views."""
    changed_tensors: list[fx.Node] = []
    arguments = schema_of(node.target).arguments if isinstance(node.target, OpOverload) else ()
    for argument, given in zip(arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for changed in pytree.tree_leaves(given):
                while isinstance(changed, fx.Node):
                    changed_tensors.append(changed)
                    changed = _find_viewed_tensor(changed)
    return changed_tensors


def _find_viewed_tensor(node: fx.Node) -> Any:
    """Return the argument that an operator's result may be a view of; None for a new tensor."""
    if node.target is operator.getitem:
        return node.args[0]
    if not isinstance(node.target, OpOverload) or not node.args:
        return None
    schema = schema_of(node.target)
    # Schemas of operators that may return their input, such as `reshape`, do not declare it.
    may = schema.returns[0].alias_info is not None or operator_name(node.target) in _MAY_VIEW
    return node.args[0] if may else None


def _get_operator_name(node: fx.Node) -> str:
    return operator_name(node.target) if isinstance(node.target, OpOverload) else ""


def _draws_random_numbers(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    chance = next((given[name] for name in ("p", "dropout_p", "dropout") if name in given), None)
    training: Any = given.get("train", given.get("training", True))
    # Its default is no dropout, unlike that of `dropout`.
    if operator_name(node.target) == "scaled_dot_product_attention":
        chance = chance or 0.0
    return bool(training) and bool(chance != 0.0)


def _turn_results_into_inputs(graph: fx.Graph, count: int) -> None:
    """Replace the operators of the first `count` results of a trace by placeholders."""
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
