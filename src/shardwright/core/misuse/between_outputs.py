"""Reject gradients of outputs that would miss the contribution of other outputs.

A program may return an output gathered or as a DTensor, while it computes other outputs from the
value before that conversion. The returned tensor is then at the end of its own branch of the
autograd graph: a gradient of `loss` reaches the parameters, but not the tensor returned as
`hidden`, so hooks of that tensor, `hidden.grad` and `torch.autograd.grad(loss, hidden)` would be
wrong. An output returned without conversion is on the path to the outputs computed from it, and
gets its full gradient. Outputs returned with conversion are called "off path" in this module.
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
from shardwright.core.misuse.output_names import output_names
from shardwright.core.partition.communication import Communication
from shardwright.core.torch_internals.autograd import check_before_grad, gradient_edge_of
from shardwright.core.torch_internals.dispatch import without_torch_function_of_subclasses
from shardwright.core.torch_internals.hooks import Hooks, hooks_of_result, hooks_of_tensor
from shardwright.errors import PlanError

_METADATA_KEY = "shardwright.output"
"""Key in the metadata of autograd nodes; its value maps output indices to `ReturnedOutput`s."""


@dataclass(frozen=True, eq=False)
class ReturnedOutput:
    """An output that the model returned.

    Args:
        name: path of the output in the returned structure, such as `output['loss']`.
        source: the user's line that computes the output; empty if unknown.
        computed_from: outputs whose values this output is computed from, but whose returned tensors
            are not in its autograd graph: they miss its gradient.
    """

    name: str
    source: str
    computed_from: tuple[ReturnedOutput, ...] = ()


@dataclass
class WatchedOutput:
    """An output that misses gradients of other outputs, with the hooks registered on its tensor.

    Args:
        output: name and source line of the output.
        tensor: weak reference to the output's tensor, as hooks may outlive the tensor.
        hooks: hooks of the tensor, by the name of the method that registers them.
        internal_hooks: (registering method, key) of each hook that is not the user's.
    """

    output: ReturnedOutput
    tensor: ref[Tensor]
    hooks: Mapping[str, Hooks]
    internal_hooks: frozenset[tuple[str, int]] = frozenset()

    @classmethod
    def of(cls, output: ReturnedOutput, tensor: Tensor, outputs: Sequence[Any]) -> WatchedOutput:
        """Record the hooks of `tensor`, one of `outputs`, to recognize hooks that the user adds.

        Hooks of the tensor's autograd node are included only if the tensor is the node's only
        output; otherwise the hooks may belong to another output.
        """
        of_node = [x for x in outputs if isinstance(x, Tensor) and x.grad_fn is tensor.grad_fn]
        is_only_output = all(x is tensor for x in of_node)
        hooks = hooks_of_result(tensor) if is_only_output else hooks_of_tensor(tensor)
        return cls(output, ref(tensor), hooks)

    def hook_keys(self) -> Iterator[tuple[str, int]]:
        """Yield (name of the registering method, key) of each hook on the output's tensor."""
        return ((method, key) for method, hooks in self.hooks.items() for key in hooks)

    def gradient_request(self) -> str:
        """Return the user's call that needs the tensor's gradient, such as `retain_grad`, or ""."""
        # None if the user has dropped the tensor, whose hooks still run.
        tensor = self.tensor()
        if tensor is not None and tensor.retains_grad:
            return "`retain_grad`"
        added = next((key for key in self.hook_keys() if key not in self.internal_hooks), None)
        if added is None:
            return ""
        method, key = added
        hook = self.hooks[method][key]
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        return f"`{method}` of {name} {line_of_function(hook)}".rstrip()


class OutputsOffPath:
    """Detector of off-path outputs, whose gradients would miss the contribution of other outputs.

    Args:
        graph: the graph of the program.
        flow: communication of the program.
        all_off_path: whether all outputs are off path, as in a compiled program, where one autograd
            node computes all outputs.
    """

    def __init__(self, graph: Graph, flow: Communication, all_off_path: bool) -> None:
        self._graph = graph
        self._names: list[str] = []
        self._computed_from: dict[int, list[int]] = {}
        """Indices of the off-path outputs from which an output is computed, by its index."""
        for index, value in enumerate(graph.outputs):
            if not isinstance(value, Value) or not value.differentiable:
                continue
            if not all_off_path and is_on_path(graph, flow, value):
                continue
            for dependent in _find_dependent_outputs(graph, value):
                if dependent != index:
                    self._computed_from.setdefault(dependent, []).append(index)

    def watch(self, outputs: Sequence[Any], result: Any) -> None:
        """Make backward passes raise PlanError if a requested gradient would be incomplete.

        Args:
            outputs: the leaves of `result`, as returned to the user.
            result: the structure that the model returns.
        """
        if not self._computed_from:
            return
        with without_torch_function_of_subclasses():
            self._watch_hooks_of_outputs(outputs, result)

    def _watch_hooks_of_outputs(self, outputs: Sequence[Any], result: Any) -> None:
        refuse_gradients_of_outputs()
        self._names = self._names or output_names(self._graph)
        watched: dict[int, WatchedOutput] = {}
        for index in sorted({i for indices in self._computed_from.values() for i in indices}):
            tensor = outputs[index]
            # An output without a `grad_fn`, as under `no_grad`, has no gradient that could be
            # incomplete.
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                watched[index] = WatchedOutput.of(
                    self._make_returned_output(index), tensor, outputs
                )
                _store_output_on_autograd_node(tensor, watched[index].output)
        for index, sources in self._computed_from.items():
            tensor = outputs[index]
            missing = [watched[i] for i in sources if i in watched]
            if missing and isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                # An output may be both: computed from one output, and the source of another.
                existing = watched.get(index)
                output = self._make_returned_output(index) if existing is None else existing.output
                computed_from = tuple(each.output for each in missing)
                # The instance is frozen for readers; it exists before the outputs that refer to it
                # are known.
                object.__setattr__(output, "computed_from", computed_from)
                _store_output_on_autograd_node(tensor, output)
                hook = _make_incomplete_gradient_hook(output, missing)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        # The hooks registered above, and those of the program, are not the user's.
        for each in watched.values():
            each.internal_hooks = frozenset(each.hook_keys())

    def _make_returned_output(self, index: int) -> ReturnedOutput:
        op = self._graph.producer.get(self._graph.outputs[index])
        return ReturnedOutput(self._names[index], op.source if op is not None else "")


