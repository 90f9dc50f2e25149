"""Calls of modules and functions that TorchDynamo records as one node of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch._dynamo import allow_in_graph
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
)
from torch._dynamo.variables.nn_module import record_nn_module_stack

Traced = TypeVar("Traced", bound=Callable[..., Any])


def as_one_call(function: Traced) -> Traced:
    """Make Dynamo record each call of `function` as one graph node, without tracing into it.

    During the trace, Dynamo calls `function` with fake tensors.
    """
    allowed: Traced = allow_in_graph(function)  # type: ignore[no-untyped-call]
    return allowed


@dataclass(frozen=True)
class ModuleCall:
    """A module call that Dynamo records as one graph node.

    Args:
        function: a result of `as_one_call`. Arguments: tuple of the module's positional arguments,
            dictionary of its keyword arguments, and list of the tensors in `names`.
        names: names of the parameters and buffers of the module that are passed.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]

    def in_graph(self, module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Add the module call as a node to the graph of a running trace. All arguments are objects
        of Dynamo."""
        keywords = {ConstantVariable.create(name): value for name, value in kwargs.items()}
        tensors = []
        for name in self.names:
            tensor = module
            # By Dynamo's own attributes, so that the tensor becomes an input of the graph.
            for attribute in name.split("."):
                tensor = tensor.var_getattr(tx, attribute)
            tensors.append(tensor)
        call = [TupleVariable(list(args)), ConstDictVariable(keywords), ListVariable(tensors)]
        submodule, source = module.value, module.get_nn_module_stack_source()
        # The node gets the path of the module, like the nodes of traced modules.
        with record_nn_module_stack(str(id(submodule)), source, tx, submodule):
            return TorchInGraphFunctionVariable(self.function).call_function(tx, call, {})
