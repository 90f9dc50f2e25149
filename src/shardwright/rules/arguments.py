"""The arguments of an operator by name, for ATen operators and for those of our own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from shardwright.graph.graph import Op, Target, Value
from shardwright.rules.rule import Dims


@cache
def parameters(target: Target) -> dict[str, Any]:
    """The names of what `target` takes, in order, with their defaults; None without one."""
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema.arguments
        return {a.name: a.default_value if a.has_default_value() else None for a in schema}
    taken = inspect.signature(target).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in taken}


def named(op: Op) -> dict[str, Any]:
    """What `op` was given, by name, in the order in which it was given; no defaults."""
    return {**dict(zip(parameters(op.target), op.args, strict=False)), **op.kwargs}


def arguments(op: Op) -> dict[str, Any]:
    """Every argument of `op` by name, with the defaults where none was given."""
    return {**parameters(op.target), **named(op)}


def input_dims(op: Op, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """The dims of `Op.inputs`, from those of the named arguments."""
    return tuple(dims[name] for name, given in named(op).items() if isinstance(given, Value))


def binder(op: Op) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    """Gives for a call of a kernel of `op` the arguments by name, with the defaults where none was
    given. What does not depend on the call is worked out here, once."""
    defaults = parameters(op.target)
    names = tuple(defaults)

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return bind


def with_arguments(op: Op, **changed: Any) -> Callable[..., Any]:
    """The target of `op` as a function of its arguments that replaces those in `changed`."""
    names = list(parameters(op.target))
    places = {names.index(name): given for name, given in changed.items()}
    positional = {i: given for i, given in places.items() if i < len(op.args)}
    keywords = {names[i]: given for i, given in places.items() if i >= len(op.args)}

    def run(*args: Any, **kwargs: Any) -> Any:
        replaced = (positional.get(i, given) for i, given in enumerate(args))
        return op.target(*replaced, **{**kwargs, **keywords})

    return run
