"""Pin strategies to modules and functions with `shard`, and collect the pins of a captured graph.

A pin is stored on the module, or on the function that `shard` returns; there is no global state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.core.capture.annotations import SoleOperator, attach
from shardwright.core.capture.naming import MAIN
from shardwright.core.constraints import Entry, OperatorStrategy
from shardwright.core.constraints.named_strategy import (
    NamedStrategy,
    PinnedStrategy,
    RequestedEntry,
    UserEntry,
    axis_names_of,
    check_argument_names,
    check_axis_names,
    entry_with_layout,
    requested_entry,
    requested_strategy,
)
from shardwright.core.constraints.pin import BoundaryPin, NamedFunction, Pin, tagged_calls
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.graph import Op as Operator
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.errors import StrategyError

aten = torch.ops.aten
ShardTarget = TypeVar("ShardTarget", bound=Callable[..., Any])

_DATA_MOVEMENT_OPS = (
    aten.alias.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.expand.default,
    aten.to.dtype,
    aten.detach.default,
)
"""Operators that only view, copy or cast a tensor. A pinned function may contain them beside the
one operator that the strategy is for."""


def shard(
    target: ShardTarget,
    in_strategy: tuple[UserEntry, ...] | Mapping[str, UserEntry] | None = None,
    out_strategy: tuple[UserEntry, ...] | None = None,
    parameter_plan: Mapping[str, UserEntry] | None = None,
) -> ShardTarget:
    """Pin the sharding of an operator, so that the search does not change it.

    Args:
        target: a module, or a function; call the returned function in `forward`. In a function or a
            module without submodules the main operator is pinned, in every call. If the target has
            several operators, or none (`nn.Identity`), or has submodules, its tensor arguments and
            results are pinned instead. A later `shard` of the same module replaces this one.
        in_strategy: one entry per tensor input, in the order of the operator or of the signature of
            `forward`: a tuple with the number of shards of each dimension, a `TensorLayout`, the
            dimension that each mesh axis shards (`{"dp": 0, "tp": -1}`, also as `Shard(0)`) with
            sizes given as `axes` of `plan`, or None if the sharding follows from the other entries.
            Or entries by name: `{"input": {"dp": 0}, "weight": {"tp": 0}}`. Weights have PyTorch's
            shape, for `nn.Linear` (out_features, in_features). If the strategy has fewer shards
            than there are devices, the computation is replicated over the remaining mesh axes.
        out_strategy: one entry per output, in the same form. Partial sums are all-reduced or
            reduce-scattered to match; with None the operators that read the output decide. Entries
            can also shard dimensions that only the output has, such as the result of `expand`.
        parameter_plan: one entry for the storage of each parameter, by its name in the module.

    Returns:
        The module itself, or the pinned function.

    Raises:
        StrategyError: if an entry is invalid, or an argument or parameter unknown. `plan` checks
            the strategy against shapes and the number of devices.
    """
    if isinstance(target, type) or not callable(target):
        raise StrategyError(
            f"`shard` takes a module or a function, not {target!r}\n"
            "pass for example a submodule of the model: sw.shard(net.fc, ((2, 4), (1, 4)))"
        )
    if in_strategy is None and out_strategy is not None:
        raise StrategyError(
            "`out_strategy` requires `in_strategy`\n"
            "pass both: sw.shard(net.fc, ((2, 4), (1, 4)), out_strategy=((8, 1),))"
        )
    if in_strategy is None and parameter_plan is None:
        raise StrategyError(
            "`shard` requires `in_strategy` or `parameter_plan`\n"
            "call for example sw.shard(net.fc, ((2, 4), (1, 4)))"
        )
    strategy = None
    if in_strategy is not None:
        strategy = requested_strategy(in_strategy, out_strategy)
        function: Callable[..., Any] = target
        if isinstance(target, nn.Module):
            # `NamedFunction.forward` accepts any arguments; those of its function have names.
            function = target.function if isinstance(target, NamedFunction) else target.forward
        check_argument_names(target, function, strategy)
    if isinstance(target, nn.Module):
        pin = Pin(strategy, validate_parameter_plan(target, parameter_plan or {}))
        attach(target, pin)
        return target
    if parameter_plan is not None:
        raise StrategyError(
            "only modules take a `parameter_plan`: a function has no parameters\n"
            "call `shard` on the module that owns the parameters"
        )
    pinned: ShardTarget = tagged_calls(target, Pin(strategy))
    return pinned


def validate_parameter_plan(
    module: nn.Module, plan: Mapping[str, UserEntry | RequestedEntry]
) -> dict[str, RequestedEntry]:
    """Return a validated copy of a `parameter_plan`.

    Raises:
        StrategyError: if the module lacks a parameter in `plan`, or an entry is invalid.
    """
    # Any name of a tied parameter is valid.
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    entries: dict[str, RequestedEntry] = {}
    for name, entry in plan.items():
        if name not in parameters:
            closest = get_close_matches(str(name), parameters, cutoff=0.0)
            raise StrategyError(
                f"parameter_plan: {type(module).__name__} has no parameter {name!r}\n"
                f"closest parameters: {', '.join(closest) or 'none, the module has no parameters'}"
            )
        entries[name] = requested_entry(f"parameter_plan of {name!r}", entry)
    return entries


@dataclass(frozen=True)
class Pins:
    """The pinned operators and parameters of a graph.

    Args:
        strategies: the strategy of each pinned operator, by its name.
        parameters: the storage entry of each pinned parameter, by its name.
    """

    strategies: dict[str, OperatorStrategy]
    parameters: dict[str, Entry]


def pins_of(
    graph: Graph, axes: DeviceMatrix | None = None, dataset_strategy: Iterable[object] = ()
) -> Pins:
    """Collect the pins of a captured graph, by operator name and by parameter name.

    Args:
        graph: the captured graph.
        axes: the axes that entries may name, with their sizes.
        dataset_strategy: entries of the inputs of the model, which may name axes too.

    Raises:
        StrategyError: if a pin matches no operator or several, two pins of one operator differ, or
            entries and `axes` have different axis names.
    """
    requested = [
        *_iterate_module_strategies(graph),
        *_iterate_operator_strategies(graph),
        *_iterate_function_strategies(graph),
    ]
    stored = [
        entry for _, pin in _iterate_pinned_modules(graph) for entry in pin.parameters.values()
    ]
    # Before any layout is made, which needs the sizes of the axes that it names.
    strategies_of_operators = (strategy for _, strategy in requested)
    check_axis_names(axis_names_of([*strategies_of_operators, *stored, *dataset_strategy]), axes)
    strategies: dict[str, OperatorStrategy] = {}
    for op, strategy in requested:
        # Each operator by itself: positions of arguments and numbers of dimensions differ.
        if isinstance(strategy, NamedStrategy):
            strategy = strategy.operator_strategy(op, graph, axes)
        # Two equal pins of one operator are valid: the module is used twice, or a pinned function
        # is called in a pinned module.
        if strategies.setdefault(op.name, strategy) != strategy:
            raise StrategyError(
                f"operator {op.name!r} has two conflicting pins, {strategies[op.name]} and"
                f" {strategy}\nremove one of the two pins"
            )
    return Pins(strategies, _collect_parameter_entries(graph, axes))


def _iterate_module_strategies(graph: Graph) -> Iterator[tuple[Operator, PinnedStrategy]]:
    """Yield (operator, strategy) for the operators pinned by `shard` of a module."""
    # The pin of a module with submodules is on the aliases of its boundary (`constraints/pin.py`).
    boundary_paths = {op.module for op in graph.ops if _is_boundary_alias(op)}
    ops_inside = _operators_by_enclosing_module(graph)
    for pin, paths in _find_module_paths(graph).items():
        if pin.strategy is None or boundary_paths.issuperset(paths):
            continue
        ops = [op for path in paths for op in _find_main_operators(ops_inside[path], path)]
        if not ops:
            raise StrategyError(_format_pin_without_operator(graph, paths[0], pin))
        for op in ops:
            yield op, pin.strategy


def _is_boundary_alias(op: Operator) -> bool:
    return any(isinstance(tag, BoundaryPin) for tag in op.tags)


def _find_module_paths(graph: Graph) -> dict[Pin, list[str]]:
    """Return the module paths of each pin; a shared module has several."""
    paths: dict[Pin, list[str]] = {}
    for path, pin in _iterate_pinned_modules(graph):
        paths.setdefault(pin, []).append(path)
    return paths


def _iterate_pinned_modules(graph: Graph) -> Iterator[tuple[str, Pin]]:
    for path, tags in graph.module_tags.items():
        yield from ((path, tag) for tag in tags if isinstance(tag, Pin))


def _iterate_operator_strategies(graph: Graph) -> Iterator[tuple[Operator, PinnedStrategy]]:
    """Yield (operator, strategy) for names in a strategy file; a name without `@n` pins the
    operator in every call."""
    ops_by_name: dict[str, list[Operator]] = {}
    for op in graph.ops:
        name, _, call_number = op.name.rpartition("@")
        # `net.fc@2`, the second call of `net.fc`, is listed under the name of the module.
        ops_by_name.setdefault(name if call_number.isdigit() else op.name, []).append(op)
    for pin, paths in _find_module_paths(graph).items():
        # An entry for one call, "net.fc@2", takes precedence over one for all calls, "net.fc".
        listed = {path + suffix for path in paths for suffix in pin.operators}
        for suffix, strategy in pin.operators.items():
            names = [path + suffix for path in paths]
            ops = [graph.by_name[name] for name in names if name in graph.by_name]
            ops += [
                op for name in names for op in ops_by_name.get(name, ()) if op.name not in listed
            ]
            if not ops:
                closest = get_close_matches(names[0], list(graph.by_name), n=3, cutoff=0.0)
                raise StrategyError(
                    f"{names[0]!r} is pinned as {strategy}, but the graph has no operator of this"
                    f" name\nuse one of the closest: {', '.join(closest)}"
                )
            for op in ops:
                yield op, strategy


def _operators_by_enclosing_module(graph: Graph) -> defaultdict[str, list[Operator]]:
    """Return the operators of each module and its submodules, by the path of the module."""
    ops_inside: defaultdict[str, list[Operator]] = defaultdict(list)
    for op in graph.ops:
        path = op.module
        while path:
            ops_inside[path].append(op)
            path = path.rpartition(".")[0]
        # The empty path is that of the model itself.
        ops_inside[""].append(op)
    return ops_inside


def _find_main_operators(inside: list[Operator], path: str) -> list[Operator]:
    """Return the main operator of each call of the module at `path`.

    Args:
        inside: the operators of the module and its submodules.
    """
    direct = [op for op in inside if op.module == path]
    where = f"module {path!r}" if path else "the model itself"
    # The boundary of a module with submodules is pinned when it is traced, which a graph from
    # before the pin lacks.
    if len(direct) < len(inside):
        raise StrategyError(_format_ambiguous_pin(where, inside))
    calls: dict[str, list[Operator]] = {}
    for op in direct:
        calls.setdefault(_get_module_call_suffix(op.name, path), []).append(op)
    return [_find_single_operator(where, ops) for ops in calls.values()]


def _get_module_call_suffix(name: str, path: str) -> str:
    """Return the part of an operator's name that identifies the call of the module at `path`: `""`
    for the first call, `@2` for the second."""
    suffix = name.removeprefix(path)
    return suffix.partition(".")[0] if path and suffix.startswith("@") else ""


def _iterate_function_strategies(graph: Graph) -> Iterator[tuple[Operator, PinnedStrategy]]:
    """Yield (operator, strategy) for operators that `shard` of a function, or `reshard`, has
    pinned."""
    for pin, source in graph.call_tags:
        if not isinstance(pin, Pin) or pin.strategy is None:
            continue
        # Pins are compared by identity, so that two calls of one function remain apart.
        ops = [op for op in graph.ops if pin in op.tags]
        if not ops and isinstance(pin, BoundaryPin):
            continue  # Nothing reads the tensor, so the graph has no alias of it.
        where = f"the pinned function called at {source or 'an unknown line'}"
        if not ops:
            raise StrategyError(
                f"{where} is pinned as {pin.strategy}, but the graph has no operator of this call:"
                " its result is unused, or it computes nothing\nremove the pin"
            )
        yield _find_single_operator(where, ops), pin.strategy


def _find_single_operator(where: str, ops: Sequence[Operator]) -> Operator:
    """Return the only operator of a pinned call; additions of biases and data movement do not
    count.

    Raises:
        StrategyError: if several operators remain, or none.
    """
    # Capture has marked the operator of a call that also views, casts or creates tensors.
    ops = [op for op in ops if any(isinstance(tag, SoleOperator) for tag in op.tags)] or ops
    computing = [
        op for op in ops if op.target not in _DATA_MOVEMENT_OPS and not op.name.endswith(".bias")
    ]
    main = [op for op in computing if op.target in MAIN]
    # The pin of a linear layer applies to its product, although capture adds operators for bias and
    # reshape; the pin of a module that only reshapes applies to the reshape.
    for candidates in (main, computing, ops):
        if len(candidates) == 1:
            return candidates[0]
    raise StrategyError(_format_ambiguous_pin(where, ops))


def _format_ambiguous_pin(where: str, ops: Sequence[Operator]) -> str:
    names = ", ".join(op.name for op in ops[:8])
    more = f" and {len(ops) - 8} more" if len(ops) > 8 else ""
    return (
        f"{where} has {len(ops)} operators, but a pin is for a single one: {names}{more}\n"
        "pin a module with one operator, the function that is called (wrap it in `sw.Op` to name"
        " it), or a module around it, whose arguments and results are pinned"
    )


def _format_pin_without_operator(graph: Graph, path: str, pin: Pin) -> str:
    closest = get_close_matches(path, list(graph.by_name), n=3, cutoff=0.0)
    return (
        f"module {path!r} is pinned as {pin.strategy}, but has no operator in the graph: it is"
        f" never called, or it computes nothing\nuse one of the closest: {', '.join(closest)}"
    )


def _collect_parameter_entries(graph: Graph, axes: DeviceMatrix | None) -> dict[str, Entry]:
    parameters = {value.name: value for value in graph.parameters}
    entries: dict[str, Entry] = {}
    for path, pin in _iterate_pinned_modules(graph):
        for name_in_module, requested in pin.parameters.items():
            name = ".".join(filter(None, (path, name_in_module)))
            # A tied parameter is in the graph once, under the first of its names.
            graph_name = graph.tied.get(name, name)
            if graph_name not in parameters:
                raise StrategyError(
                    f"parameter_plan of {path or 'the model'!r}: no operator uses the parameter"
                    f" {name!r}\nremove the entry of the parameter"
                )
            ndim = len(parameters[graph_name].shape)
            entry = entry_with_layout(f"parameter_plan of {name!r}", requested, ndim, axes)
            # Two names of a tied parameter may have equal entries.
            if entries.setdefault(graph_name, entry) != entry:
                raise StrategyError(
                    f"parameter_plan of {path or 'the model'!r}: the parameter {name!r} has two"
                    " conflicting entries\nremove one of the two entries"
                )
    return entries
