"""Calls of planned models whose Python runs around the program: TorchDynamo's bytecode and guards.

Every rank runs the Python code of a call itself: it checks the guards of its cached programs,
replays side effects and rebuilds the result. A Python number becomes an input of the program once
its value has changed between calls, so that a step counter needs two programs and not one for each
step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.capture.autocast import Autocast
from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.naming import line_of_error
from shardwright.core.capture.python_capture import capture_python
from shardwright.core.capture.way_out import naming_local_map
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.python_call import ConstantsProgram, PythonCall
from shardwright.core.parallel.bound_program import BoundProgram, BoundStep
from shardwright.core.parallel.call import Call
from shardwright.core.parallel.number_names import names_of_sources
from shardwright.core.parallel.unavailable import error_of_use
from shardwright.core.torch_internals.dispatch import preserved_dispatch_keys
from shardwright.core.torch_internals.modules import alias_module, own_buffers, own_parameters
from shardwright.errors import CaptureError, PlanError, ShardwrightError

log = logging.getLogger(__name__)

MAX_PROGRAMS = 8
"""Maximum number of programs for calls that differ in Python state only, as of `torch.compile`."""

ProgramResults = tuple[Sequence[Any], Mapping[str, Tensor]]
"""(Outputs of the graph, buffers of the model by name)."""


class PythonCalls:
    """Executor of a planned model's captured Python code on this rank.

    Args:
        user_module: an instance of the user's class that shares the state of the planned module, as
            guards depend on the class.
        planned: the planned module, to which user code may refer.
        template: a copy of the module on the meta device, with the parameters of all stages.
        device: device on which the programs run.
    """

    def __init__(
        self,
        user_module: nn.Module,
        planned: nn.Module,
        template: nn.Module,
        device: torch.device,
    ) -> None:
        self._module = user_module
        self._planned = planned
        self._template = template
        self._device = device
        self._changing_numbers: frozenset[str] = frozenset()
        # Values of those that were constants in captures, as the trace needs their values.
        self._constant_numbers: dict[str, float] = {}
        # Those that were constants in captures for several values.
        self._never_inputs: frozenset[str] = frozenset()

    def of_copy(self, module: nn.Module, template: nn.Module) -> PythonCalls:
        """Return an executor of captured Python code for `module`, a copy of the planned module."""
        alias = alias_module(module, type(self._module))
        result = PythonCalls(alias, module, template, self._device)
        result._changing_numbers = self._changing_numbers
        result._constant_numbers = dict(self._constant_numbers)
        result._never_inputs = self._never_inputs
        return result

    def names_of_constant_numbers(self, python: PythonCall, call: Call) -> frozenset[str]:
        """Return the names of numbers that change but cannot be inputs of programs, such as sizes
        and counts of loops.

        Args:
            python: the latest capture.
            call: arguments of the captured call.
        """
        guards = python.guards
        scope = guards.names(guards.scope(self._module, *call))
        return names_of_sources(self._never_inputs, scope, self._module)

    def guards_hold(self, python: PythonCall | None, call: Call) -> bool:
        """Whether the guards of `python` hold for `call`; True without captured Python."""
        return python is None or python.guards.hold(self._module, *call)

    def matching_program_key(
        self,
        programs: Mapping[tuple[Any, ...], BoundProgram | BoundStep],
        specialization: tuple[Any, ...],
        call: Call,
        *,
        is_captured: bool = False,
    ) -> tuple[Any, ...]:
        """Return the key of the program whose guards hold for `call`, or the key for a new program.

        Args:
            programs: programs by key: `specialization`, then 1, 2, ... for further Python states.
            specialization: the part of the key that does not depend on Python state, such as
                shapes.
            call: arguments of the call.
            is_captured: whether a program has just been captured for the call, which is not yet
                in `programs`. What has changed for it is recorded already.

        Raises:
            PlanError: if `specialization` already has `MAX_PROGRAMS` programs.
        """
        failed: PythonCall | None = None
        for number in count():
            key = (*specialization, number) if number else specialization
            if key not in programs:
                break
            # A program without captured Python has no guards: `specialization` alone selects it.
            python = programs[key].python
            if python is None or self.guards_hold(python, call):
                return key
            # The last program is compared below: what changed before it was captured is recorded
            # already.
            failed = python
        if failed is not None and not is_captured:
            self._record_changed_numbers(failed, number, call)
        return key

    def _record_changed_numbers(
        self, last_program: PythonCall, num_programs: int, call: Call
    ) -> None:
        """Record which Python numbers have changed since the latest program was captured.

        The next capture makes them inputs of the program.

        Raises:
            PlanError: if there are already `MAX_PROGRAMS` programs.
        """
        guard = last_program.guards.first_failing_guard(self._module, *call).strip()
        # Otherwise a value that differs in every call would capture the model in every call.
        if num_programs == MAX_PROGRAMS:
            raise PlanError(
                f"`forward` of {type(self._module).__name__} depends on Python state that differs"
                f" between calls: {guard}\nkeep it in a tensor (`register_buffer`), or pass a"
                " tensor as an argument"
            )
        self._changing_numbers |= last_program.guards.changed_numbers(self._module, *call)
        log.info("another program is needed, as this no longer holds: %s", guard)

    def capture(self, call: Call, compute_dtype: torch.dtype | None, autocast: Autocast) -> Graph:
        """Capture the model in its current Python state.

        Args:
            call: arguments of the call.
            compute_dtype: dtype of the plan's mixed precision, or None.
            autocast: the caller's autocast region.

        Raises:
            CaptureError: if the model cannot be captured.
        """
        # Dynamo would trace into the executor, and guard on its caches.
        state = {name: value for name, value in vars(self._module).items() if name != "execution"}
        module = alias_module(self._module, type(self._module), state)
        captured = CapturedCall.of(module, *call, autocast, self._planned)
        with (
            # Frames are freed last, as they tell which module is refused.
            preserved_dispatch_keys(frees_frames=True),
            naming_local_map(module, *call),
            _fill_in_tensors_of_other_stages(module, self._template),
        ):
            try:
                graph = self._capture_with_numbers(captured, compute_dtype)
                assert graph.python is not None
                self._record_constant_numbers(graph.python)
                return graph
            except CaptureError:
                raise
            # Dynamo, and the user's code that it runs, may raise any error.
            except Exception as error:
                raise _make_capture_error(error, module) from error

    def _capture_with_numbers(
        self, captured: CapturedCall, compute_dtype: torch.dtype | None
    ) -> Graph:
        """Capture a call with as many changing numbers as possible as inputs of the program.

        A number that is a size or decides a branch cannot be an input. It stays a constant, and its
        next value needs another program; all other numbers can be inputs nevertheless.
        """
        numbers = self._changing_numbers - self._never_inputs
        for inputs in dict.fromkeys((numbers, numbers - frozenset(self._constant_numbers))):
            graph = _try_capture(captured, compute_dtype, inputs) if inputs else None
            if graph is not None:
                return graph
        latest_graph: Graph | None = None
        inputs = frozenset()
        # In one order, so that all ranks make the same program.
        for number in sorted(numbers) if len(numbers) > 1 else ():
            graph = _try_capture(captured, compute_dtype, inputs | {number})
            if graph is not None:
                latest_graph, inputs = graph, inputs | {number}
        if latest_graph is not None:
            return latest_graph
        return capture_python(captured, compute_dtype)

    def _record_constant_numbers(self, python: PythonCall) -> None:
        """Record which numbers that change are constants in a capture."""
        guards = python.guards
        # Dynamo makes constants of 0 and 1 in any case.
        constants = {
            source: value
            for source, value in guards.constants.items()
            if source in self._changing_numbers - guards.inputs and value not in (0, 1)
        }
        # A number that is compared with one value, as in `step == 100`, is a constant only then.
        self._never_inputs |= {
            source
            for source, value in constants.items()
            if self._constant_numbers.get(source, value) != value
        }
        self._constant_numbers |= constants

    def run(self, python: PythonCall, program: ConstantsProgram, call: Call) -> Any:
        """Run the captured Python code of a call; `program` replaces the tensor operations."""
        with _restore_buffers_on_exit(self._planned, python.assigned):
            return python.run(program, self._module, *call)

    def results(self, graph: Graph, outputs: Sequence[Any]) -> ProgramResults:
        """Return (outputs of a graph, the model's buffers) for the captured Python code.

        Outputs that `forward` stores in Python objects are gathered.
        """
        # Outputs beyond those of `forward` are stored in Python objects.
        first = graph.out_spec.num_leaves
        # Copies, as a program returns a parameter itself for `parameter.detach().clone()`.
        stored = [
            _gather_unless_differentiable(output, copy_ordinary=True)
            if isinstance(output, Tensor)
            else output
            for output in outputs[first:]
        ]
        return [*outputs[:first], *stored], dict(self._module.named_buffers())

    def on_device(self, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `constants` on the device of the programs, gathered to full tensors unless they
        require gradients."""
        return {
            name: _gather_unless_differentiable(tensor).to(self._device)
            for name, tensor in constants.items()
        }


def _try_capture(
    captured: CapturedCall, compute_dtype: torch.dtype | None, numbers: frozenset[str]
) -> Graph | None:
    """Capture a call with `numbers` as inputs of the program; None if that is impossible."""
    try:
        return capture_python(captured, compute_dtype, numbers)
    # Dynamo, and the user's code that it runs, may raise any error.
    except Exception as error:
        log.debug("%s cannot be inputs: %s", ", ".join(sorted(numbers)), error)
        return None


@contextmanager
def _restore_buffers_on_exit(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Within the context, let `forward` assign buffers `names`; restore them at the end.

    The program writes the new values into the old buffers instead.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    for path, _, name in (name.rpartition(".") for name in names):
        buffers: dict[str, Any] = own_buffers(module.get_submodule(path))
        before.append((buffers, name, buffers[name]))
    try:
        yield
    finally:
        for buffers, name, tensor in before:
            buffers[name] = tensor


@contextmanager
def _fill_in_tensors_of_other_stages(module: nn.Module, template: nn.Module) -> Iterator[None]:
    """Within the context, replace the missing tensors of `module` by meta tensors of `template`.

    Parameters and buffers that only other pipeline stages own are missing.
    """
    filled: list[tuple[dict[str, Any], str]] = []
    templates = dict(template.named_modules())
    for path, child in module.named_modules():
        if path not in templates:
            continue
        for tensors_of in (own_parameters, own_buffers):
            tensors: dict[str, Any] = {**tensors_of(templates[path])}
            current: Any = tensors_of(child)
            missing = [n for n, t in tensors.items() if t is not None and current.get(n, t) is None]
            current.update((name, tensors[name]) for name in missing)
            filled += [(current, name) for name in missing]
    try:
        yield
    finally:
        for current, name in filled:
            current[name] = None


def _gather_unless_differentiable(tensor: Tensor, copy_ordinary: bool = False) -> Tensor:
    if tensor.requires_grad:
        return tensor
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor.clone() if copy_ordinary else tensor


def _make_capture_error(error: Exception, module: nn.Module) -> ShardwrightError:
    values = [value for child in module.modules() for value in vars(child).values()]
    use = error_of_use(error, values)
    if use is not None:
        return use
    # Messages of Dynamo go on with the user's stack and hints over many lines.
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return CaptureError(
        f"{line_of_error(error)}: `forward` of {type(module).__name__} cannot be captured in its"
        f" current Python state: {first}"
    )
