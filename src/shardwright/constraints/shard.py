"""What users pin: `shard` attaches strategies to modules and functions.

`pins_of` finds them again in a captured graph. A pin is part of the module, or of the function that
`shard` returns; there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.capture.annotations import attach, tagging
from shardwright.capture.naming import MAIN
from shardwright.constraints import Entry, OperatorStrategy, check_entries, check_entry
from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph
from shardwright.graph.graph import Op as Operator

aten = torch.ops.aten
ShardTarget = TypeVar("ShardTarget", bound=Callable[..., Any])

_MOVES_ELEMENTS = (
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.expand.default,
    aten.to.dtype,
    aten.detach.default,
)
"""Operators that come along with others, so that they do not make a call one of several."""


@dataclass(frozen=True, eq=False)
class Pin:
    """What a user says of one module or function.

    Args:
        strategy: of its operator.
        parameters: how parameters are stored, by name in the module.
        operators: strategies of operators by what follows the module's path in their names: `""`
            for its main operator, in every call that is not named itself, `"@2"`, `".add_1"`.
    """

    strategy: OperatorStrategy | None
    parameters: Mapping[str, Entry] = field(default_factory=dict)
    operators: Mapping[str, OperatorStrategy] = field(default_factory=dict)


class NamedFunction(nn.Module):
    """A function with a name in the module tree, so that it can be pinned and found in plans.

    >>> net = nn.Module()
    >>> net.matmul1 = NamedFunction(torch.matmul)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        if isinstance(function, nn.Module) or not callable(function):
            raise StrategyError(f"Op takes a function, not {function!r}; a module has its own name")
        self.function = function

    def _get_name(self) -> str:
        return "Op"  # the name under which the package exports it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


def shard(
    target: ShardTarget,
    in_strategy: tuple[Entry, ...] | None = None,
    out_strategy: tuple[Entry, ...] | None = None,
    parameter_plan: Mapping[str, Entry] | None = None,
) -> ShardTarget:
    """Pins how an operator is cut: no search changes it.

    Args:
        target: a module (its main operator is pinned, in every call; a later `shard` replaces an
            earlier one), or a function, which is returned pinned and may be called in `forward`.
        in_strategy: for each tensor input, in the order of the operator, a tuple with the number of
            equal parts of each dimension, or a `TensorLayout`, or None where it follows from the
            others. A weight is as torch stores it: that of `nn.Linear` is (out_features,
            in_features). What no entry names stays whole; devices that are left repeat.
        out_strategy: for each output likewise; a partial sum is all-reduced or reduce-scattered
            accordingly. None leaves it to the operators that read it. What only an output has, the
            copies that `expand` makes, is cut by it.
        parameter_plan: how parameters of the module are stored, by name.

    Returns:
        The module itself, or the pinned function.

    Raises:
        StrategyError: if an entry is none, or a parameter is unknown. What needs shapes and the
            number of devices is checked by `plan`.
    """
    if isinstance(target, type) or not callable(target):
        raise StrategyError(f"shard takes a module or a function, not {target!r}")
    if in_strategy is None and out_strategy is not None:
        raise StrategyError("out_strategy is given without in_strategy, on which it depends")
    if in_strategy is None and parameter_plan is None:
        raise StrategyError("shard needs an in_strategy, or a parameter_plan")
    strategy = None
    if in_strategy is not None:
        check_entries("in_strategy", in_strategy)
        strategy = OperatorStrategy(in_strategy, out_strategy)
    if isinstance(target, nn.Module):
        pin = Pin(strategy, checked_parameter_plan(target, parameter_plan or {}))
        attach(target, pin)
        return target
    if parameter_plan is not None:
        raise StrategyError(
            "parameter_plan is for modules; a function has no parameters: pin the module that has"
        )
    function: ShardTarget = _pinned_function(target, Pin(strategy))
    return function


def checked_parameter_plan(module: nn.Module, plan: Mapping[str, Entry]) -> dict[str, Entry]:
    """Raises:
    StrategyError: if the module has no such parameter, or an entry is none.
    """
    known = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for name, entry in plan.items():
        if name not in known:
            near = get_close_matches(str(name), known, cutoff=0.0)
            raise StrategyError(
                f"parameter_plan: {type(module).__name__} has no parameter {name!r}; nearest:"
                f" {', '.join(near) or 'it has none'}"
            )
        check_entry(f"parameter_plan of {name!r}", entry)
    return dict(plan)


def _pinned_function(function: Any, pin: Pin) -> Any:
    inner = getattr(function, "_without_pin", function)

    @wraps(inner)
    def pinned_function(*args: Any, **kwargs: Any) -> Any:
        # A pin of its own for every call, so that calls can be told apart.
        with tagging(replace(pin)):
            return inner(*args, **kwargs)

    vars(pinned_function)["_without_pin"] = inner
    return pinned_function


@dataclass(frozen=True)
class Pins:
    """The pins of a graph.

    Args:
        strategies: by name of the operator.
        parameters: how parameters are stored, by name.
    """

    strategies: dict[str, OperatorStrategy]
    parameters: dict[str, Entry]


def pins_of(graph: Graph) -> Pins:
    """Finds the operators and parameters that the pins in a captured graph are about.

    Raises:
        StrategyError: if a pin is about no operator, or about several, or two about one.
    """
    strategies: dict[str, OperatorStrategy] = {}
    for op, strategy in (*_of_modules(graph), *_of_names(graph), *_of_calls(graph)):
        if strategies.setdefault(op.name, strategy) != strategy:
            raise StrategyError(
                f"{op.name} is pinned twice, as {strategies[op.name]} and as {strategy}; keep one"
            )
    return Pins(strategies, _stored(graph))


