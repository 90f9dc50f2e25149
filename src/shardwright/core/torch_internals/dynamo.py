"""Graph, guards and bytecode that TorchDynamo captures in one call of a Python function.

`fullgraph_capture`, the entry point below `torch.compile` and `aot_compile`, executes the bytecode
of a function symbolically. It returns a graph of the tensor operations, bytecode that replays side
effects and rebuilds the function's result, and guards on all Python state that the function read.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from types import FunctionType, MappingProxyType
from typing import Any
from unittest.mock import patch

from torch import Tensor, fx
from torch._dynamo import config
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture, get_traced_fn
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.hooks import Hooks
from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables import (
    TensorVariable,
    UnspecializedNNModuleVariable,
    builder,
)
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import (
    DebuggingVariable,
    NumpyVariable,
)

from shardwright.core.torch_internals.dynamo_attributes import (
    assigning_to_namespaces,
    guarding_missing_attributes,
)
from shardwright.core.torch_internals.dynamo_caches import CachedFunctionCalls
from shardwright.core.torch_internals.dynamo_containers import (
    replay_all_contents,
    tracing_existing_containers,
)
from shardwright.core.torch_internals.dynamo_guards import Guards
from shardwright.core.torch_internals.dynamo_instructions import (
    Decide,
    deciding_branches,
    tracing_leaves,
)
from shardwright.core.torch_internals.dynamo_library_calls import (
    iterate_logger_methods,
    print_after_graph,
    trace_conversion_to_numpy,
    trace_function_call,
    trace_numpy_call,
)
from shardwright.core.torch_internals.dynamo_module_calls import ModuleCall
from shardwright.core.torch_internals.dynamo_side_effects import ChangedObject, find_changed_objects

_OPTIONS: dict[str, Any] = {
    # Every size and number is a constant of the graph, unless it was seen to change.
    "specialize_int": True,
    "specialize_float": True,
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    # Recurrent layers and numbers read from tensors are traced: the passes behind Dynamo handle or
    # refuse them with an error of this library.
    "allow_rnn": True,
    # Gradients in `forward` would become `.grad` of parameters, and numpy's scalars, of which the
    # state of a model may consist, tensors with their dtype.
    "trace_autograd_ops": False,
    "trace_numpy": False,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    # Forward hooks may be registered between calls.
    "skip_nnmodule_hook_guards": False,
    "replay_side_effects": True,
    "side_effect_replay_policy": "silent",
    "error_on_nested_fx_trace": False,
    "reorderable_logging_functions": {print},
    "suppress_errors": False,
}

_DYNAMIC_NUMBERS: dict[str, Any] = {
    "specialize_int": False,
    "specialize_float": False,
    "automatic_dynamic_shapes": True,
    "allow_unspec_int_on_nn_module": True,
}

_CHECKED_BY_CALLER = frozenset(
    (
        # Relations of parameters and arguments, which are other tensors at run time.
        *("NO_TENSOR_ALIASING", "DUPLICATE_INPUT", "STORAGE_OVERLAPPING"),
        # Modes around the call; programs are keyed by those that change results.
        *("DEFAULT_DEVICE", "TORCH_FUNCTION_STATE", "AUTOGRAD_SAVED_TENSORS_HOOKS"),
        *("DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "GRAD_MODE"),
    )
)


@contextmanager
def _with_capture_options(numbers: frozenset[str]) -> Iterator[None]:
    """Context manager with the options for capture and for building guards.

    Args:
        numbers: Dynamo sources of Python numbers that become inputs of the graph.
    """

    def size_entry(tx: Any, name: str, entry: FrameStateSizeEntry, **_: Any) -> Any:
        # As if the number had been seen to change, so that Dynamo makes it an input of the graph.
        return FrameStateSizeEntry(scalar=auto_dynamic) if name in numbers else entry

    options = {**_OPTIONS, **(_DYNAMIC_NUMBERS if numbers else {})}
    # These return None and would break the graph; Dynamo leaves out their calls.
    options["ignore_logging_functions"] = {*iterate_logger_methods(), warnings.warn}
    with (
        config.patch(**options),
        # Dynamo records metrics while it traces, which is an error outside of this context.
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
        patch.object(builder, "process_automatic_dynamic", size_entry),
    ):
        yield


@dataclass(frozen=True, eq=False)
class DynamoCapture:
    """One call of a function, captured by Dynamo.

    Methods take the arguments of another call of the function: `owner` is its `self`, `args` and
    `kwargs` are its other arguments.

    Args:
        output: Dynamo's graph, bytecode and the state from which guards are built.
        function: the traced function; for a method the underlying function.
        changes: objects that existed before the call and that the call changes.
        impure_caches: names of functions under `functools.lru_cache` that behave differently
            without their cache. Dynamo traces into these functions as if they had no cache.
        registers_hooks: whether the call registers hooks on tensors that existed before, such as
            parameters.
    """

    output: CaptureOutput
    function: FunctionType
    changes: tuple[ChangedObject, ...]
    impure_caches: tuple[str, ...]
    registers_hooks: bool = False

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        numbers: frozenset[str] = frozenset(),
        module_calls: Mapping[int, ModuleCall] = MappingProxyType({}),
        decide_branch: Decide = lambda file, positions: None,
    ) -> DynamoCapture:
        """Trace `function(*args, **kwargs)` without executing tensor operations.

        Args:
            numbers: Dynamo sources of Python numbers that become inputs of the graph.
            module_calls: calls of modules that are recorded as one node, by the id of the module.
            decide_branch: function that decides branches on the values of tensors.

        Raises:
            TorchDynamoException: if Dynamo cannot trace the function as one graph.
        """
        changes: list[ChangedObject] = []
        hooks: list[object] = []
        cached = CachedFunctionCalls()
        emit = SideEffects.codegen_update_mutated

        def recorded(self: SideEffects, *args: Any, **kwargs: Any) -> None:
            # Dynamo forgets them once the code is written.
            changes[:], hooks[:] = find_changed_objects(self), self.tensor_hooks.values()
            replay_all_contents(self)
            emit(self, *args, **kwargs)

        call_module = UnspecializedNNModuleVariable.call_function
        wrap_float = builder.VariableBuilder.wrap_symfloat

        def wrapped_float(self: Any, value: Any) -> Any:
            # Also for a custom autograd function that is the first to read the float: in its own
            # sub-graph, Dynamo could not pass the number to others.
            output = self.tx.output
            with patch.object(output, "tracers", output.tracers[:1]):
                return wrap_float(self, value)

        def called_module(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if id(self.value) in module_calls:
                return module_calls[id(self.value)].in_graph(self, tx, args, kwargs)
            return call_module(self, tx, args, kwargs)

        with (
            _with_capture_options(numbers),
            patch.object(SideEffects, "codegen_update_mutated", recorded),
            cached.recording(),
            guarding_missing_attributes(),
            assigning_to_namespaces(),
            tracing_existing_containers(),
            deciding_branches(decide_branch),
            tracing_leaves(),
            patch.object(NumpyVariable, "call_function", trace_numpy_call),
            patch.object(TensorVariable, "method_numpy", trace_conversion_to_numpy),
            patch.object(DebuggingVariable, "call_function", print_after_graph),
            patch.object(UnspecializedNNModuleVariable, "call_function", called_module),
            patch.object(UserFunctionVariable, "call_function", trace_function_call),
            patch.object(builder.VariableBuilder, "wrap_symfloat", wrapped_float),
        ):
            output = fullgraph_capture(function, args, dict(kwargs))
        traced, _ = get_traced_fn(function)
        variables = traced.__globals__
        # A global variable of the function's own module, which Dynamo's source does not name.
        located = [replace(c, value=variables) if c.value is None else c for c in changes]
        return cls(output, traced, tuple(located), tuple(cached.impure), bool(hooks))

    @property
    def graph_module(self) -> fx.GraphModule | None:
        """Graph of the tensor operations; None if the call has no tensor operation."""
        graph_input = self.output.backend_input
        return None if graph_input is None else graph_input.graph_module

    @cached_property
    def specialized_numbers(self) -> frozenset[str]:
        """Dynamo sources of the numbers that were to be inputs, but of which the trace needs the
        values, as of the count of a loop."""
        shapes = self.output.graph_capture_output.output_graph.shape_env
        return frozenset(
            source
            for source, symbol in shapes.source_to_var.items()
            if shapes.replacements.get(symbol, symbol).is_number
        )

    @cached_property
    def signature(self) -> inspect.Signature:
        """Signature of the traced function itself, not of a function that it wraps."""
        return inspect.signature(self.function, follow_wrapped=False)

    def scope(self, owner: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments and closure variables at the start of a call, by name."""
        call = self.signature.bind(owner, *args, **kwargs)
        call.apply_defaults()
        cells = zip(
            self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True
        )
        return {**call.arguments, **{name: cell.cell_contents for name, cell in cells}}

    def around(self, program: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """Make a copy of the traced function in which `program` replaces the tensor operations.

        The copy takes the same arguments, with `self` first, replays the side effects on Python
        objects, and returns the same result. `program` maps inputs of the graph to its outputs.
        """
        assert self.output.backend_input is not None
        captured = self.output.graph_capture_output
        environment = captured.get_runtime_env()
        # `global` statements write to the dictionary that the code runs in: it must be the module's
        # own. Dynamo's names in it are unique.
        scope = self.function.__globals__
        for name, value in captured.f_globals.items():
            scope.setdefault(name, value)
        for name, value in environment.used_globals.items():
            # Dynamo's own names begin with two underscores; all others are those of the module.
            if name.startswith("__"):
                scope.setdefault(name, value)
        for alias, module in captured.import_sources.items():
            scope.setdefault(alias, import_module(module))
        backend_id = self.output.backend_input.backend_id
        scope[backend_id] = program
        around = FunctionType(
            captured.bytecode, scope, argdefs=captured.argdefs, closure=captured.closure
        )
        # Before Python 3.13 `FunctionType` takes no defaults of keyword-only arguments.
        around.__kwdefaults__ = captured.kwdefaults
        # The global variable keeps `program` alive no longer than the function that calls it.
        weakref.finalize(around, _delete_global_if_unchanged, scope, backend_id, program)
        return around

    def inputs(self, owner: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the graph inputs of a call, without running its tensor operations or side
        effects."""
        flat: list[Any] = []

        def program(*inputs: Any) -> Sequence[Any]:
            flat.extend(inputs)
            raise _InputsReachedError

        try:
            self.around(program)(owner, *args, **kwargs)
        except _InputsReachedError:
            return flat
        raise AssertionError("Dynamo's bytecode does not call its graph\nreport this as a bug")

    def guards(
        self,
        owner: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        numbers: frozenset[str],
        unguarded: frozenset[int],
    ) -> Guards:
        """Build guards on the Python state that the traced call read.

        The arguments must be in the same state as at the start of the trace.

        Args:
            numbers: Dynamo sources of Python numbers that are inputs of the graph.
            unguarded: ids of tensors without guards, which callers compare instead. Guards would
                fail, since parameters become DTensors and arguments may be local shards.
        """
        captured = self.output.graph_capture_output
        scope = self.scope(owner, args, kwargs)
        # Dynamo builds each guard from the object that its source denotes in this scope.
        captured.output_graph.local_scope.update(scope)
        for guard in captured.output_graph.guards:
            # Reset guards that were built for other objects, such as the traced copy.
            guard.guard_types = guard.code_list = None
            guard.guarded_class_weakref = guard.obj_weakref = None
        constants: dict[str, Any] = {}
        build, is_filtered = CheckFunctionManager.build_guards, False

        def built(self: CheckFunctionManager, guards: list[Any], *args: Any, **kwargs: Any) -> Any:
            # Dynamo first builds all guards for `keep`, which needs none.
            return build(self, guards if is_filtered else [], *args, **kwargs)

        def keep(entries: Sequence[Any]) -> list[bool]:
            nonlocal is_filtered
            is_filtered = True
            for entry in entries:
                # Not `isinstance`: booleans are integers, but never become inputs of the graph.
                if entry.has_value and type(entry.value) in (int, float):
                    constants[entry.orig_guard.name] = entry.value
            return [_needs_guard(entry, unguarded) for entry in entries]

        with (
            _with_capture_options(numbers),
            patch.object(CheckFunctionManager, "build_guards", built),
        ):
            manager = captured.build_guards(
                self.function.__code__, hooks=Hooks(guard_filter_fn=keep)
            )
        captured.output_graph.local_scope.clear()  # Otherwise the scope would keep the batch alive.
        inputs = numbers - self.specialized_numbers
        return Guards(self.scope, self.function.__globals__, manager, constants, inputs)


def _delete_global_if_unchanged(scope: dict[str, Any], name: str, value: object) -> None:
    """Delete `scope[name]` unless the value has been replaced since."""
    if scope.get(name) is value:
        del scope[name]


class _InputsReachedError(Exception):
    """Raised to stop captured bytecode before it runs the graph, when it has read all inputs."""


def _needs_guard(entry: Any, unguarded: frozenset[int]) -> bool:
    """Whether to build the guard `entry`.

    No guard is built for tensors with an `id()` in `unguarded`, or of a type in
    `_CHECKED_BY_CALLER`: the caller of the captured graph compares these tensors.
    """
    if isinstance(entry.value, Tensor) and id(entry.value) in unguarded:
        return False
    # `module.to(x.device)` looks at gradients, which the traced copy lacks, and moves nothing.
    stack = entry.orig_guard.user_stack
    if entry.name.endswith(".grad") and stack and stack[-1].name == "_apply":
        return False
    return entry.guard_type not in _CHECKED_BY_CALLER
