"""Python code around a captured graph: state that a call reads, changes and returns besides
tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.torch_internals.dynamo import DynamoCapture, Guards


@dataclass(frozen=True, eq=False)
class HostNumbers:
    """Operations of a graph on Python numbers, which run in Python on every rank.

    Args:
        inputs: the graph inputs that are numbers, each with its index.
        nodes: the operations, in order.
        read: nodes of the numbers that operators on tensors read.
        outputs: the graph outputs that are numbers, by index.
    """

    inputs: Mapping[fx.Node, int]
    nodes: tuple[fx.Node, ...]
    read: tuple[fx.Node, ...]
    outputs: Mapping[int, fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph) -> HostNumbers:
        """Return the numbers of a graph that Dynamo recorded."""
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        inputs = {node: i for i, node in enumerate(placeholders) if _is_python_number(node)}
        numbers, nodes = set(inputs), list[fx.Node]()
        for node in graph.nodes:
            reads = node.all_input_nodes
            is_operation = node.op in ("call_function", "call_method")
            # Dynamo returns a float as a tensor.
            is_number = _is_symbolic_number(node) or node.target is torch.scalar_tensor
            if is_operation and reads and numbers.issuperset(reads) and is_number:
                numbers.add(node)
                nodes.append(node)
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        read = [n for n in (*inputs, *nodes) if _is_number_read_by_operator(n, numbers, output)]
        outputs = {i: n for i, n in enumerate(output.args[0]) if n in numbers}
        return cls(inputs, tuple(nodes), tuple(read), outputs)

    @property
    def all(self) -> frozenset[fx.Node]:
        """Nodes of the graph whose values are Python numbers."""
        return frozenset((*self.inputs, *self.nodes))

    def values(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """Return the value of each number, computed from the inputs of the graph."""
        values: dict[fx.Node, Any] = {}
        for node, index in self.inputs.items():
            number = inputs[index]
            values[node] = number.item() if isinstance(number, Tensor) else number
        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target == "item":  # Dynamo passes floats as tensors without dimensions.
                values[node] = args[0]
            elif callable(node.target):
                values[node] = node.target(*args, **kwargs)
            else:
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        return values


def _is_symbolic_number(node: fx.Node) -> bool:
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("example_value"), symbols)


def _is_python_number(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    is_float = isinstance(example, Tensor) and example.ndim == 0 and example.dtype == torch.float64
    items = (user.op == "call_method" and user.target == "item" for user in node.users)
    return _is_symbolic_number(node) or (is_float and bool(node.users) and all(items))


def _is_number_read_by_operator(number: fx.Node, numbers: set[fx.Node], output: fx.Node) -> bool:
    return any(user not in numbers and user is not output for user in number.users)


ONCE_PER_BATCH = (
    "`forward` reads or changes Python state, which micro-batches and pipeline stages would do"
    " several times per batch\nplan with micro_batches=1 and stages=1, or keep the state in buffers"
    " (`register_buffer`)"
)
"""Error message for a call that depends on Python state and would run several times per batch."""


def number_tensor(number: float | bool) -> Tensor:
    """Return a tensor without dimensions, of the dtype that PyTorch infers from a Python number."""
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return torch.tensor(number, dtype=dtypes[type(number)])


ConstantsProgram = Callable[[Mapping[str, Tensor]], tuple[Sequence[Any], Mapping[str, Tensor]]]
"""Function that runs a graph: maps the current values of the constants, by name, to (outputs of the
graph, buffers of the model by name)."""


@dataclass(frozen=True, eq=False)
class PythonCall:
    """Python code and state of one captured call, as TorchDynamo recorded them.

    Args:
        capture: Dynamo's bytecode, which replays side effects and rebuilds the result.
        guards: guards on the Python state that the call has read.
        state: index of the input of Dynamo's graph that a constant replaces, by name of the
            constant. The input is a tensor in a plain attribute, a container or a global variable.
        numbers: operations on Python numbers that change between calls.
        number_constants: node of the Python number that a constant replaces, by name of the
            constant.
        outputs: for each output of Dynamo's graph, the index in the outputs of the graph, or the
            name of the buffer to which the output is assigned; None for a number.
        changes_objects: whether the call changes Python objects besides the model's buffers.
    """

    capture: DynamoCapture
    guards: Guards
    state: Mapping[str, int]
    numbers: HostNumbers
    number_constants: Mapping[str, fx.Node]
    outputs: tuple[int | str | None, ...]
    changes_objects: bool

    @property
    def depends_on_calls(self) -> bool:
        """Whether two calls with halves of a batch may give other results than one call with the
        full batch, because of Python state."""
        return self.changes_objects or bool(self.current)

    @property
    def current(self) -> frozenset[str]:
        """Names of the constants of the graph whose values are read in each call."""
        return frozenset((*self.state, *self.number_constants))

    def run(
        self, program: ConstantsProgram, owner: object, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the user's `forward` with `program` in place of its tensor operations.

        Args:
            program: function from the current tensors of `state` and `number_constants` to the
                outputs of the graph and the buffers of the model.
            owner: the model, as an instance of the user's class.
            args, kwargs: arguments of the call.
        """
        # A stack, as `forward` of one model may call another model.
        self._program_stack.append(program)
        try:
            return self._call_from_bytecode(owner, *args, **kwargs)
        finally:
            self._program_stack.pop()

    @cached_property
    def _program_stack(self) -> list[ConstantsProgram]:
        return []

    @cached_property
    def _call_from_bytecode(self) -> Callable[..., Any]:
        # The bytecode finds its program in the global variables of the user's module, which must
        # not keep this object alive.
        reference = weakref.ref(self)

        def outputs(*inputs: Any) -> list[Any]:
            call = reference()
            assert call is not None
            return call._graph_outputs(inputs)

        return self.capture.around(outputs)

    def _graph_outputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of Dynamo's graph for the inputs of that graph."""
        numbers = self.numbers.values(inputs)
        constants = {name: inputs[index] for name, index in self.state.items()}
        for name, node in self.number_constants.items():
            constants[name] = number_tensor(numbers[node])
        outputs, buffers = self._program_stack[-1](constants)
        results: list[Any] = []
        for index, source in enumerate(self.outputs):
            if source is None:
                results.append(numbers[self.numbers.outputs[index]])
            else:
                results.append(buffers[source] if isinstance(source, str) else outputs[source])
        return results
