"""Capture of a call with its Python side effects: TorchDynamo separates Python from operators.

Capture has three steps:

1. TorchDynamo traces `forward` of a fake copy of the model to a graph of `torch` functions, with
   guards on all Python state that it reads.
2. The bytecode runs once on the copy, with fake results, to find the return value and the tensors
   that are assigned to Python objects.
3. `torch.export` traces the graph, called by a module without Python (`ModuleTree`), to ATen
   operators.

Tensors in plain attributes, containers and global variables, and numbers that change between calls,
are constants of the resulting graph; `PythonCall` passes their current values in each call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.annotations import preserve_tags
from shardwright.core.capture.autocast import CPU, call_in_autocast, traced_autocast
from shardwright.core.capture.boundaries import settle_boundaries
from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.fake_copy import (
    TRACING_LOCK,
    LossesInSinglePrecision,
    RecordedEffects,
    fake_copy,
    fake_tensor,
    isolate_capture,
    silent_tracing,
)
from shardwright.core.capture.fx_nodes import restore_nodes
from shardwright.core.capture.global_variables import GRADIENT_MODE, reads_gradient_mode
from shardwright.core.capture.hooks import check_hooks
from shardwright.core.capture.inline_regions import inline_regions
from shardwright.core.capture.module_tree import ModuleTree
from shardwright.core.capture.outer_references import OuterReferences
from shardwright.core.capture.process_state import unchanged_process
from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.capture.replay import GraphReplay, name_modules
from shardwright.core.capture.signature import Signature
from shardwright.core.capture.trace import Trace, canonical, check_node
from shardwright.core.capture.traced_call import (
    InputLeaf,
    OutputLeaf,
    TracedCall,
    TracedResult,
    collect_tensor_ids,
)
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.python_call import PythonCall, number_tensor
from shardwright.core.torch_internals.hooks import forward_hooks
from shardwright.core.torch_internals.tensors import FakeTensor
from shardwright.core.torch_internals.transforms import restored_transforms
from shardwright.errors import CaptureError


def capture_python(
    call: CapturedCall,
    compute_dtype: torch.dtype | None = None,
    numbers: frozenset[str] = frozenset(),
) -> Graph:
    """Capture a call of a module with its Python side effects, without executing them.

    Args:
        call: the module and its arguments.
        compute_dtype: dtype to which single-precision parameters and inputs are cast; None for no
            cast.
        numbers: sources, in Dynamo's notation, of Python numbers that change between calls.

    Returns:
        The graph; `Graph.python` has the captured side effects.

    Raises:
        CaptureError: if an operator or a side effect of the call cannot be captured.
        TorchDynamoException: if TorchDynamo cannot trace the call as one graph.
    """
    started = time.perf_counter()
    _check_supported(call)
    with TRACING_LOCK, restored_transforms(), _set_modes_of_call(call):
        copied = fake_copy(call.module, call.args, call.kwargs, compute_dtype, call.original)
        original, twin = call.original or call.module, copied[0]
        references = OuterReferences(original, twin, ReachableState(twin))
        with references.leading_to_copy():
            # Twice, because Dynamo's trace and the run of its bytecode may each change settings.
            with unchanged_process():
                traced = TracedCall.of(call, copied, numbers)
            with unchanged_process():
                result = traced.result(references)
        # Guards of the model itself, after the references to its modules lead to it again.
        unguarded = collect_tensor_ids(call.module, call.args, call.kwargs)
        guards = traced.dynamo.guards(call.module, call.args, call.kwargs, numbers, unguarded)
    with unchanged_process(), restored_transforms(), isolate_capture():
        graph, names = _trace_to_aten(call, traced, result, compute_dtype)
    # The canonical graph drops constants that no operator reads.
    state = {names[name]: index for name, index in traced.state.items() if name in names}
    python = PythonCall(
        traced.dynamo,
        guards,
        state,
        traced.numbers,
        {names[name]: node for name, node in traced.number_names.items() if name in names},
        result.outputs,
        traced.changes_objects(),
        result.stored,
        frozenset(result.buffers),
    )
    seconds = time.perf_counter() - started
    return replace(graph, python=python, capture_seconds=seconds)


def _check_supported(call: CapturedCall) -> None:
    if call.autocast.dtype is not None and call.autocast.device_type != CPU:
        # TorchDynamo infers dtypes by CPU autocast, which casts other operators.
        raise CaptureError(
            "cannot capture Python side effects of `forward` under autocast of an accelerator\n"
            "call `plan` outside of `torch.autocast`, or remove the side effects from `forward`"
        )
    check_hooks(call.module)
    # Forward hooks of the model itself run around the program, on its result.
    if forward_hooks(call.module)[0]:
        raise CaptureError(
            "cannot capture a model that has pre-forward hooks and whose `forward` has Python side "
            "effects\ncall the hook's function in `forward`, or register the hook on a submodule"
        )


@contextmanager
def _set_modes_of_call(call: CapturedCall) -> Iterator[None]:
    """Return a context with the autocast and gradient mode of the call, and without any other
    PyTorch mode."""
    dtype = call.autocast.dtype
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(call.gradients),
        torch.autocast(CPU, dtype, enabled=dtype is not None),
        silent_tracing(),
    ):
        yield


def _trace_to_aten(
    call: CapturedCall, traced: TracedCall, result: TracedResult, compute_dtype: torch.dtype | None
) -> tuple[Graph, dict[str, str]]:
    """Trace Dynamo's graph to ATen operators.

    Returns:
        The graph, and the name of its constant for each name in `traced.state` and
        `traced.number_names` that the graph reads.
    """
    name_modules(traced.graph_module, (call.module, traced.twin))
    numbers = traced.numbers.values(traced.inputs)
    constants = {name: traced.inputs[index].detach() for name, index in traced.state.items()}
    constants |= {name: number_tensor(numbers[n]) for name, n in traced.number_names.items()}
    tree = ModuleTree(traced.twin, partial(_run_dynamo_graph, traced, result))
    mode = next(each.fake_mode for each in traced.inputs if isinstance(each, FakeTensor))
    # Fake, so that no operator converts a constant to a Python number.
    fakes = {name: fake_tensor(mode, tensor) for name, tensor in constants.items()}
    losses = LossesInSinglePrecision() if compute_dtype is not None else nullcontext()
    call_in_autocast(tree, call.autocast)
    with (
        traced_autocast(call.autocast) as regions,
        preserve_tags(),
        RecordedEffects(),
        losses,
    ):
        arguments = (traced.args, traced.kwargs, fakes)
        exported = torch.export.export(tree, arguments, strict=False)
    restore_nodes(exported.graph_module)
    for node in exported.graph.nodes:
        check_node(node)
    signature = Signature.of(exported)
    # `ModuleTree` returns a list; the user's structure is that of the bytecode's result.
    signature.out_spec = result.spec
    if constants:
        # Constants are the last argument of `ModuleTree`.
        placeholders = signature.inputs[-len(constants) :]
        del signature.inputs[-len(constants) :]
        signature.constants |= dict(zip(placeholders, constants.values(), strict=True))
    inline_regions(exported.graph_module)
    settle_boundaries(exported.graph)
    # Dynamo's guards on the gradient mode are dropped: programs are keyed by it if it is read.
    reads = (GRADIENT_MODE,) if reads_gradient_mode(call.module) else ()
    trace = Trace(exported.graph, signature, reads, (), {}, regions.device_type, compute_dtype)
    graph = canonical(trace, call)
    # By identity, because the canonical graph may rename constants.
    named = {id(tensor): value.name for value, tensor in graph.constants.items()}
    names = {name: named[id(t)] for name, t in constants.items() if id(t) in named}
    return graph, names


def _run_dynamo_graph(
    traced: TracedCall,
    result: TracedResult,
    tree: nn.Module,
    leaves: Sequence[Any],
    constants: Mapping[str, Tensor],
) -> list[Any]:
    """Call the operators of Dynamo's graph on the tensors of a `ModuleTree`.

    Returns:
        The leaves of the return value, then the tensors assigned to Python objects.

    Raises:
        CaptureError: if `forward` assigns a tensor of another shape or dtype to a buffer.
    """
    tensors = {**dict(tree.named_parameters()), **dict(tree.named_buffers())}
    state = {index: constants[name] for name, index in traced.state.items()}
    inputs: list[Any] = []
    for index, source in enumerate(traced.sources):
        if isinstance(source, str):
            inputs.append(tensors[source])
        else:
            inputs.append(leaves[source] if source is not None else state.get(index))
    read = {node: constants[name] for name, node in traced.number_names.items()}
    # None for numbers that no operator reads, so that their operations do not run.
    replaced = dict.fromkeys(traced.numbers.all) | read
    # Operators such as `torch._C._set_grad_enabled` are nodes of Dynamo's graph.
    with unchanged_process():
        made = GraphReplay(traced.graph_module, replaced=replaced).run(*inputs)
    for name, index in result.buffers.items():
        buffer = tensors[name]
        if buffer.shape != made[index].shape or buffer.dtype != made[index].dtype:
            raise CaptureError(
                f"`forward` assigns a tensor {tuple(made[index].shape)} {made[index].dtype} to the"
                f" buffer {name!r}, which is {tuple(buffer.shape)} {buffer.dtype}\n"
                "assign a tensor of equal shape and dtype, or use a plain attribute"
            )
        with torch.no_grad():
            buffer.copy_(made[index])
    returned: list[Any] = []
    for leaf in result.leaves:
        if isinstance(leaf, OutputLeaf):
            returned.append(made[leaf.index])
        else:
            returned.append(inputs[leaf.index] if isinstance(leaf, InputLeaf) else leaf)
    return [*returned, *(made[index] for index in result.effects)]
