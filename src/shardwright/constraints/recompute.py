"""What users ask to compute again: `recompute` marks modules and functions.

`recompute_of` finds the marks again in a captured graph. A mark is part of the module, or of the
function that `recompute` returns; there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.capture.annotations import attach, tagging
from shardwright.capture.naming import local_operator_name
from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph, Op
from shardwright.graph.saved_tensors import saved_tensors
from shardwright.partition.decisions import Recompute
from shardwright.rules import rule_of
from shardwright.torch_internals.operators import OpOverload

RecomputeTarget = TypeVar("RecomputeTarget", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Mark:
    """What a user says of one module or function.

    Args:
        communication: whether conversions are made again too.
        kinds: of operators that are computed again; None for all.
    """

    communication: bool = True
    kinds: tuple[str, ...] | None = None


def recompute(
    target: RecomputeTarget, communication: bool = True, *, operators: Sequence[str] | None = None
) -> RecomputeTarget:
    """Computes what is inside again in the backward pass, instead of keeping it.

    Every call of the module or function becomes a segment: its inputs are kept, what lies inside is
    not, and the backward pass computes it once more. A mark further inside wins there.

    Args:
        target: a module, with all modules in it (a later mark replaces an earlier one; a
            `ModuleList` stands for each of its modules), or a function, which is returned marked
            and may be called in `forward`.
        communication: whether conversions between layouts are made again too. If not, their results
            are kept, and no byte more is sent than without recomputation.
        operators: only operators of these kinds, `"aten.softmax"` or `"softmax"`; each is computed
            again together with the one that reads it. None for all; an empty one for none, where
            a module further outside is marked.

    Returns:
        The module itself, or the marked function.

    Raises:
        StrategyError: if the target is neither, or a kind is no text. What is not in the model is
            found by `plan`.
    """
    if isinstance(target, type) or not callable(target):
        raise StrategyError(f"recompute takes a module or a function, not {target!r}")
    if isinstance(operators, str) or any(not isinstance(kind, str) for kind in operators or ()):
        raise StrategyError(
            f"operators={operators!r}: must be a sequence of names of operators, as in"
            " ('softmax', 'aten.gelu')"
        )
    kinds = None if operators is None else tuple(_kind(given) for given in operators)
    mark = Mark(communication, kinds)
    if isinstance(target, nn.ModuleList | nn.ModuleDict):
        for module in target.children():
            recompute(module, communication, operators=operators)
        return target
    if isinstance(target, nn.Module):
        attach(target, mark)
        return target
    function: RecomputeTarget = _marked_function(target, mark)
    return function


def _kind(given: str) -> str:
    """`softmax` of `aten.softmax.int`, `aten::softmax` or `softmax`."""
    return given.replace("::", ".").removeprefix("aten.").partition(".")[0].strip("_")


def _marked_function(function: Any, mark: Mark) -> Any:
    inner = getattr(function, "_without_mark", function)

    @wraps(inner)
    def marked_function(*args: Any, **kwargs: Any) -> Any:
        # A mark of its own for every call, so that calls can be told apart.
        with tagging(replace(mark)):
            return inner(*args, **kwargs)

    vars(marked_function)["_without_mark"] = inner
    return marked_function


@dataclass(frozen=True)
class _Place:
    """A mark at one call of its module or function."""

    mark: Mark
    segment: str


def recompute_of(graph: Graph) -> dict[str, Recompute]:
    """By name the operators that the marks in a captured graph are about.

    Raises:
        StrategyError: if a mark is about no operator.
    """
    modules = {path: m for path, tags in graph.module_tags.items() for m in tags if _is_mark(m)}
    functions = dict(_functions(graph))
    _check_modules(graph, modules)
    found: dict[str, Recompute] = {}
    members: dict[str, list[Op]] = {}
    selected: dict[Mark, list[Op]] = {}
    for op in graph.ops:
        place = _innermost(op, modules, functions)
        if place is None:
            continue
        if place.mark.kinds is None:
            found[op.name] = Recompute(place.segment, place.mark.communication)
            members.setdefault(place.segment, []).append(op)
        elif local_operator_name(op.target) in place.mark.kinds:
            selected.setdefault(place.mark, []).append(op)
    places = _places(graph)
    for ops in members.values():
        if len([op for op in ops if not op.name.endswith(".bias")]) == 1:
            _add_readers(graph, found, ops, places)
    for mark, ops in selected.items():
        select(graph, found, ops, mark.communication)
    return found


def select(
    graph: Graph, found: dict[str, Recompute], ops: Sequence[Op], communication: bool
) -> None:
    """Adds to `found` chosen operators, in segments of those that follow each other or read each
    other's results, with the operators that keep their results."""
    members: dict[str, list[Op]] = {}
    segments: dict[str, str] = {}
    place = _places(graph)
    for op in ops:
        makers = [graph.producer[v].name for v in op.inputs if v in graph.producer]
        number = place[op.name]
        before = [graph.ops[number - 1].name] if number else []
        joined = [segments[name] for name in (*makers, *before) if name in segments]
        segments[op.name] = joined[0] if joined else op.name
        members.setdefault(segments[op.name], []).append(op)
    for segment, mine in members.items():
        found.update((op.name, Recompute(segment, communication)) for op in mine)
    for mine in members.values():
        _add_readers(graph, found, mine, place)


