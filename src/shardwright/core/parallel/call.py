"""Bind calls of a parallel module to the signature of `forward`, and compare them with the planned
call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def key_of(leaf: Any) -> Any:
    """What a program depends on of one argument: shape, dtype and gradient, or a Python value."""
    if isinstance(leaf, Value):
        return leaf.shape, leaf.stored_dtype, leaf.differentiable
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad and torch.is_grad_enabled()
    return type(leaf), leaf


class PlannedCall:
    """The call that a model was planned for.

    Args:
        forward: the model's `forward`.
        graph: the graph that was captured from the call.
    """

    def __init__(self, forward: Callable[..., Any], graph: Graph) -> None:
        self._signature = inspect.signature(forward)
        self._positions = [
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._inputs = graph.inputs
        self._args, self._kwargs = pytree.tree_unflatten(list(graph.inputs), graph.in_spec)
        self._names = self._without_defaults(self._named(self._args, self._kwargs)).keys()
        self._numbers = {path: number for number, path in enumerate(self._paths(graph.in_spec))}
        self._numbers_of: dict[pytree.TreeSpec, list[int | None]] = {}

    def arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Order the arguments as in the planned call if they are the same ones, else by keyword.

        Whether an argument with a default is passed makes no difference.

        Raises:
            PlanError: if `forward` does not take them.
        """
        as_planned = len(args) == len(self._args) and kwargs.keys() == self._kwargs.keys()
        if as_planned and not any(value is None for value in (*args, *kwargs.values())):
            return args, {name: kwargs[name] for name in self._kwargs}
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PlanError(
                f"called with {_in_words(args, kwargs)}: {error}; planned for "
                f"{', '.join(str(leaf) for leaf in self._inputs)}"
            ) from None
        named = self._without_defaults(self._named(args, kwargs))
        if named.keys() == self._names:
            in_order = [self._value(name, named) for name in self._named(self._args, self._kwargs)]
            count = len(self._args)
            return tuple(in_order[:count]), dict(zip(self._kwargs, in_order[count:], strict=True))
        keywords = self._signature.parameters
        if any(self._must_be_positional(name) for name in named):
            return args, kwargs
        return (), {name: named[name] for name in sorted(named, key=[*keywords, *named].index)}

    def planned_inputs(self, spec: pytree.TreeSpec) -> list[int | None]:
        """Index of the planned leaf for each leaf of a call of this structure; None if new."""
        if spec not in self._numbers_of:
            self._numbers_of[spec] = [self._numbers.get(path) for path in self._paths(spec)]
        return self._numbers_of[spec]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises:
        PlanError: if an argument that was planned as a tensor is not a tensor, or has another
            dtype or number of dimensions.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for number, leaf in zip(self.planned_inputs(spec), leaves, strict=True):
            wanted = None if number is None else self._inputs[number]
            if not isinstance(wanted, Value):
                continue
            if not isinstance(leaf, Tensor):
                raise PlanError(f"input {wanted.name!r} is {leaf!r}, but was planned as a tensor")
            if leaf.dtype != wanted.stored_dtype:
                raise PlanError(
                    f"input {wanted.name!r} has dtype {leaf.dtype}, planned for "
                    f"{wanted.stored_dtype}"
                )
            if leaf.ndim != len(wanted.shape):
                raise PlanError(
                    f"input {wanted.name!r} is {tuple(leaf.shape)}, planned for {wanted.shape}: "
                    "every rank is given the whole batch"
                )

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [*self._positions, *(f"*{n}" for n in range(len(args)))]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _paths(self, spec: pytree.TreeSpec) -> list[str]:
        args, kwargs = pytree.tree_unflatten(range(spec.num_leaves), spec)
        flat, _ = pytree.tree_flatten_with_path(self._named(args, kwargs))
        return [pytree.keystr(path) for path, _ in flat]

    def _without_defaults(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if not self._is_default(name, value)}

    def _is_default(self, name: str, value: Any) -> bool:
        default = self._default(name)
        return value is default or (
            isinstance(value, bool | int | float | str)
            and type(value) is type(default)
            and value == default
        )

    def _default(self, name: str) -> Any:
        parameter = self._signature.parameters.get(name)
        return inspect.Parameter.empty if parameter is None else parameter.default

    def _value(self, name: str, named: dict[str, Any]) -> Any:
        return named[name] if name in named else self._default(name)

    def _must_be_positional(self, name: str) -> bool:
        parameter = self._signature.parameters.get(name)
        return name.startswith("*") or (
            parameter is not None and parameter.kind is parameter.POSITIONAL_ONLY
        )


def _in_words(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    count = f"{len(args)} positional argument{'s' if len(args) != 1 else ''}"
    return f"{count} and keywords {sorted(kwargs)}" if kwargs else count
