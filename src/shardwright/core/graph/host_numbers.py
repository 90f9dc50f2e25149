"""Operations on Python numbers in a graph of TorchDynamo, which run outside of the program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True, eq=False)
class HostNumbers:
    """Operations of a graph on Python numbers, which run in Python on every rank.

    A *host number* is an input of the graph, or the result of an `item` call that only Python code
    reads, as in `losses.append(loss.item())`. The tensor of such a call becomes a graph output.

    Args:
        inputs: index of each graph input that is a number, by node.
        nodes: the operations on these inputs, in order.
        read: nodes of the numbers that tensor operators read.
        outputs: the graph outputs that are numbers, by index.
        items: for each `item` call that only Python code reads, the index of the graph output on
            which it is called.
        later: the operations that read results of `items`, in order.
    """

    inputs: Mapping[fx.Node, int]
    nodes: tuple[fx.Node, ...]
    read: tuple[fx.Node, ...]
    outputs: Mapping[int, fx.Node]
    items: Mapping[fx.Node, int]
    later: tuple[fx.Node, ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> HostNumbers:
        """Find the operations on Python numbers in a graph that Dynamo recorded.

        Adds an output to the graph for each tensor in `items`.
        """
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        inputs = {node: i for i, node in enumerate(placeholders) if _is_python_number(node)}
        nodes = _find_operations_on_numbers(inputs, graph)
        first = {*inputs, *nodes}
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        items, later = _find_item_calls(graph, first, output)
        numbers = {*first, *items, *later}
        read = [n for n in (*inputs, *nodes) if _is_number_read_by_operator(n, numbers, output)]
        outputs = {i: n for i, n in enumerate(output.args[0]) if n in numbers}
        # Behind Dynamo's own outputs, which its bytecode reads by their indices.
        indices = {item: _add_tensor_output(graph, item, output) for item in items}
        return cls(inputs, nodes, tuple(read), outputs, indices, later)

    @property
    def all(self) -> frozenset[fx.Node]:
        """Nodes of the graph whose values are Python numbers."""
        return frozenset((*self.inputs, *self.nodes, *self.items, *self.later))

    @property
    def added_outputs(self) -> frozenset[int]:
        """Indices of the graph outputs added for `items`; Dynamo's bytecode does not read these."""
        return frozenset(self.items.values())

    def values(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """Compute the numbers that do not come from tensors, by node, from the inputs of the
        graph."""
        values: dict[fx.Node, Any] = {}
        for node, index in self.inputs.items():
            number = inputs[index]
            # Dynamo passes floats as tensors without dimensions.
            values[node] = number.item() if isinstance(number, Tensor) else number
        _run_number_operations(self.nodes, values)
        return values

    def add_values_of_tensors(self, values: dict[fx.Node, Any], outputs: Sequence[Any]) -> None:
        """Add the numbers that come from tensors to `values`.

        Args:
            values: the numbers that do not come from tensors, by node; extended in place.
            outputs: the outputs of the graph.
        """
        # Reading a tensor waits for the device, so it follows the operators of the program.
        values |= {node: outputs[index].item() for node, index in self.items.items()}
        _run_number_operations(self.later, values)

    def examples_of_tensors(self) -> dict[fx.Node, Any]:
        """Return a placeholder for each number that comes from a tensor, by node: 1, in its
        type."""
        return {node: _make_example_number(node) for node in (*self.items, *self.later)}


def _find_operations_on_numbers(
    operands: Collection[fx.Node], graph: fx.Graph
) -> tuple[fx.Node, ...]:
    """Return the operations of a graph on numbers in `operands` and on their results."""
    # A dictionary as a set that keeps the order of the nodes.
    numbers = dict.fromkeys(operands)
    for node in graph.nodes:
        # A node without operands creates a value, and is no operation on numbers.
        reads = node.all_input_nodes
        if reads and numbers.keys() >= set(reads) and _is_operation_on_numbers(node):
            numbers.setdefault(node)
    return tuple(node for node in numbers if node not in operands)


def _is_operation_on_numbers(node: fx.Node) -> bool:
    # Dynamo returns a float as a tensor.
    is_number = _is_symbolic_number(node) or node.target is torch.scalar_tensor
    return node.op in ("call_function", "call_method") and is_number


def _find_item_calls(
    graph: fx.Graph, numbers: Collection[fx.Node], output: fx.Node
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Find the calls of `item` whose results only Python code reads.

    Args:
        numbers: nodes of the numbers that do not come from tensors.
        output: the output node of the graph.

    Returns:
        The calls, and the operations on their results.
    """
    # On a float input, which is a tensor for Dynamo, `item` reads nothing from the device.
    items = [n for n in graph.nodes if _reads_tensor_value(n) and n.args[0] not in numbers]
    while True:
        later = _find_operations_on_numbers((*numbers, *items), graph)
        on_host = {*items, *later, output}
        # If an operator on tensors reads an item, operations that combine it with other items are
        # not on the host either, so repeat until nothing changes.
        read_outside = _find_nodes_read_by_tensor_operators(graph, on_host)
        remaining = [item for item in items if item not in read_outside]
        if remaining == items:
            return tuple(items), later
        items = remaining


def _find_nodes_read_by_tensor_operators(
    graph: fx.Graph, on_host: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the nodes that operators on tensors read, also through operations in `on_host`.

    Args:
        on_host: nodes of operations on Python numbers.
    """
    read_outside: set[fx.Node] = set()
    # Users come after the node, so that one pass from the end suffices.
    for node in reversed(graph.nodes):
        if any(user not in on_host or user in read_outside for user in node.users):
            read_outside.add(node)
    return read_outside


def _reads_tensor_value(node: fx.Node) -> bool:
    is_call = node.op == "call_method" and node.target == "item" and _is_symbolic_number(node)
    return is_call and isinstance(node.args[0], fx.Node)


def _add_tensor_output(graph: fx.Graph, item: fx.Node, output: fx.Node) -> int:
    """Add the tensor on which `item` is called, detached, to the graph outputs; return its
    index."""
    (source,) = item.all_input_nodes
    with graph.inserting_before(item):
        tensor = graph.call_method("detach", (source,))
    tensor.meta = {**item.meta, "example_value": source.meta["example_value"].detach()}
    outputs: Any = output.args[0]
    output.args = ((*outputs, tensor),)
    return len(outputs)


def _run_number_operations(nodes: Sequence[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Run operations on Python numbers in order; read operands from `values`, and add results."""
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.target == "item":  # Dynamo passes floats as tensors without dimensions.
            values[node] = args[0]
        elif callable(node.target):
            values[node] = node.target(*args, **kwargs)
        else:
            # The target of a method call is the name of the method.
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)


def _make_example_number(node: fx.Node) -> Any:
    example = node.meta["example_value"]
    types = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    if isinstance(example, Tensor):
        return torch.ones((), dtype=example.dtype)
    return types[type(example)](1)


def _is_symbolic_number(node: fx.Node) -> bool:
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("example_value"), symbols)


def _is_python_number(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    # Dynamo makes a float64 tensor of a float input, and reads the number with `item`.
    is_float = isinstance(example, Tensor) and example.ndim == 0 and example.dtype == torch.float64
    items = (user.op == "call_method" and user.target == "item" for user in node.users)
    return _is_symbolic_number(node) or (is_float and bool(node.users) and all(items))


def numbers_of_body(graph: fx.Graph, inputs: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes of a sub-graph that are numbers if its placeholders `inputs` are."""
    return frozenset((*inputs, *_find_operations_on_numbers(inputs, graph)))


def _is_number_read_by_operator(
    number: fx.Node, numbers: Collection[fx.Node], output: fx.Node
) -> bool:
    return any(user not in numbers and user is not output for user in number.users)