def _of_modules(graph: Graph) -> Iterator[tuple[Operator, OperatorStrategy]]:
    for pin, paths in _by_pin(graph):
        if pin.strategy is None:
            continue
        found = [op for path in paths for op in _operators_of_module(graph, path)]
        if not found:
            raise StrategyError(_no_operator(graph, paths[0], pin))
        for op in found:
            yield op, pin.strategy


def _by_pin(graph: Graph) -> Iterator[tuple[Pin, list[str]]]:
    """Every module's pin with the paths of the module."""
    paths: dict[int, list[str]] = {}
    pins: dict[int, Pin] = {}
    for path, pin in _pinned_modules(graph):
        paths.setdefault(id(pin), []).append(path)
        pins[id(pin)] = pin
    for key, shared in paths.items():
        yield pins[key], shared


def _pinned_modules(graph: Graph) -> Iterator[tuple[str, Pin]]:
    for path, tags in graph.module_tags.items():
        yield from ((path, tag) for tag in tags if isinstance(tag, Pin))


def _of_names(graph: Graph) -> Iterator[tuple[Operator, OperatorStrategy]]:
    calls: dict[str, list[Operator]] = {}
    for op in graph.ops:
        first, _, number = op.name.rpartition("@")
        calls.setdefault(first if number.isdigit() else op.name, []).append(op)
    for pin, paths in _by_pin(graph):
        own = {path + rest for path in paths for rest in pin.operators}
        for rest, strategy in pin.operators.items():
            names = [path + rest for path in paths]
            found = [graph.by_name[name] for name in names if name in graph.by_name]
            found += [op for name in names for op in calls.get(name, ()) if op.name not in own]
            if not found:
                near = get_close_matches(names[0], list(graph.by_name), n=3, cutoff=0.0)
                raise StrategyError(
                    f"{names[0]!r} is pinned as {strategy}, but no operator is called so; nearest"
                    f" operators: {', '.join(near)}"
                )
            for op in found:
                yield op, strategy


def _operators_of_module(graph: Graph, path: str) -> list[Operator]:
    """The main operator of each call of a module."""
    below = [op for op in graph.ops if not path or f"{op.module}.".startswith(f"{path}.")]
    own = [op for op in below if op.module == path]
    where = f"module {path!r}" if path else "the model itself"
    if len(own) < len(below):
        raise StrategyError(_several(where, below))
    calls: dict[str, list[Operator]] = {}
    for op in own:
        calls.setdefault(_call(op.name, path), []).append(op)
    return [_main_operator(where, ops) for ops in calls.values()]


def _call(name: str, path: str) -> str:
    """`""` for operators of the first call of a module, `@2` for those of the second."""
    rest = name.removeprefix(path)
    return rest.partition(".")[0] if path and rest.startswith("@") else ""


def _of_calls(graph: Graph) -> Iterator[tuple[Operator, OperatorStrategy]]:
    for pin, source in graph.call_tags:
        if not isinstance(pin, Pin) or pin.strategy is None:
            continue
        ops = [op for op in graph.ops if pin in op.tags]
        where = f"the pinned function called at {source or 'an unknown line'}"
        if not ops:
            raise StrategyError(
                f"{where}, {pin.strategy}: no operator of it is in the graph; what it computes is"
                " not used, or changes nothing"
            )
        yield _main_operator(where, ops), pin.strategy


def _main_operator(where: str, ops: Sequence[Operator]) -> Operator:
    """The operator that a pin of these is about: the only one but for biases and reshapes."""
    computing = [
        op for op in ops if op.target not in _MOVES_ELEMENTS and not op.name.endswith(".bias")
    ]
    main = [op for op in computing if op.target in MAIN]
    for candidates in (main, computing, ops):
        if len(candidates) == 1:
            return candidates[0]
    raise StrategyError(_several(where, ops))


def _several(where: str, ops: Sequence[Operator]) -> str:
    names = ", ".join(op.name for op in ops[:8])
    more = f" and {len(ops) - 8} more" if len(ops) > 8 else ""
    return (
        f"{where} has {len(ops)} operators, a pin is for one: {names}{more}; pin a module that has"
        " one operator, or a function, with sw.Op if it should have a name"
    )


def _no_operator(graph: Graph, path: str, pin: Pin) -> str:
    near = get_close_matches(path, list(graph.by_name), n=3, cutoff=0.0)
    return (
        f"module {path!r} is pinned as {pin.strategy}, but has no operator in the graph: it is not"
        f" called, or what it does changes nothing; nearest operators: {', '.join(near)}"
    )


def _stored(graph: Graph) -> dict[str, Entry]:
    known = {value.name for value in graph.parameters}
    stored: dict[str, Entry] = {}
    for path, pin in _pinned_modules(graph):
        for inner, entry in pin.parameters.items():
            name = ".".join(filter(None, (path, inner)))
            first = graph.tied.get(name, name)
            if first not in known:
                raise StrategyError(
                    f"parameter_plan of {path or 'the model'!r}: the parameter {name!r} is not used"
                )
            if stored.setdefault(first, entry) != entry:
                raise StrategyError(
                    f"parameter_plan of {path or 'the model'!r}: the parameter {name!r} is planned"
                    " twice, differently"
                )
    return stored
