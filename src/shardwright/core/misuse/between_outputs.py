"""Reject gradients of outputs that would miss the contribution of other outputs.

A program may return an output gathered or as a DTensor, while it computes other outputs from the
value before. The returned tensor is then a leaf of its own branch of the autograd graph: a gradient
of `loss` reaches the parameters, but not the tensor returned as `hidden`, so hooks of that tensor,
`hidden.grad` and `torch.autograd.grad(loss, hidden)` would be wrong. An output that is returned as
it is computed is on the path to the outputs computed from it, and gets its full gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

from torch import Tensor

from shardwright.core.capture.naming import current_line, line_of_function
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.partition.communication import Communication
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.autograd import check_before_grad, gradient_edge_of
from shardwright.core.torch_internals.dispatch import without_torch_function_of_subclasses
from shardwright.core.torch_internals.hooks import Hooks, hooks_of_result, hooks_of_tensor
from shardwright.errors import PlanError

_MARK = "shardwright.output"
"""Key in the metadata of autograd nodes: the `OutputMark` of each of the node's outputs."""


@dataclass(frozen=True, eq=False)
class OutputMark:
    """An output that the model returned.

    Args:
        name: its path in the returned structure.
        source: the user's line that computes it; empty if unknown.
        computed_from: other outputs whose tensors its gradient does not reach.
    """

    name: str
    source: str
    computed_from: tuple[OutputMark, ...] = ()


@dataclass
class WatchedOutput:
    """An output that would miss a gradient, and the hooks registered on it.

    Args:
        mark: the output.
        tensor: weak reference to its tensor, which its hooks outlive.
        hooks: the registered hooks, by the name of the method that registers them.
        own: keys of hooks that are not the user's.
    """

    mark: OutputMark
    tensor: ref[Tensor]
    hooks: Mapping[str, Hooks]
    own: frozenset[tuple[str, int]] = frozenset()

    @classmethod
    def of(cls, mark: OutputMark, tensor: Tensor, outputs: Sequence[Any]) -> WatchedOutput:
        """Watch `tensor`, one of the `outputs`.

        Hooks of its autograd node are watched only if the node made no other output, because they
        may be meant for that one.
        """
        made = [x for x in outputs if isinstance(x, Tensor) and x.grad_fn is tensor.grad_fn]
        alone = all(x is tensor for x in made)
        hooks = hooks_of_result(tensor) if alone else hooks_of_tensor(tensor)
        return cls(mark, ref(tensor), hooks)

    def keys(self) -> Iterator[tuple[str, int]]:
        """The registering method and the key of each hook."""
        return ((call, key) for call, hooks in self.hooks.items() for key in hooks)

    def call(self) -> str:
        """The user's call that needs the gradient, such as `retain_grad`; empty without one."""
        tensor = self.tensor()
        if tensor is not None and tensor.retains_grad:
            return "`retain_grad`"
        added = next((key for key in self.keys() if key not in self.own), None)
        if added is None:
            return ""
        call, key = added
        hook = self.hooks[call][key]
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        return f"`{call}` of {name} {line_of_function(hook)}".rstrip()


class OutputsOffPath:
    """The outputs of a program whose gradients miss the contribution of other outputs.

    Args:
        graph: the graph of the program.
        flow: its communication.
        all_off_path: whether no output is on the path to another, as in a compiled program, where
            one autograd node makes all outputs.
    """

    def __init__(self, graph: Graph, flow: Communication, all_off_path: bool) -> None:
        self._graph = graph
        self._names: list[str] = []
        self._computed_from: dict[int, list[int]] = {}
        """For each output, by its index, the outputs off its path that it is computed from."""
        for number, value in enumerate(graph.outputs):
            if not isinstance(value, Value) or not value.differentiable:
                continue
            if not all_off_path and is_on_path(graph, flow, value):
                continue
            for other in _outputs_after(graph, value):
                if other != number:
                    self._computed_from.setdefault(other, []).append(number)

    def watch(self, outputs: Sequence[Any], result: Any) -> None:
        """Make a backward pass raise PlanError if a requested gradient would be incomplete.

        Args:
            outputs: the leaves of `result`.
            result: the structure that the model returns.
        """
        if not self._computed_from:
            return
        with without_torch_function_of_subclasses():
            self._watch(outputs, result)

    def _watch(self, outputs: Sequence[Any], result: Any) -> None:
        refuse_gradients_of_outputs()
        self._names = self._names or _names(result, len(outputs))
        watched: dict[int, WatchedOutput] = {}
        for number in sorted({n for numbers in self._computed_from.values() for n in numbers}):
            tensor = outputs[number]
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                watched[number] = WatchedOutput.of(self._mark(number), tensor, outputs)
                _set_mark(tensor, watched[number].mark)
        for number, before in self._computed_from.items():
            tensor = outputs[number]
            missing = [watched[n] for n in before if n in watched]
            if missing and isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                own = watched.get(number)
                mark = self._mark(number) if own is None else own.mark
                computed_from = tuple(each.mark for each in missing)
                object.__setattr__(mark, "computed_from", computed_from)
                _set_mark(tensor, mark)
                tensor.register_hook(_refusing(mark, missing))  # type: ignore[no-untyped-call]
        for each in watched.values():
            each.own = frozenset(each.keys())

    def _mark(self, number: int) -> OutputMark:
        op = self._graph.producer.get(self._graph.outputs[number])
        return OutputMark(self._names[number], op.source if op is not None else "")


