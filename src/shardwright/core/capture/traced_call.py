"""TorchDynamo's trace of a call of a model, and what the call returns and stores."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.cumulative_averages import average_on_tensors
from shardwright.core.capture.local_map import calls_in_graph, calls_of_modules
from shardwright.core.capture.outer_references import OuterReferences
from shardwright.core.capture.python_refusals import (
    assigned_buffers,
    check_changes,
    check_state,
    module_slots,
)
from shardwright.core.capture.replay import drop_assertions
from shardwright.core.capture.static_modules import make_static
from shardwright.core.capture.undone_effects import find_tensors, undone_effects
from shardwright.core.capture.value_guards import decide_branch
from shardwright.core.graph.host_numbers import HostNumbers
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dynamo import DynamoCapture
from shardwright.core.torch_internals.dynamo_guards import Guards
from shardwright.core.torch_internals.dynamo_side_effects import ChangedObject
from shardwright.core.torch_internals.modules import own_buffers
from shardwright.core.torch_internals.tensors import storage_id
from shardwright.errors import CaptureError

_PLAIN = (int, float, complex, str, bool, type(None))


def collect_tensor_ids(module: nn.Module, args: Any, kwargs: Any) -> frozenset[int]:
    """Return the `id()`s of the parameters, buffers and tensor arguments of a call."""
    tensors = (*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs)))
    return frozenset(id(each) for each in tensors if isinstance(each, Tensor))


@dataclass(frozen=True, eq=False)
class TracedResult:
    """The return value of a call, and the tensors that it assigns to Python objects.

    Args:
        leaves: the leaves of the return value: each an output or input of Dynamo's graph, or a
            constant.
        spec: pytree structure of the return value.
        effects: indices of the outputs of Dynamo's graph that are assigned to Python objects.
        buffers: indices of the outputs of Dynamo's graph that are assigned to buffers, by name.
        outputs: for each output of Dynamo's graph, its index in the outputs of the captured graph;
            the name of a buffer if the output is only assigned to it; None for a number.
        stored: indices of the outputs of the captured graph that are stored in Python objects, or
            read as numbers.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    effects: tuple[int, ...]
    buffers: Mapping[str, int]
    outputs: tuple[int | str | None, ...]
    stored: frozenset[int]


@dataclass(frozen=True)
class OutputLeaf:
    """Index of the output of Dynamo's graph that is a leaf of the return value."""

    index: int


@dataclass(frozen=True)
class InputLeaf:
    """Index of the input of Dynamo's graph that is a leaf of the return value."""

    index: int


