"""Bind calls of a planned module to the signature of `forward`, and check each call against the
planned call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.core.capture.attributes import NUMBERS
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def argument_key(leaf: Any) -> Any:
    """Return the cache key of an argument: shape, dtype and requires_grad of a tensor, or the type
    and value of another object.

    The type is part of the key because `True == 1 == 1.0`.
    """
    if isinstance(leaf, Value):
        return leaf.shape, leaf.stored_dtype, leaf.differentiable
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad and torch.is_grad_enabled()
    if isinstance(leaf, float) and (not leaf or math.isnan(leaf)):
        # NaN differs from itself, so no later call would find the program of this one; -0.0 equals
        # 0.0, of which another program computes.
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def _name_of_path(path: str) -> str:
    # `['scale']` for an argument `scale`, `['options']['scale']` for an entry of one.
    return path.removeprefix("['").replace("']", "", 1)


class PlannedCall:
    """The call that a model was planned for.

    Args:
        forward: the model's `forward`.
        graph: the graph captured from the planned call.
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
        self._planned_names = self._omit_default_arguments(
            self._name_arguments(self._args, self._kwargs)
        ).keys()
        # By path and not by index: an argument may be passed by position or by keyword.
        self._planned_index = {
            path: index for index, path in enumerate(self._list_argument_paths(graph.in_spec))
        }
        self._planned_indices: dict[pytree.TreeSpec, list[int | None]] = {}
        self._leaf_names: dict[pytree.TreeSpec, list[str]] = {}

    def reorder_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the arguments of a call in the structure of the planned call.

        If the call passes other parameters than the planned call, return the arguments by keyword,
        without arguments that equal their defaults.

        Raises:
            PlanError: if `forward` does not accept the arguments.
        """
        # The common case, without `inspect`: this runs on every call. None may be a default value.
        as_planned = len(args) == len(self._args) and kwargs.keys() == self._kwargs.keys()
        if as_planned and not any(value is None for value in (*args, *kwargs.values())):
            return args, {name: kwargs[name] for name in self._kwargs}
        try:
            # Raises the error that Python itself would raise for the call.
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PlanError(
                f"the model was called with {_describe_arguments(args, kwargs)}: {error}\npass the "
                f"planned inputs: {', '.join(str(leaf) for leaf in self._inputs)}"
            ) from None
        named = self._omit_default_arguments(self._name_arguments(args, kwargs))
        # In the planned structure, so that positional and keyword arguments hit the same program.
        if named.keys() == self._planned_names:
            values = [
                self._get_argument_or_default(name, named)
                for name in self._name_arguments(self._args, self._kwargs)
            ]
            count = len(self._args)
            return tuple(values[:count]), dict(zip(self._kwargs, values[count:], strict=True))
        keywords = self._signature.parameters
        # `*args` and positional-only parameters cannot be passed by keyword.
        if any(self._is_positional_only(name) for name in named):
            return args, kwargs
        # In the order of the signature, so that calls with keywords in another order share a
        # program.
        return (), {name: named[name] for name in sorted(named, key=[*keywords, *named].index)}

    def planned_indices(self, spec: pytree.TreeSpec) -> list[int | None]:
        """Map the leaves of a call to leaves of the planned call by their paths.

        Args:
            spec: structure of the call's arguments.

        Returns:
            For each leaf, the index of the planned leaf; None for a leaf that the planned call
            lacks.
        """
        if spec not in self._planned_indices:
            # Classes that the user has registered may lack keys, of which the paths consist.
            pytree.register_keys(spec)
            self._planned_indices[spec] = [
                self._planned_index.get(path) for path in self._list_argument_paths(spec)
            ]
        return self._planned_indices[spec]

    def numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
        """Return the Python numbers among the arguments of a call, by name."""
        flat, _ = pytree.tree_flatten_with_path(self._name_arguments(args, kwargs))
        return {
            _name_of_path(pytree.keystr(path)): leaf for path, leaf in flat if type(leaf) in NUMBERS
        }

    def leaf_names(self, spec: pytree.TreeSpec) -> list[str]:
        """Return the names of the leaves of a call, as `numbers` names them.

        Args:
            spec: structure of the call's arguments.
        """
        if spec not in self._leaf_names:
            self._leaf_names[spec] = list(map(_name_of_path, self._list_argument_paths(spec)))
        return self._leaf_names[spec]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that the tensors of a call match the tensors of the planned call.

        Raises:
            PlanError: if an argument planned as a tensor is not a tensor, or has another dtype or
                number of dimensions.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for index, leaf in zip(self.planned_indices(spec), leaves, strict=True):
            planned = None if index is None else self._inputs[index]
            if not isinstance(planned, Value):
                continue
            if not isinstance(leaf, Tensor):
                raise PlanError(
                    f"input {planned.name!r} is {leaf!r}, but the plan expects a tensor\npass a"
                    f" tensor of dtype {planned.stored_dtype}, or plan the model for this call"
                )
            if leaf.dtype != planned.stored_dtype:
                raise PlanError(
                    f"input {planned.name!r} has dtype {leaf.dtype}, but the plan expects "
                    f"{planned.stored_dtype}\nconvert it by `.to({planned.stored_dtype})`, or plan"
                    " the model for this dtype"
                )
            # Shardings refer to dimensions by index. For other sizes the model is captured again.
            if leaf.ndim != len(planned.shape):
                raise PlanError(
                    f"input {planned.name!r} has shape {tuple(leaf.shape)}, but the plan expects"
                    f" {planned.shape}\npass a tensor with {len(planned.shape)} dimensions; their"
                    " sizes may differ from the plan"
                )

    def _name_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by parameter name; arguments of `*args` are named `*0`, `*1`, ..."""
        names = [*self._positions, *(f"*{n}" for n in range(len(args)))]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _list_argument_paths(self, spec: pytree.TreeSpec) -> list[str]:
        args, kwargs = pytree.tree_unflatten(range(spec.num_leaves), spec)
        # Paths, unlike indices, are equal whether an argument is passed by position or by keyword.
        flat, _ = pytree.tree_flatten_with_path(self._name_arguments(args, kwargs))
        return [pytree.keystr(path) for path, _ in flat]

    def _omit_default_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in arguments.items()
            if not self._is_default_argument(name, value)
        }

    def _is_default_argument(self, name: str, value: Any) -> bool:
        # Only numbers and strings are compared by value: `==` of two tensors is a tensor.
        default = self._get_parameter_default(name)
        return value is default or (
            isinstance(value, bool | int | float | str)
            and type(value) is type(default)
            and value == default
        )

    def _get_parameter_default(self, name: str) -> Any:
        parameter = self._signature.parameters.get(name)
        return inspect.Parameter.empty if parameter is None else parameter.default

    def _get_argument_or_default(self, name: str, arguments: dict[str, Any]) -> Any:
        return arguments[name] if name in arguments else self._get_parameter_default(name)

    def _is_positional_only(self, name: str) -> bool:
        parameter = self._signature.parameters.get(name)
        return name.startswith("*") or (
            parameter is not None and parameter.kind is parameter.POSITIONAL_ONLY
        )


def _describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    count = f"{len(args)} positional argument{'s' if len(args) != 1 else ''}"
    return f"{count} and keywords {sorted(kwargs)}" if kwargs else count