def is_on_path(graph: Graph, flow: Communication, value: Value) -> bool:
    """Whether an uncompiled program computes other values from the tensor that it returns.

    This holds if the tensor is not a DTensor, and the routes to all consumers begin with the
    redistribution of the output.
    """
    layout, route = flow.returned(value), flow.output_routes[value]
    if layout.sharded or layout.partial:
        return False
    return all(
        flow.routes[op.name, index][: len(route)] == route
        for op, index in graph.consumers[value]
        if any(output.differentiable for output in op.outputs)
    )


def _outputs_after(graph: Graph, value: Value) -> list[int]:
    """Indices of the outputs from which a gradient flows to a value, including the value itself."""
    after = {value}
    for op in graph.ops:
        if not after.isdisjoint(op.inputs):
            after.update(output for output in op.outputs if output.differentiable)
    return [n for n, output in enumerate(graph.outputs) if output in after]


def _names(result: Any, count: int) -> list[str]:
    try:
        leaves, _ = pytree.tree_flatten_with_path(result)
    except ValueError:  # a registered class without `flatten_with_keys_fn`
        return [f"output {number}" for number in range(count)]
    return [f"output{pytree.keystr(path)}" for path, _ in leaves]


def _refusing(
    mark: OutputMark, missing: Sequence[WatchedOutput]
) -> Callable[[Tensor | None], None]:
    """Make a hook of an output that raises if a requested gradient would miss its contribution."""

    def refuse(gradient: Tensor | None) -> None:
        if gradient is None:  # the node runs because of another of its outputs
            return
        with without_torch_function_of_subclasses():
            calls = ((each.mark, each.call()) for each in missing)
            requested = next(((other, call) for other, call in calls if call), None)
        if requested is not None:
            raise PlanError(_message(requested[1], requested[0], mark))

    return refuse


def _message(call: str, output: OutputMark, later: OutputMark) -> str:
    line = current_line()
    source = f" ({output.source})" if output.source else ""
    return (
        f"{line}{': ' if line else ''}{call} on {output.name}{source} of a planned model: "
        f"{later.name} is computed from it inside of the model, and its gradient does not pass "
        f"through the tensor that was returned. Compute what is trained from {output.name} outside "
        "of the model, or return one of the two alone"
    )


@cache
def refuse_gradients_of_outputs() -> None:
    """Make `torch.autograd.grad`, and `backward` with `inputs`, raise PlanError for outputs whose
    gradients would be incomplete."""
    check_before_grad(_check_inputs)


def _check_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    with without_torch_function_of_subclasses():
        marks = (_mark_of(*gradient_edge_of(each)) for each in inputs)
        requested = {mark for mark in marks if mark is not None}
        later = next(_computed_from(requested, outputs), None) if requested else None
    if later is not None:
        output = next(mark for mark in later.computed_from if mark in requested)
        call = "`torch.autograd.grad` (or `backward(inputs=...)`)"
        raise PlanError(_message(call, output, later))


def _computed_from(requested: set[OutputMark], outputs: Sequence[Any]) -> Iterator[OutputMark]:
    """Outputs on the way of a backward pass from `outputs` that do not reach a requested one."""
    stack = [gradient_edge_of(each) for each in outputs]
    nodes, edges = set[Any](), set[tuple[Any, int]]()
    while stack:
        node, number = stack.pop()
        if node is None or (node, number) in edges:
            continue
        edges.add((node, number))
        mark = _mark_of(node, number)
        if mark is not None and not requested.isdisjoint(mark.computed_from):
            yield mark
        if node not in nodes:
            nodes.add(node)
            stack += node.next_functions


def _set_mark(tensor: Tensor, mark: OutputMark) -> None:
    node, number = gradient_edge_of(tensor)
    node.metadata.setdefault(_MARK, {})[number] = mark


def _mark_of(node: Any, number: int) -> OutputMark | None:
    mark: OutputMark | None = None
    if node is not None:
        mark = node.metadata.get(_MARK, {}).get(number)
    return mark
