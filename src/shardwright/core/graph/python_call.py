"""Python code that runs around a captured graph: it reads and changes the user's objects, and
rebuilds the result of `forward` from the outputs of the graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.graph.host_numbers import HostNumbers
from shardwright.core.torch_internals.dynamo import DynamoCapture
from shardwright.core.torch_internals.dynamo_guards import Guards

ONCE_PER_BATCH = (
    "`forward` reads or changes Python state once per batch, but micro-batches whose losses are"
    " summed (`loss_reduction='sum'`) are calls of their own\n"
    "plan with loss_reduction='mean', or with micro_batches=1"
)
"""Error message for models that read or change Python state, if each micro-batch is a separate
call."""


def number_tensor(number: float | bool) -> Tensor:
    """Return a tensor without dimensions, of the dtype that PyTorch infers from a Python number."""
    # float64, in which Dynamo passes floats, so that no digit is lost.
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return torch.tensor(number, dtype=dtypes[type(number)])


ConstantsProgram = Callable[[Mapping[str, Tensor]], tuple[Sequence[Any], Mapping[str, Tensor]]]
"""Function that runs a graph with the given values of its constants, by name.

Returns (outputs of the graph, buffers of the model by name).
"""


@dataclass(frozen=True, eq=False)
class PythonCall:
    """Python code and state of one captured call, as TorchDynamo recorded them.

    Args:
        capture: Dynamo's bytecode, which replays side effects and rebuilds the result.
        guards: guards on the Python state that the call has read.
        state: tensors in plain attributes, containers and global variables are inputs of Dynamo's
            graph, but constants of `Graph`: maps the name of the constant to the index of the
            input.
        numbers: operations on Python numbers that change between calls.
        number_constants: Python numbers are nodes of Dynamo's graph, but constants of `Graph`: maps
            the name of the constant to the node.
        outputs: for each output of Dynamo's graph, its index in `Graph.outputs`; the name of a
            buffer if the output is only assigned to it; None for a number.
        changes_objects: whether the call changes Python objects besides the model's buffers.
        stored: indices of the outputs of the graph that the call stores in Python objects, or reads
            as numbers.
        assigned: names of the buffers to which the call assigns tensors.
    """

    capture: DynamoCapture
    guards: Guards
    state: Mapping[str, int]
    numbers: HostNumbers
    number_constants: Mapping[str, fx.Node]
    outputs: tuple[int | str | None, ...]
    changes_objects: bool
    stored: frozenset[int]
    assigned: frozenset[str]

    @property
    def depends_on_calls(self) -> bool:
        """Whether the call reads or changes Python state.

        Then two calls with halves of a batch may differ from one call with the full batch.
        """
        return self.changes_objects or bool(self.current)

    @property
    def current(self) -> frozenset[str]:
        """Names of the constants of the graph whose values are read in each call."""
        return frozenset((*self.state, *self.number_constants))

    @property
    def read_outputs(self) -> frozenset[int]:
        """Indices of the outputs of the graph that Python code reads as numbers."""
        sources = (self.outputs[index] for index in self.numbers.added_outputs)
        return frozenset(source for source in sources if isinstance(source, int))

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
            return self._bytecode_function(owner, *args, **kwargs)
        finally:
            self._program_stack.pop()

    @cached_property
    def _program_stack(self) -> list[ConstantsProgram]:
        return []

    @cached_property
    def _bytecode_function(self) -> Callable[..., Any]:
        # The bytecode finds its program in the global variables of the user's module, which must
        # not keep this object alive.
        reference = weakref.ref(self)

        def outputs(*inputs: Any) -> list[Any]:
            call = reference()
            assert call is not None
            return call._run_program(inputs)

        return self.capture.around(outputs)

    def _run_program(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the current program in place of Dynamo's graph: map its inputs to its outputs."""
        numbers = self.numbers.values(inputs)
        constants = {name: inputs[index] for name, index in self.state.items()}
        for name, node in self.number_constants.items():
            constants[name] = number_tensor(numbers[node])
        outputs, buffers = self._program_stack[-1](constants)
        results: list[Any] = []
        for index, source in enumerate(self.outputs):
            if source is None:
                # Not yet known if it comes from a tensor; it is then set below.
                results.append(numbers.get(self.numbers.outputs[index]))
            else:
                results.append(buffers[source] if isinstance(source, str) else outputs[source])
        if self.numbers.items:
            # After the loop, as these numbers are read from its results.
            self.numbers.add_values_of_tensors(numbers, results)
            for index, node in self.numbers.outputs.items():
                results[index] = numbers[node]
        return results
