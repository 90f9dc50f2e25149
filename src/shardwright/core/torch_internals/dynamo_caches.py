"""Check functions under `functools.lru_cache` in a trace: TorchDynamo ignores their caches.

Ignoring the cache is correct if the function draws no random numbers and has no side effects, and
if its result is not mutated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import WrapperUserFunctionVariable


@dataclass
class CachedFunctionCalls:
    """The calls of cached functions in one trace.

    Args:
        impure: names of functions that behave differently without their cache, in order.
        running: stack of names of the cached functions that are being traced.
        results: objects that cached functions have created, with the name of the function, by id.
    """

    impure: dict[str, None] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    results: dict[int, tuple[VariableTracker, str]] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records the calls of cached functions in a trace."""
        call = WrapperUserFunctionVariable.call_function
        check = SideEffects.check_allowed_side_effect

        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            # The attribute that all functions under `lru_cache` have.
            if hasattr(variable.wrapper_obj, "cache_info"):
                with self.call_of(str(variable.wrapper_obj.__qualname__), tx.output.graph):
                    result = call(variable, tx, args, kwargs)
                self.record_result(result, str(variable.wrapper_obj.__qualname__), tx)
                return result
            return call(variable, tx, args, kwargs)

        def checked(effects: SideEffects, item: VariableTracker) -> bool:
            # Dynamo asks before each change of an object.
            self.record_change(item)
            return check(effects, item)

        with (
            patch.object(WrapperUserFunctionVariable, "call_function", called),
            patch.object(SideEffects, "check_allowed_side_effect", checked),
        ):
            yield

    @contextmanager
    def call_of(self, name: str, graph: fx.Graph) -> Iterator[None]:
        """Context manager for the trace of one cached function, which records random draws.

        Args:
            name: name of the function.
            graph: Dynamo's graph of the running trace.
        """
        # The nodes that the call adds follow these in the graph.
        num_nodes = len(graph.nodes)
        self.running.append(name)
        try:
            yield
        finally:
            self.running.pop()
        if any(map(_draws_random_numbers, islice(graph.nodes, num_nodes, None))):
            self.impure[name] = None

    def record_result(self, result: Any, name: str, tx: Any) -> None:
        """Record the objects that a cached function has created and returned.

        Args:
            result: Dynamo's variable of the result.
            name: name of the function.
            tx: Dynamo's translator of the running trace.
        """

        def record(variable: VariableTracker) -> None:
            if _was_created_in_trace(variable):
                # With the variable, so that its id is not reused during the trace.
                self.results[id(variable)] = variable, name

        VariableTracker.visit(record, result, side_effects=tx.output.side_effects)

    def record_change(self, item: VariableTracker) -> None:
        """Record a mutation of an object by a cached function, or of a cached function's result.

        Args:
            item: Dynamo's variable of the mutated object.
        """
        # An object from before the trace, as a cached function changes it in its first call only.
        if self.running and not _was_created_in_trace(item):
            self.impure[self.running[-1]] = None
        elif id(item) in self.results:
            self.impure[self.results[id(item)][1]] = None


def _was_created_in_trace(variable: VariableTracker) -> bool:
    """Whether the object that a Dynamo variable represents was created during the trace."""
    # Dynamo's classes are `ValueMutationNew`, `AttributeMutationNew`, and the same with `Existing`.
    return type(variable.mutation_type).__name__.endswith("New")


def _draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node calls a function or method of torch that draws random numbers."""
    name = str(getattr(node.target, "__name__", node.target))
    # Functions and methods of torch have the names of their ATen operators.
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None or node.op not in ("call_function", "call_method"):
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
