"""Trace of a call of a module by `torch.export`, and its rewrite to canonical form."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import Dim, ShapesCollection

from shardwright.core.capture import layer_rewrites  # noqa: F401 - `canonicalize` applies them
from shardwright.core.capture.annotations import call_tags, module_tags, preserve_tags, trace_tags
from shardwright.core.capture.attributes import BUFFERS, attribute_texts
from shardwright.core.capture.autocast import call_in_autocast, traced_autocast
from shardwright.core.capture.boundaries import settle_boundaries
from shardwright.core.capture.build_graph import CapturedCall, build_graph
from shardwright.core.capture.canonicalize import canonicalize
from shardwright.core.capture.causal_masks import fold_causal_masks
from shardwright.core.capture.composed import decompose
from shardwright.core.capture.ctc import keep_rows_of_targets
from shardwright.core.capture.cumulative_averages import average_on_tensors
from shardwright.core.capture.drawn_experts import DrawnExperts
from shardwright.core.capture.expert_conditions import Preference
from shardwright.core.capture.expert_loops import fold_expert_loops
from shardwright.core.capture.experts import hint_of_experts
from shardwright.core.capture.explanation import (
    DataDependentError,
    UpdatedBufferError,
    explain_export,
    is_data_dependent,
)
from shardwright.core.capture.fake_copy import (
    LossesInSinglePrecision,
    RecordedEffects,
    calling_forward,
    fake_copy,
)
from shardwright.core.capture.functionalize import functionalize
from shardwright.core.capture.fx_nodes import remove_dead, restore_nodes
from shardwright.core.capture.hooks import check_hooks, observe_forward_hooks
from shardwright.core.capture.inline_regions import inline_regions
from shardwright.core.capture.inputs_of_tensors import remedy_of_node
from shardwright.core.capture.known_values import KnownValues
from shardwright.core.capture.layer_progress import report_layers
from shardwright.core.capture.masked_reductions import keep_selected_rows
from shardwright.core.capture.naming import LocatedError, is_users_function, line_of, line_of_error
from shardwright.core.capture.padded_convolutions import pad_in_convolutions
from shardwright.core.capture.padded_rows import pad_selected_rows
from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.capture.scalar_indices import keep_scalar_indices
from shardwright.core.capture.shared_memory import check_constants, check_memory
from shardwright.core.capture.signature import (
    Signature,
    add_updates,
    check_constants_unchanged,
    check_inputs_unchanged,
    drop_redundant_detach,
    gradient_sources,
    merge_tied,
    take_as_buffers,
)
from shardwright.core.capture.sliced_losses import read_all_tokens_in_losses
from shardwright.core.capture.sliced_projections import split_sliced_projections
from shardwright.core.capture.sorted_rows import fold_sorted_experts
from shardwright.core.capture.static_modules import make_static
from shardwright.core.capture.traced_attributes import TracedAttributes
from shardwright.core.capture.transforms import as_operators
from shardwright.core.capture.unflatten import move_flattening_down
from shardwright.core.capture.value_guards import PassedGuards
from shardwright.core.capture.views import read_strides_of_elements
from shardwright.core.graph.graph import Graph
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.stack_traces import innermost_frames_recorded
from shardwright.core.torch_internals.tensors import without_checks_of_fake_tensors
from shardwright.core.torch_internals.transforms import transforms_called_by
from shardwright.errors import CaptureError, StrategyError
from shardwright.progress import OnProgress, ignore_progress


@dataclass(frozen=True)
class Trace:
    """A call of a module as traced by `torch.export`, without sub-graphs.

    Args:
        graph: the traced operators.
        signature: placeholders and results of the graph.
        reads, writes: path and name of the attributes that `forward` read and set.
        filled: fingerprint of each value that `forward` stores in a missing or None attribute or in
            a new cache entry, by its location.
        autocast_on: device type for which autocast regions were traced; None without autocast
            regions.
        compute_dtype: dtype to which single-precision parameters and inputs are cast; None for no
            cast.
    """

    graph: fx.Graph
    signature: Signature
    reads: Collection[tuple[str, str]]
    writes: Collection[tuple[str, str]]
    filled: Mapping[str, str]
    autocast_on: str | None
    compute_dtype: torch.dtype | None


def trace(
    call: CapturedCall,
    compute_dtype: torch.dtype | None,
    varying: Collection[tuple[int, int]] = (),
    on_progress: OnProgress = ignore_progress,
    preference: Preference | None = None,
) -> Trace:
    """Trace a call; must run in the context `isolate_capture`.

    Args:
        call: the module and its arguments.
        compute_dtype: dtype to which single-precision parameters and inputs are cast; None for no
            cast.
        varying: sizes to trace as symbols if `torch.export` can, as pairs of the index of a leaf of
            the arguments and a dimension.
        on_progress: called with the progress by layers.
        preference: experts to draw for the trace; None to draw none.

    Raises:
        CaptureError: if the call cannot be captured; DataDependentError if Python code depends on
            the value of a tensor.
        StrategyError: if the pin of a module does not fit its inputs and outputs.
    """
    with torch.set_grad_enabled(call.gradients):
        exported, attributes, autocast_on = _export_call(
            call, compute_dtype, varying, on_progress, preference
        )
    restore_nodes(exported.graph_module)
    for node in exported.graph.nodes:
        check_node(node)
    signature = Signature.of(exported)
    inline_regions(exported.graph_module)
    settle_boundaries(exported.graph)
    reads, writes, filled = attributes.reads, attributes.writes, attributes.filled
    return Trace(exported.graph, signature, reads, writes, filled, autocast_on, compute_dtype)


@dataclass(frozen=True)
class CanonicalTrace:
    """A canonicalized trace, before mixtures of experts, masks and reductions are folded.

    Args:
        trace: the trace; its signature is that of `graph`.
        graph: the canonical operators.
        tied: first name of each tied parameter or buffer, by its other names.
        call_tags: tags of the calls of modules and functions.
    """

    trace: Trace
    graph: fx.Graph
    tied: Mapping[str, str]
    call_tags: Any


def canonical(traced: Trace, call: CapturedCall) -> Graph:
    """Return the canonical graph of a traced call; modifies `traced` in place.

    Raises:
        CaptureError: if an operator or a change of state cannot be captured.
    """
    return fold_operators(canonical_trace(traced, call), call)


def canonical_trace(traced: Trace, call: CapturedCall) -> CanonicalTrace:
    """Rewrite a traced call to canonical form; modifies `traced` in place.

    Raises:
        CaptureError: if an operator or a change of state cannot be captured.
    """
    module, signature, graph = call.module, traced.signature, traced.graph
    check_constants(module, signature.constants.values())
    keep_rows_of_targets(graph)
    pad_selected_rows(graph)
    decompose(graph)
    read_strides_of_elements(graph)
    keep_scalar_indices(graph)
    calls = call_tags(graph)
    check_static(graph, hint_of_experts(module), signature.inputs)
    tied = merge_tied(module, graph, signature)
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    trained = gradient_sources(module, leaves, signature, graph)
    graph, changed = functionalize(graph, trained)
    check_inputs_unchanged(signature, changed)
    check_constants_unchanged(signature, changed)
    add_updates(graph, changed)
    take_as_buffers(module, signature, changed, trained)
    canonicalize(graph)
    pad_in_convolutions(graph)
    return CanonicalTrace(traced, graph, tied, calls)


def fold_operators(rewritten: CanonicalTrace, call: CapturedCall) -> Graph:
    """Fold the operators of mixtures of experts, masks and reductions of selected rows, and return
    the graph; modifies `rewritten` in place.

    Raises:
        CaptureError: for a loop over experts in which every expert would compute all tokens.
    """
    module, traced, graph = call.module, rewritten.trace, rewritten.graph
    signature, leaves = traced.signature, pytree.tree_leaves((call.args, call.kwargs))
    fold_expert_loops(graph, hint_of_experts(module))
    keep_selected_rows(graph)
    fold_causal_masks(graph)
    fold_sorted_experts(graph)
    sources = gradient_sources(module, leaves, signature, graph)
    drop_redundant_detach(graph, sources)
    remove_dead(graph)
    move_flattening_down(graph)
    remove_dead(graph)
    read_all_tokens_in_losses(graph)
    split_sliced_projections(graph)
    remove_dead(graph)
    captured = build_graph(call, graph, signature, sources)
    check_memory(module, captured)
    _check_read_buffers(module, captured, traced.reads)
    read = {value.name for value in (*captured.parameters, *captured.buffers)}
    tied = {name: first for name, first in rewritten.tied.items() if first in read}
    with torch.set_grad_enabled(call.gradients):
        attributes = attribute_texts(module, traced.reads, traced.writes)
    return replace(
        captured,
        tied=tied,
        module_tags=module_tags(module),
        call_tags=rewritten.call_tags,
        attributes=attributes,
        filled=dict(traced.filled),
        compute_dtype=traced.compute_dtype,
        autocast_on=traced.autocast_on,
    )


def _raises_same_error_without_export(
    twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> bool:
    """Return whether a call of the model on fake tensors raises `error` without `torch.export`
    too."""
    state = ReachableState(twin)
    try:
        with torch.no_grad(), calling_forward(twin):
            twin(*args, **kwargs)
    except Exception as eager:
        return type(eager) is type(error) and str(eager)[:80] == str(error)[:80]
    finally:
        # What the first call changed was restored.
        state.restore()
    return False


def _export_call(
    call: CapturedCall,
    compute_dtype: torch.dtype | None,
    varying: Collection[tuple[int, int]],
    on_progress: OnProgress,
    preference: Preference | None,
) -> tuple[torch.export.ExportedProgram, TracedAttributes, str | None]:
    """Export a call of a module with `torch.export`.

    Returns:
        The exported program, the attributes that `forward` read and set, and the device type of its
        autocast regions.
    """
    module = call.module
    check_hooks(module)
    twin, fake_args, fake_kwargs = fake_copy(module, call.args, call.kwargs, compute_dtype)
    average_on_tensors(twin)
    make_static(module, twin)
    attributes = TracedAttributes(twin)
    observe_forward_hooks(twin)
    twin.register_forward_hook(lambda *call: pytree.register_objects(call[-1], only_tensors=True))
    trace_tags(twin, module)
    report_layers(twin, on_progress)
    call_in_autocast(twin, call.autocast)
    drawn = _get_random_states()
    losses = LossesInSinglePrecision() if compute_dtype is not None else nullcontext()
    values = (
        KnownValues(module, twin) if preference is None else DrawnExperts(module, twin, preference)
    )
    try:
        with (
            attributes.following_copy(call.original or module),
            attributes.restoring(),
            traced_autocast(call.autocast) as regions,
            preserve_tags(),
            transforms_called_by(as_operators),
            innermost_frames_recorded(is_users_function),
            values as known_values,
            # A captured model does not check values.
            without_checks_of_fake_tensors(),
            RecordedEffects(),
            PassedGuards(),
            losses,
            attributes.recording(known_values),
            calling_forward(twin),
        ):
            shapes = _make_dynamic_shapes(twin, fake_args, fake_kwargs, varying)
            export = partial(
                torch.export.export,
                *(twin, fake_args, fake_kwargs),
                dynamic_shapes=shapes,
                strict=False,
            )
            exported = export()
            attributes.check_settled(exported, export)
            if isinstance(values, DrawnExperts):
                values.check_conditions()
    except LocatedError as error:
        raise CaptureError(str(error)) from error
    except CaptureError as error:
        raise CaptureError(f"{line_of_error(error)}: {error}") from error
    except StrategyError:
        raise
    except Exception as error:
        alone = partial(_raises_same_error_without_export, twin, fake_args, fake_kwargs, error)
        message = explain_export(error, values.inputs.remedy + hint_of_experts(module), alone)
        raise (DataDependentError if is_data_dependent(error) else CaptureError)(message) from error
    attributes.reads |= {(BUFFERS + path, name): None for path, name in known_values.read}
    if _get_random_states() != drawn:
        raise CaptureError(
            f"the `forward` of {type(module).__name__}, or a function that it calls, draws from "
            "`random` or `numpy.random`; a captured model would reuse the first number\ndraw with "
            "`torch`, or draw before each step and store the number in an attribute of the model"
        )
    return exported, attributes, regions.device_type


def _make_dynamic_shapes(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: Collection[tuple[int, int]],
) -> Any:
    """Return the argument `dynamic_shapes` of `torch.export` for varying sizes; None if no size
    varies."""
    if not varying:
        return None
    shapes, leaves = ShapesCollection(), pytree.tree_leaves((args, kwargs))  # type: ignore[no-untyped-call]
    for number in {leaf for leaf, _ in varying}:
        shapes[leaves[number]] = {dim: Dim.AUTO for leaf, dim in varying if leaf == number}
    return shapes.dynamic_shapes(module, args, kwargs)  # type: ignore[no-untyped-call]


def _check_read_buffers(
    module: nn.Module, graph: Graph, reads: Collection[tuple[str, str]]
) -> None:
    """Check that `forward` updates no buffer whose values were constants of the trace.

    Raises:
        CaptureError: if a shape or branch depends on the values of an updated buffer.
    """
    named = dict(module.named_buffers(remove_duplicate=False))
    updated = {id(named[buffer.name]) for buffer, _ in graph.updates if buffer.name in named}
    for path, name in reads:
        buffer = f"{path.removeprefix(BUFFERS)}.{name}".removeprefix(".")
        if path.startswith(BUFFERS) and id(named[buffer]) in updated:
            raise UpdatedBufferError(
                f"`forward` updates the buffer {buffer!r}, and a shape or a branch depends on its "
                "values, which change in each step\nuse `torch.where` on tensors, or store it as"
                " a Python number that is set between steps; if it is a flag of the first call,"
                " call the model once before `plan`"
            )


def _get_random_states() -> tuple[Any, ...]:
    """Return the states of the random generators of Python and NumPy."""
    algorithm, numbers, *position = np.random.get_state()
    return random.getstate(), algorithm, np.asarray(numbers).tobytes(), *position


def check_static(graph: fx.Graph, hint: str, inputs: Collection[str]) -> None:
    """Check that no number or shape depends on the values of tensors, and check each operator.

    Args:
        hint: advice to append to an error about tensor values.
        inputs: names of the placeholders of the model's inputs.

    Raises:
        CaptureError: if a number or shape depends on values, or if an operator cannot run on
            shards.
    """
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in graph.nodes:
        check_node(node)
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, symbols):
                raise CaptureError(
                    f"{line_of(node)}: this converts the value of a tensor to a Python number, but "
                    f"values are unknown during capture\nkeep it a tensor (remove `.item()`), or "
                    f"make it a Python constant.{remedy_of_node(node, inputs)}{hint}"
                )
            if isinstance(value, torch.Tensor) and any(
                isinstance(size, torch.SymInt) for size in value.shape
            ):
                raise CaptureError(
                    f"{line_of(node)}: the shape of the result depends on the values of a tensor, "
                    f"which are unknown during capture\nuse `torch.where`, or multiply by the "
                    f"mask; both keep the shape.{remedy_of_node(node, inputs)}{hint}"
                )


def check_node(node: fx.Node) -> None:
    """Check that an operator can run on shards.

    Raises:
        CaptureError: if the operator has a sparse result or sparse gradients, or belongs to a
            function transform that is not supported.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise CaptureError(
            f"{line_of(node)}: this makes a sparse tensor ({value.layout}), and only dense "
            f"tensors can be sharded\nuse `to_dense()`, or an operator on dense tensors"
        )
    module = str(getattr(node.target, "__module__", ""))
    if module.startswith(("torch._functorch", "torch._C._functorch")):
        raise CaptureError(
            f"{line_of(node)}: this function transform cannot be captured\nuse `torch.vmap`, "
            "or `jvp`, `vjp` and `grad` of `torch.func`, instead of `forward_ad` and `linearize`"
        )
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in schema_of(node.target).arguments]
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        if arguments.get("sparse") is True:
            raise CaptureError(
                f"{line_of(node)}: sparse gradients (`sparse=True`) cannot be summed over devices\n"
                f"use `sparse=False`, whose gradients have the same values"
            )