def is_on_path(graph: Graph, flow: Communication, value: Value) -> bool:
    """Whether an uncompiled program computes other values from the tensor returned for `value`.

    The tensor must not be a DTensor, and each consumer's redistribution must begin with the
    collectives that produce the returned tensor.

    Args:
        graph: the graph of the program.
        flow: communication of the program.
        value: an output of the graph.
    """
    layout, route = flow.returned_layout(value), flow.output_routes[value]
    # Returned as a DTensor: the program goes on with the local tensor.
    if layout.sharded or layout.partial:
        return False
    return all(
        # Equal first steps are carried out once: the consumer reads the tensor that is returned.
        flow.routes[op.name, index][: len(route)] == route
        for op, index in graph.consumers[value]
        # Other consumers send no gradient, so it does not matter where they branch off.
        if any(output.differentiable for output in op.outputs)
    )


def _find_dependent_outputs(graph: Graph, value: Value) -> list[int]:
    """Return the indices of the outputs that depend on `value`, an output, including its own."""
    # Operators are in the order of execution, so one pass finds all.
    dependents = {value}
    for op in graph.ops:
        if not dependents.isdisjoint(op.inputs):
            dependents.update(output for output in op.outputs if output.differentiable)
    return [index for index, output in enumerate(graph.outputs) if output in dependents]


def _make_incomplete_gradient_hook(
    output: ReturnedOutput, missing: Sequence[WatchedOutput]
) -> Callable[[Tensor | None], None]:
    """Return a gradient hook that raises PlanError if the user requests an incomplete gradient.

    Args:
        output: the output that gets the hook.
        missing: outputs from which `output` is computed, and whose gradients miss its contribution.
    """

    def refuse(gradient: Tensor | None) -> None:
        if gradient is None:  # the node runs because of another of its outputs
            return
        with without_torch_function_of_subclasses():
            requests = ((each.output, each.gradient_request()) for each in missing)
            # A gradient that nobody requests may be incomplete, as it does not flow on.
            requested = next(((output, call) for output, call in requests if call), None)
        if requested is not None:
            raise PlanError(_make_incomplete_gradient_message(requested[1], requested[0], output))

    return refuse


def _make_incomplete_gradient_message(
    call: str, output: ReturnedOutput, later: ReturnedOutput
) -> str:
    line = current_line()
    source = f" ({output.source})" if output.source else ""
    return (
        f"{line}{': ' if line else ''}{call} on {output.name}{source} of a planned model: "
        f"{later.name} is computed from it inside the model, and the gradient of {later.name} does "
        f"not reach the returned tensor\ncompute {later.name} from {output.name} outside the "
        "model, or return only one of the two"
    )


# Cached, so that the check is installed once per process.
@cache
def refuse_gradients_of_outputs() -> None:
    """Make `torch.autograd.grad` and `backward(inputs=...)` reject incomplete gradients of
    outputs."""
    check_before_grad(_check_requested_gradients)


def _check_requested_gradients(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    with without_torch_function_of_subclasses():
        sources = (_get_autograd_edge_output(*gradient_edge_of(each)) for each in inputs)
        requested = {source for source in sources if source is not None}
        later = next(_iterate_reached_outputs(requested, outputs), None) if requested else None
    if later is not None:
        output = next(source for source in later.computed_from if source in requested)
        call = "`torch.autograd.grad` (or `backward(inputs=...)`)"
        raise PlanError(_make_incomplete_gradient_message(call, output, later))


def _iterate_reached_outputs(
    requested: set[ReturnedOutput], outputs: Sequence[Any]
) -> Iterator[ReturnedOutput]:
    """Yield the outputs that a backward pass from `outputs` visits and that are computed from one
    of `requested`."""
    stack = [gradient_edge_of(each) for each in outputs]
    nodes, edges = set[Any](), set[tuple[Any, int]]()
    while stack:
        node, output_index = stack.pop()
        if node is None or (node, output_index) in edges:
            continue
        edges.add((node, output_index))
        output = _get_autograd_edge_output(node, output_index)
        if output is not None and not requested.isdisjoint(output.computed_from):
            yield output
        # A node is expanded once, but each of its outputs that is reached is looked up.
        if node not in nodes:
            nodes.add(node)
            stack += node.next_functions


def _store_output_on_autograd_node(tensor: Tensor, output: ReturnedOutput) -> None:
    node, output_index = gradient_edge_of(tensor)
    # Metadata of a node lives as long as the graph, even if the user drops the tensor.
    node.metadata.setdefault(_METADATA_KEY, {})[output_index] = output


def _get_autograd_edge_output(node: Any, output_index: int) -> ReturnedOutput | None:
    output: ReturnedOutput | None = None
    if node is not None:
        output = node.metadata.get(_METADATA_KEY, {}).get(output_index)
    return output