def _places(graph: Graph) -> dict[str, int]:
    return {op.name: number for number, op in enumerate(graph.ops)}


def _is_mark(tag: Any) -> bool:
    return isinstance(tag, Mark)


def _functions(graph: Graph) -> Iterator[tuple[int, _Function]]:
    """The calls of marked functions, by the mark of each.

    Raises:
        StrategyError: if one has no operator.
    """
    for mark, source in graph.call_tags:
        if not isinstance(mark, Mark):
            continue
        ops = [op for op in graph.ops if any(tag is mark for tag in op.tags)]
        if not ops:
            raise StrategyError(
                f"the function called at {source or 'an unknown line'} is marked by recompute, but"
                " no operator of it is in the graph; what it computes is not used, or changes"
                " nothing"
            )
        _check_kinds(f"the function called at {source or 'an unknown line'}", mark, ops)
        yield id(mark), _Function(_Place(mark, ops[0].name), _shared([op.calls for op in ops]))


@dataclass(frozen=True)
class _Function:
    """A call of a marked function, and how many of the modules around it are called outside."""

    place: _Place
    depth: int


def _shared(calls: Sequence[tuple[str, ...]]) -> int:
    """With how many equal calls all begin."""
    return sum(len(set(level)) == 1 for level in zip(*calls, strict=False))


def _innermost(
    op: Op, modules: Mapping[str, Mark], functions: Mapping[int, _Function]
) -> _Place | None:
    """The mark that is nearest around an operator."""
    around = next((functions[id(tag)] for tag in op.tags if id(tag) in functions), None)
    for call in reversed(op.calls[around.depth if around else 0 :]):
        mark = modules.get(call.partition("@")[0])
        if mark is not None:
            return _Place(mark, call or "model")
    return around.place if around else None


def _check_modules(graph: Graph, modules: Mapping[str, Mark]) -> None:
    """Raises:
    StrategyError: if the module of a mark has no operator, or none of a kind that it names.
    """
    inside: dict[int, list[Op]] = {id(mark): [] for mark in modules.values()}
    for op in graph.ops:
        marks = (modules.get(call.partition("@")[0]) for call in op.calls)
        for key in {id(mark) for mark in marks if mark is not None}:
            inside[key].append(op)
    for path, mark in modules.items():
        ops = inside[id(mark)]
        where = f"module {path!r}" if path else "the model"
        if not ops:
            near = get_close_matches(path, list(graph.by_name), n=3, cutoff=0.0)
            raise StrategyError(
                f"{where} is marked by recompute, but has no operator in the graph: it is not"
                f" called, or what it does changes nothing; nearest operators: {', '.join(near)}"
            )
        _check_kinds(where, mark, ops)


def _check_kinds(where: str, mark: Mark, ops: Sequence[Op]) -> None:
    known = dict.fromkeys(local_operator_name(op.target) for op in ops)
    for kind in mark.kinds or ():
        if kind not in known:
            raise StrategyError(
                f"recompute of the operators {kind!r} in {where}: it has none; it has"
                f" {', '.join(known)}"
            )


def _add_readers(
    graph: Graph, found: dict[str, Recompute], ops: Sequence[Op], place: Mapping[str, int]
) -> None:
    """Lets a segment of one operator, or of chosen kinds, also have those that keep its results.

    What only they keep need not be kept then. The last one is not run again itself: its inputs are
    enough. So there may be one operator of much work, as the last.
    """
    said = found[ops[-1].name]
    results = [value for op in ops for value in op.outputs]
    own = {op.name for op in ops}
    keeping: set[str] = set()
    views: set[str] = set()
    for value in results:
        for op, index in graph.consumers[value]:
            if op.name in own:
                continue
            if _is_view(op):
                views.add(op.name)
                results += op.outputs
            elif index in saved_tensors(op).inputs:
                keeping.add(op.name)
    if not keeping:
        return
    last = max(keeping, key=lambda name: place[name])
    before = {name for name in keeping | views if place[name] < place[last]}
    if last not in found and not any(
        name in found or _works_hard(graph.by_name[name]) for name in before
    ):
        found.update(dict.fromkeys((*before, last), said))


def _works_hard(op: Op) -> bool:
    rule = rule_of(op)
    return rule is not None and rule.main is not None


def _is_view(op: Op) -> bool:
    """Whether the output shares the memory of the input."""
    if not isinstance(op.target, OpOverload):
        return False
    return op.target.is_view or op.target is torch.ops.aten.reshape.default