@dataclass(frozen=True, eq=False)
class TracedCall:
    """TorchDynamo's trace of a call, made on a fake copy of the model.

    A second trace, by `torch.export`, converts the graph to ATen operators.

    Args:
        twin: the fake copy of the model.
        args, kwargs: fake arguments of the call.
        inputs: inputs of Dynamo's graph: fake parameters, buffers, arguments and other state.
        sources: for each input, the name of its parameter or buffer, or the index of its leaf of
            the arguments; None for other Python state.
        state: index of each input without a source, by the name of its placeholder in the second
            trace.
        numbers: operations of Dynamo's graph whose operands are all Python numbers.
        number_names: nodes of the numbers that operators read, by placeholder name in the second
            trace.
        trace: function that traces the copy again.
        guards: guards on the state that the copy read; None if the call changes no objects.
    """

    twin: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamo: DynamoCapture
    graph_module: fx.GraphModule
    inputs: list[Any]
    sources: list[str | int | None]
    state: dict[str, int]
    numbers: HostNumbers
    number_names: dict[str, fx.Node]
    trace: Callable[[], DynamoCapture]
    guards: Guards | None

    @classmethod
    def of(
        cls, call: CapturedCall, copied: tuple[nn.Module, Any, Any], numbers: frozenset[str]
    ) -> TracedCall:
        twin, args, kwargs = copied
        average_on_tensors(twin)
        make_static(call.module, twin)
        calls = calls_of_modules(twin, call.module)
        # `forward` without the hooks of the model itself, which run around the program.
        trace = partial(DynamoCapture.of, twin.forward, args, kwargs, numbers, calls, decide_branch)
        with calls_in_graph():
            dynamo = trace()
        if dynamo.graph_module is None:
            raise CaptureError(
                "`forward` calls no operator on tensors\n"
                "compute the result from parameters or arguments with `torch` functions"
            )
        guards = None
        # Built while objects have their state from before the call, which the bytecode will change.
        if dynamo.changes:
            guards = dynamo.guards(
                twin, args, kwargs, numbers, collect_tensor_ids(twin, args, kwargs)
            )
        check_changes(dynamo)
        # Before `HostNumbers.of`, for which a number that an assertion reads would be an operand.
        drop_assertions(dynamo.graph_module)
        inputs = dynamo.inputs(twin, args, kwargs)
        host = HostNumbers.of(dynamo.graph_module.graph)
        # `HostNumbers.of` adds outputs to the graph.
        dynamo.graph_module.recompile()
        # A function may refer to the model itself instead of the copy that is traced.
        models = (call.module, twin)
        names = {
            id(tensor): name
            for module in models
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        leaves = enumerate(pytree.tree_leaves((args, kwargs)))
        positions = {id(leaf): i for i, leaf in leaves if isinstance(leaf, Tensor)}
        sources = [names.get(id(each), positions.get(id(each))) for each in inputs]
        on_host = set(host.inputs.values())
        state = {
            f"state_{i}": i
            for i, source in enumerate(sources)
            if source is None and i not in on_host
        }
        for i in state.values():
            check_state(inputs[i])
        number_names = {f"number_{i}": node for i, node in enumerate(host.read)}
        return cls(
            *(twin, args, kwargs, dynamo, dynamo.graph_module, inputs, sources),
            *(state, host, number_names, trace, guards),
        )

    def changes_objects(self) -> bool:
        """Return whether the call changes Python objects other than buffers of the model, or
        registers hooks on tensors."""
        return self.dynamo.registers_hooks or bool(self._changes_besides_buffers())

    def _changes_besides_buffers(self) -> list[ChangedObject]:
        """Return the changes of Python objects other than buffers of the model."""
        # Dynamo reports the assignment of a buffer as a change of the module or of its `_buffers`.
        owners = {
            id(owner): own_buffers(submodule).keys()
            for submodule in self.twin.modules()
            for owner in (submodule, own_buffers(submodule))
        }
        changes = []
        for change in self.dynamo.changes:
            if id(change.value) in owners:
                names = set(change.attributes or ()) - owners[id(change.value)]
                if not names:
                    continue
                change = replace(change, attributes=tuple(sorted(names)))
            changes.append(change)
        return changes

    def _owners_of_memory(self) -> dict[int, str | None]:
        """Return the name of the parameter or buffer that owns each storage, by the storage's id;
        None for other Python state."""
        nodes = (node for node in self.graph_module.graph.nodes if node.op == "placeholder")
        examples = (node.meta["example_value"] for node in nodes)
        return {
            storage_id(example): source
            for source, example in zip(self.sources, examples, strict=True)
            if isinstance(example, Tensor) and not isinstance(source, int)
        }

    def _check_stored_tensors(self, stored: Iterable[tuple[Tensor, str | None]]) -> None:
        """Check the tensors that Python objects refer to after the call.

        Args:
            stored: (tensor, name of the buffer to which it is assigned, or None) for each tensor.

        Raises:
            CaptureError: if a tensor shares memory with a parameter, another buffer or attribute.
        """
        owners = self._owners_of_memory()
        for tensor, buffer in stored:
            storage = storage_id(tensor)
            # `self.steps += 1` assigns the buffer to itself.
            if storage in owners and (buffer is None or owners[storage] != buffer):
                raise CaptureError(
                    "`forward` stores a view of a parameter, buffer or attribute, which cannot be "
                    "captured\nstore a copy instead: `self.last = x.clone()`"
                )

    def _check_guards_cover_changes(self) -> None:
        """Check that Dynamo's guards cover all state that the call both reads and changes.

        TorchDynamo sets no guard on some reads of missing state, such as a missing key of
        `vars(self)`, which the call may then set.

        Raises:
            CaptureError: if all guards hold after the call, but a second trace differs.
        """
        # Guards that fail after the call lead to another capture at the next call.
        if self.guards is None or not self.guards.hold(self.twin, self.args, self.kwargs):
            return
        code = self.graph_module.print_readable(print_output=False)
        with calls_in_graph():
            second = self.trace().graph_module
        if second is not None:
            drop_assertions(second)
            HostNumbers.of(second.graph)  # Adds outputs, as to the first graph.
            second.recompile()
        if second is None or second.print_readable(print_output=False) != code:
            raise CaptureError(
                "`forward` depends on Python state that it changes, which TorchDynamo does not "
                "detect"
                "\nset that state before `plan`, or read it as a plain attribute"
            )

    def result(self, references: OuterReferences) -> TracedResult:
        """Run the bytecode on the copy, with fake results of the operators.

        Raises:
            CaptureError: if a side effect of the call cannot be captured.
        """
        # Numbers that come from tensors are unknown: 1 stands for each.
        numbers = self.numbers.values(self.inputs) | self.numbers.examples_of_tensors()
        output = next(n for n in reversed(self.graph_module.graph.nodes) if n.op == "output")
        nodes: Sequence[Any] = output.args[0]
        outputs = [numbers[node] if node in numbers else _make_fake_output(node) for node in nodes]
        before = module_slots(self.twin)
        # The bytecode replays calls of `print`, too.
        with undone_effects(self.dynamo.changes), redirect_stdout(io.StringIO()):
            returned = self.dynamo.around(lambda *_: outputs)(self.twin, *self.args, **self.kwargs)
            after = module_slots(self.twin)
            references.check_changed(change.value for change in self.dynamo.changes)
            # Before the effects are undone: the guards are evaluated on the state after the call.
            self._check_guards_cover_changes()
            stored_tensors = find_tensors(self._changes_besides_buffers())
        leaves, spec = result_leaves(returned)
        tensors = [
            index
            for index, output in enumerate(outputs)
            if isinstance(output, Tensor) and index not in self.numbers.outputs
        ]
        made = {id(outputs[index]): index for index in tensors}
        read = {id(t): i for i, t in enumerate(self.inputs) if isinstance(t, Tensor)}
        plan_leaves = tuple(_classify_leaf(leaf, made, read) for leaf in leaves)
        buffers = assigned_buffers(before, after, made)
        positions: dict[int, Any] = {}
        for position, leaf in enumerate(plan_leaves):
            if isinstance(leaf, OutputLeaf):
                # The first of several leaves that are one tensor.
                positions.setdefault(leaf.index, position)
        assigned = [(outputs[index], name) for name, index in buffers.items()]
        owners = self._owners_of_memory()
        # What else refers to a new value keeps it in later calls, which write to the buffer, unless
        # the value is the buffer itself, as in `self.steps += 1`.
        only_assigned = {
            index: name
            for name, index in buffers.items()
            if (index not in positions and id(outputs[index]) not in stored_tensors)
            or owners.get(storage_id(outputs[index])) == name
        }
        effects = [i for i in tensors if i not in positions and i not in only_assigned]
        # Added outputs are only read by `item()`, and stored nowhere.
        unread = [i for i in effects if i not in self.numbers.added_outputs]
        stored = [(outputs[i], None) for i in unread if i not in buffers.values()]
        self._check_stored_tensors([*stored, *assigned])
        positions |= {index: len(plan_leaves) + n for n, index in enumerate(effects)}
        positions |= only_assigned
        return TracedResult(
            plan_leaves,
            spec,
            tuple(effects),
            buffers,
            tuple(positions.get(i) for i in range(len(outputs))),
            frozenset(
                positions[i]
                for i in tensors
                if i in effects or (i not in only_assigned and id(outputs[i]) in stored_tensors)
            ),
        )


def _make_fake_output(node: Any) -> Any:
    """Return a new fake tensor for an output of Dynamo's graph, or the output if it is a number."""
    example = node.meta["example_value"] if isinstance(node, fx.Node) else node
    # A new object for each output, as results are recognized by `id()`.
    return example.view_as(example) if isinstance(example, Tensor) else example


def result_leaves(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of the result of a model, and their structure.

    Objects of the user's classes are flattened to their tensors; the bytecode builds the objects.
    """
    pytree.register_objects(result, only_tensors=True)
    leaves, spec = pytree.tree_flatten(result)
    if all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return leaves, spec
    return pytree.tree_flatten(_convert_to_containers(leaves))


def _classify_leaf(leaf: Any, made: Mapping[int, int], read: Mapping[int, int]) -> Any:
    if isinstance(leaf, Tensor):
        if id(leaf) in made:
            return OutputLeaf(made[id(leaf)])
        return InputLeaf(read[id(leaf)]) if id(leaf) in read else None
    return leaf if isinstance(leaf, _PLAIN) else None


def _convert_to_containers(value: Any) -> Any:
    """Convert nested containers and objects to dicts and lists of tensors and plain values."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _convert_to_containers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_to_containers(item) for item in value]
    # The attributes of a module or class are no results.
    if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        return {name: _convert_to_containers(item) for name, item in vars(value).items()}
    return None
