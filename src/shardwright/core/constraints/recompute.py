"""Mark modules and functions for activation checkpointing with `recompute`.

`recompute_of` collects the requests from a captured graph. A request is stored on the module, or on
the function that `recompute` returns; there is no global state.

A *segment* is a set of operators that are recomputed together: only the inputs of the segment are
saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.core.capture.annotations import RecomputeRequest, attach
from shardwright.core.capture.naming import local_operator_name
from shardwright.core.constraints.pin import tagged_calls
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.graph.saved_tensors import saved_tensors
from shardwright.core.partition.decisions import Recompute
from shardwright.core.rules import rule_of
from shardwright.core.torch_internals.operators import OpOverload
from shardwright.errors import StrategyError

RecomputeTarget = TypeVar("RecomputeTarget", bound=Callable[..., Any])


def recompute(
    target: RecomputeTarget, communication: bool = True, *, operators: Sequence[str] | None = None
) -> RecomputeTarget:
    """Recompute activations in the backward pass instead of saving them.

    Every call of the module or function becomes one checkpointed segment: only its inputs are
    saved, and the backward pass recomputes the rest. An inner request overrides an outer one.

    Args:
        target: a module, with all its submodules, or a function; call the returned function in
            `forward`. In a `ModuleList`, each module is marked. A later request for the same module
            replaces an earlier one.
        communication: whether to repeat the collectives between layouts. If False, their results
            are saved, and recomputation adds no communication volume.
        operators: names of the only operators to recompute, such as `"aten.softmax"` or
            `"softmax"`, each together with the operators that read its result. None for all
            operators; an empty sequence exempts the target from the request for an outer module.

    Returns:
        The module itself, or a function that is recomputed.

    Raises:
        StrategyError: if the target is neither a module nor a function, or `operators` is not a
            sequence of names. `plan` reports names that do not occur in the model.
    """
    if isinstance(target, type) or not callable(target):
        raise StrategyError(
            f"`recompute` takes a module or a function, not {target!r}\n"
            "pass for example a submodule of the model: sw.recompute(net.layers)"
        )
    # A string would be taken for the sequence of its letters.
    if isinstance(operators, str) or any(not isinstance(name, str) for name in operators or ()):
        raise StrategyError(
            f"operators={operators!r}: must be a sequence of operator names\n"
            "use for example operators=('softmax', 'aten.gelu')"
        )
    op_types = None if operators is None else tuple(_normalize_op_type(name) for name in operators)
    request = RecomputeRequest(communication, op_types)
    # A `ModuleList` is not called itself, so only the calls of its modules can be segments.
    if isinstance(target, nn.ModuleList | nn.ModuleDict):
        for module in target.children():
            recompute(module, communication, operators=operators)
        return target
    if isinstance(target, nn.Module):
        attach(target, request)
        return target
    function: RecomputeTarget = tagged_calls(target, request)
    return function


def _normalize_op_type(operator: str) -> str:
    """Return an operator's name without namespace, overload and underscores: `softmax` for
    `aten.softmax.int`, `aten::_softmax` or `softmax`."""
    return operator.replace("::", ".").removeprefix("aten.").partition(".")[0].strip("_")


@dataclass(frozen=True)
class _RequestedSegment:
    """Recomputation segment of one call of a module or function to recompute.

    Args:
        request: the request for the module or function.
        segment: name of the segment.
    """

    request: RecomputeRequest
    segment: str


def recompute_of(graph: Graph) -> dict[str, Recompute]:
    """Return the recomputation segment of each recomputed operator of a graph, by operator name.

    Raises:
        StrategyError: if a request matches no operator.
    """
    modules = {
        path: tag
        for path, tags in graph.module_tags.items()
        for tag in tags
        if isinstance(tag, RecomputeRequest)
    }
    functions = dict(_find_calls_to_recompute(graph))
    _check_requested_modules(graph, modules)
    recomputed: dict[str, Recompute] = {}
    members: dict[str, list[Op]] = {}
    selected: dict[RecomputeRequest, list[Op]] = {}
    for op in graph.ops:
        requested = _find_innermost_segment(op, modules, functions)
        if requested is None:
            continue
        if requested.request.op_types is None:
            recomputed[op.name] = Recompute(requested.segment, requested.request.communication)
            members.setdefault(requested.segment, []).append(op)
        # Without a segment yet: segments form below, from neighbors among all operators of the
        # request.
        elif local_operator_name(op.target) in requested.request.op_types:
            selected.setdefault(requested.request, []).append(op)
    op_index = _index_operators(graph)
    for ops in members.values():
        # Recomputing a single operator saves no memory, since its result is saved as the input of
        # the next operator: recompute that one too. The addition of a bias belongs to its layer.
        if len([op for op in ops if not op.name.endswith(".bias")]) == 1:
            _add_operators_that_save_results(graph, recomputed, ops, op_index)
    for request, ops in selected.items():
        add_segments(graph, recomputed, ops, request.communication)
    return recomputed


def add_segments(
    graph: Graph, recomputed: dict[str, Recompute], ops: Sequence[Op], communication: bool
) -> None:
    """Add `ops` to `recomputed`, together with operators that would save the results of `ops` for
    their backward pass.

    Consecutive operators, and operators that read each other's results, share a segment.

    Args:
        graph: the captured graph.
        recomputed: the segments of recomputed operators, by name; changed in place.
        ops: the operators to add, in the order of the graph.
        communication: whether to repeat the collectives between layouts.
    """
    members: dict[str, list[Op]] = {}
    segments: dict[str, str] = {}
    op_index = _index_operators(graph)
    for op in ops:
        producers = [graph.producer[v].name for v in op.inputs if v in graph.producer]
        index = op_index[op.name]
        previous = [graph.ops[index - 1].name] if index else []
        # Prefer few, large segments: the inputs of each segment are saved.
        neighbors = [segments[name] for name in (*producers, *previous) if name in segments]
        segments[op.name] = neighbors[0] if neighbors else op.name
        members.setdefault(segments[op.name], []).append(op)
    for segment, segment_ops in members.items():
        recomputed.update((op.name, Recompute(segment, communication)) for op in segment_ops)
    # Only after all segments are known: a segment must not take an operator of another segment.
    for segment_ops in members.values():
        _add_operators_that_save_results(graph, recomputed, segment_ops, op_index)


def _index_operators(graph: Graph) -> dict[str, int]:
    return {op.name: index for index, op in enumerate(graph.ops)}


def _find_calls_to_recompute(graph: Graph) -> Iterator[tuple[int, _RequestedCall]]:
    """Yield (id of the call's `RecomputeRequest`, call) for each call of a function to recompute.

    Raises:
        StrategyError: if a call has no operator.
    """
    for request, source in graph.call_tags:
        if not isinstance(request, RecomputeRequest):
            continue
        ops = [op for op in graph.ops if any(tag is request for tag in op.tags)]
        if not ops and request.checkpoint:
            continue  # A call of `torch.utils.checkpoint` that computes nothing is valid.
        if not ops:
            raise StrategyError(
                f"the function called at {source or 'an unknown line'} is marked by `recompute`,"
                " but the graph has no operator of this call: its result is unused, or it computes"
                " nothing\ncall the function without `recompute`"
            )
        _check_op_types(f"the function called at {source or 'an unknown line'}", request, ops)
        segment = _RequestedSegment(request, ops[0].name)
        yield (
            id(request),
            _RequestedCall(segment, _count_common_module_calls([op.calls for op in ops])),
        )


@dataclass(frozen=True)
class _RequestedCall:
    """A call of a function to recompute.

    Args:
        segment: the segment of the call.
        depth: number of module calls that enclose the function call.
    """

    segment: _RequestedSegment
    depth: int


def _count_common_module_calls(calls: Sequence[tuple[str, ...]]) -> int:
    """Return the number of module calls that enclose all of several operators.

    Args:
        calls: the enclosing module calls of each operator, the outermost first.
    """
    # Each level is the path of a module call, so levels that agree are the outermost ones.
    return sum(len(set(level)) == 1 for level in zip(*calls, strict=False))


def _find_innermost_segment(
    op: Op, modules: Mapping[str, RecomputeRequest], functions: Mapping[int, _RequestedCall]
) -> _RequestedSegment | None:
    """Return the segment of the innermost `recompute` request around an operator, or None.

    Args:
        op: the operator.
        modules: the requests for modules, by path.
        functions: the calls of functions to recompute, by id of the request.
    """
    # By identity: every call has its own copy of the request.
    function = next((functions[id(tag)] for tag in op.tags if id(tag) in functions), None)
    # The first `depth` module calls enclose the function call, whose request is the inner one. The
    # others are made inside it, and the innermost has priority.
    for call in reversed(op.calls[function.depth if function else 0 :]):
        # `layers.0@2` is the second call of `layers.0`.
        request = modules.get(call.partition("@")[0])
        if request is not None:
            # The path of the model itself is empty.
            return _RequestedSegment(request, call or "model")
    return function.segment if function else None


def _check_requested_modules(graph: Graph, modules: Mapping[str, RecomputeRequest]) -> None:
    """Check that every module to recompute has operators in the graph.

    Raises:
        StrategyError: if a module has no operator, or none of a type that the user listed in
            `recompute(operators=...)`.
    """
    inside: dict[RecomputeRequest, list[Op]] = {request: [] for request in modules.values()}
    for op in graph.ops:
        requests = (modules.get(call.partition("@")[0]) for call in op.calls)
        for request in {request for request in requests if request is not None}:
            inside[request].append(op)
    for path, request in modules.items():
        ops = inside[request]
        where = f"module {path!r}" if path else "the model"
        if not ops:
            closest = get_close_matches(path, list(graph.by_name), n=3, cutoff=0.0)
            raise StrategyError(
                f"{where} is marked by `recompute`, but has no operator in the graph: it is never"
                f" called, or it computes nothing\nmark one of the closest: {', '.join(closest)}"
            )
        _check_op_types(where, request, ops)


def _check_op_types(where: str, request: RecomputeRequest, ops: Sequence[Op]) -> None:
    """Raise StrategyError if `ops` lacks an operator type that `request` lists."""
    present = dict.fromkeys(local_operator_name(op.target) for op in ops)
    for op_type in request.op_types or ():
        if op_type not in present:
            raise StrategyError(
                f"`recompute`: {where} has no operator {op_type!r}\n"
                f"use one of its operators: {', '.join(present)}"
            )


def _add_operators_that_save_results(
    graph: Graph, recomputed: dict[str, Recompute], ops: Sequence[Op], op_index: Mapping[str, int]
) -> None:
    """Extend a segment by the operators that save its results for their backward pass.

    Otherwise the saved results would stay in memory. The segment is not extended if this would
    recompute another compute-intensive operator. The last added operator may be one, since
    recomputation stops at its inputs.

    Args:
        graph: the captured graph.
        recomputed: the segments of recomputed operators, by name; changed in place.
        ops: the operators of the segment.
        op_index: index of each operator in the graph, by name.
    """
    segment = recomputed[ops[-1].name]
    results = [value for op in ops for value in op.outputs]
    members = {op.name for op in ops}
    savers: set[str] = set()
    views: set[str] = set()
    # `results` grows in the loop, by the outputs of views.
    for value in results:
        for op, index in graph.consumers[value]:
            if op.name in members:
                continue
            if _is_view_operator(op):
                # A saved view keeps the memory of the tensor alive: consider its consumers too.
                views.add(op.name)
                results += op.outputs
            elif index in saved_tensors(op).inputs:
                savers.add(op.name)
    if not savers:
        return
    # The last saver ends the segment: earlier ones are recomputed to reach it.
    last = max(savers, key=lambda name: op_index[name])
    earlier = {name for name in savers | views if op_index[name] < op_index[last]}
    # Operators of other segments stay there, and an expensive operator costs more than it saves.
    if last not in recomputed and not any(
        name in recomputed or _is_compute_intensive(graph.by_name[name]) for name in earlier
    ):
        recomputed.update(dict.fromkeys((*earlier, last), segment))


def _is_compute_intensive(op: Op) -> bool:
    """Whether the sharding rule of `op` marks it as compute-intensive, such as a matrix product."""
    rule = rule_of(op)
    return rule is not None and rule.main is not None


def _is_view_operator(op: Op) -> bool:
    """Whether the operator's output shares the memory of its input."""
    if not isinstance(op.target, OpOverload):
        return False
    # `reshape` is not tagged as a view, because it may copy.
    return op.target.is_view or op.target is torch.ops.aten.reshape.default
