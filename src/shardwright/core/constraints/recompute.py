"""`recompute` marks modules and functions for activation checkpointing.

`recompute_of` finds the marks in a captured graph. A mark is part of the module, or of the function
that `recompute` returns; there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.core.capture.annotations import RecomputeMark, attach
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
    """Recomputes activations in the backward pass instead of saving them.

    Every call of the module or function becomes one checkpointed segment: only its inputs are
    saved, and the backward pass computes the rest again. An inner mark overrides an outer one.

    Args:
        target: a module, with all its submodules (a later mark replaces an earlier one; a
            `ModuleList` marks each of its modules), or a function; call the returned function in
            `forward`.
        communication: whether collectives between layouts are run again too. If not, their results
            are saved, and recomputation sends no additional bytes.
        operators: recompute only these operators, `"aten.softmax"` or `"softmax"`, each together
            with the operator that reads it. None for all; an empty sequence exempts the target from
            the mark of a module around it.

    Returns:
        The module itself, or the marked function.

    Raises:
        StrategyError: if the target is neither a module nor a function, or `operators` is not a
            sequence of names. Names that do not occur in the model are reported by `plan`.
    """
    if isinstance(target, type) or not callable(target):
        raise StrategyError(f"recompute takes a module or a function, not {target!r}")
    if isinstance(operators, str) or any(not isinstance(kind, str) for kind in operators or ()):
        raise StrategyError(
            f"operators={operators!r}: must be a sequence of operator names such as"
            " ('softmax', 'aten.gelu')"
        )
    kinds = None if operators is None else tuple(_kind(name) for name in operators)
    mark = RecomputeMark(communication, kinds)
    if isinstance(target, nn.ModuleList | nn.ModuleDict):
        for module in target.children():
            recompute(module, communication, operators=operators)
        return target
    if isinstance(target, nn.Module):
        attach(target, mark)
        return target
    function: RecomputeTarget = tagged_calls(target, mark)
    return function


def _kind(operator: str) -> str:
    """`softmax` of `aten.softmax.int`, `aten::softmax` or `softmax`."""
    return operator.replace("::", ".").removeprefix("aten.").partition(".")[0].strip("_")


@dataclass(frozen=True)
class _Place:
    """A mark, and the segment of one call of its module or function."""

    mark: RecomputeMark
    segment: str


def recompute_of(graph: Graph) -> dict[str, Recompute]:
    """By name, the operators that the marks of a captured graph recompute.

    Raises:
        StrategyError: if a mark matches no operator.
    """
    modules = {
        path: tag
        for path, tags in graph.module_tags.items()
        for tag in tags
        if isinstance(tag, RecomputeMark)
    }
    functions = dict(_marked_calls(graph))
    _check_modules(graph, modules)
    recomputed: dict[str, Recompute] = {}
    members: dict[str, list[Op]] = {}
    selected: dict[RecomputeMark, list[Op]] = {}
    for op in graph.ops:
        place = _innermost_mark(op, modules, functions)
        if place is None:
            continue
        if place.mark.kinds is None:
            recomputed[op.name] = Recompute(place.segment, place.mark.communication)
            members.setdefault(place.segment, []).append(op)
        elif local_operator_name(op.target) in place.mark.kinds:
            selected.setdefault(place.mark, []).append(op)
    places = _positions(graph)
    for ops in members.values():
        if len([op for op in ops if not op.name.endswith(".bias")]) == 1:
            _add_readers(graph, recomputed, ops, places)
    for mark, ops in selected.items():
        add_segments(graph, recomputed, ops, mark.communication)
    return recomputed


def add_segments(
    graph: Graph, recomputed: dict[str, Recompute], ops: Sequence[Op], communication: bool
) -> None:
    """Adds `ops` to `recomputed`, together with the operators that save their results.

    Operators that follow each other, or read each other's results, share a segment.
    """
    members: dict[str, list[Op]] = {}
    segments: dict[str, str] = {}
    place = _positions(graph)
    for op in ops:
        makers = [graph.producer[v].name for v in op.inputs if v in graph.producer]
        number = place[op.name]
        previous = [graph.ops[number - 1].name] if number else []
        neighbors = [segments[name] for name in (*makers, *previous) if name in segments]
        segments[op.name] = neighbors[0] if neighbors else op.name
        members.setdefault(segments[op.name], []).append(op)
    for segment, segment_ops in members.items():
        recomputed.update((op.name, Recompute(segment, communication)) for op in segment_ops)
    for segment_ops in members.values():
        _add_readers(graph, recomputed, segment_ops, place)


def _positions(graph: Graph) -> dict[str, int]:
    return {op.name: number for number, op in enumerate(graph.ops)}


def _marked_calls(graph: Graph) -> Iterator[tuple[int, _MarkedCall]]:
    """The calls of marked functions, by the mark of each.

    Raises:
        StrategyError: if one has no operator.
    """
    for mark, source in graph.call_tags:
        if not isinstance(mark, RecomputeMark):
            continue
        ops = [op for op in graph.ops if any(tag is mark for tag in op.tags)]
        if not ops and mark.checkpoint:
            continue
        if not ops:
            raise StrategyError(
                f"the function called at {source or 'an unknown line'} is marked by recompute, but"
                " the graph has no operator of this call; its result is unused, or it computes"
                " nothing"
            )
        _check_kinds(f"the function called at {source or 'an unknown line'}", mark, ops)
        yield (
            id(mark),
            _MarkedCall(_Place(mark, ops[0].name), _common_depth([op.calls for op in ops])),
        )


@dataclass(frozen=True)
class _MarkedCall:
    """A call of a marked function, and the number of module calls that enclose it."""

    place: _Place
    depth: int


def _common_depth(calls: Sequence[tuple[str, ...]]) -> int:
    """The length of the longest common prefix."""
    return sum(len(set(level)) == 1 for level in zip(*calls, strict=False))


def _innermost_mark(
    op: Op, modules: Mapping[str, RecomputeMark], functions: Mapping[int, _MarkedCall]
) -> _Place | None:
    """The innermost mark around an operator."""
    function = next((functions[id(tag)] for tag in op.tags if id(tag) in functions), None)
    for call in reversed(op.calls[function.depth if function else 0 :]):
        mark = modules.get(call.partition("@")[0])
        if mark is not None:
            return _Place(mark, call or "model")
    return function.place if function else None


def _check_modules(graph: Graph, modules: Mapping[str, RecomputeMark]) -> None:
    """Raises:
    StrategyError: if the module of a mark has no operator, or none with a name that it lists.
    """
    inside: dict[RecomputeMark, list[Op]] = {mark: [] for mark in modules.values()}
    for op in graph.ops:
        marks = (modules.get(call.partition("@")[0]) for call in op.calls)
        for mark in {mark for mark in marks if mark is not None}:
            inside[mark].append(op)
    for path, mark in modules.items():
        ops = inside[mark]
        where = f"module {path!r}" if path else "the model"
        if not ops:
            near = get_close_matches(path, list(graph.by_name), n=3, cutoff=0.0)
            raise StrategyError(
                f"{where} is marked by recompute, but has no operator in the graph: it is never"
                f" called, or it computes nothing; closest operators: {', '.join(near)}"
            )
        _check_kinds(where, mark, ops)


def _check_kinds(where: str, mark: RecomputeMark, ops: Sequence[Op]) -> None:
    known = dict.fromkeys(local_operator_name(op.target) for op in ops)
    for kind in mark.kinds or ():
        if kind not in known:
            raise StrategyError(
                f"recompute: {where} has no operator {kind!r}; its operators are {', '.join(known)}"
            )


def _add_readers(
    graph: Graph, recomputed: dict[str, Recompute], ops: Sequence[Op], place: Mapping[str, int]
) -> None:
    """Extends a segment by the operators that save its results for their backward pass.

    Otherwise these results would stay in memory. The last operator of a segment is not itself
    recomputed, only its inputs are, so only the last one may be expensive.
    """
    segment = recomputed[ops[-1].name]
    results = [value for op in ops for value in op.outputs]
    members = {op.name for op in ops}
    keeping: set[str] = set()
    views: set[str] = set()
    for value in results:
        for op, index in graph.consumers[value]:
            if op.name in members:
                continue
            if _is_view(op):
                views.add(op.name)
                results += op.outputs
            elif index in saved_tensors(op).inputs:
                keeping.add(op.name)
    if not keeping:
        return
    last = max(keeping, key=lambda name: place[name])
    earlier = {name for name in keeping | views if place[name] < place[last]}
    if last not in recomputed and not any(
        name in recomputed or _is_expensive(graph.by_name[name]) for name in earlier
    ):
        recomputed.update(dict.fromkeys((*earlier, last), segment))


def _is_expensive(op: Op) -> bool:
    rule = rule_of(op)
    return rule is not None and rule.main is not None


def _is_view(op: Op) -> bool:
    """Whether the output shares the memory of the input."""
    if not isinstance(op.target, OpOverload):
        return False
    return op.target.is_view or op.target is torch.ops.aten.reshape.default
