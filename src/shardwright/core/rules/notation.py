"""Build sharding rules from an einsum-like notation or from one factor name per dimension.

In the notation `"b s k, j k -> b s j"`

- tensors are separated by `,`, dimensions by spaces; inputs are in the order of `Op.inputs`;
- `_` (or `.`) is a dimension that cannot be sharded, `()` a tensor without dimensions;
- `...` is any number of leading dimensions, right-aligned as in broadcasting and named
  `b s t u v w …`;
- an input dimension of size 1 whose factor is larger in another tensor is broadcast, and cannot be
  sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import gcd
from string import ascii_lowercase
from typing import Any, TypedDict, Unpack

import torch

from shardwright.core.graph.graph import Op, OpTarget, Value
from shardwright.core.rules.rule import Dims, Kernel, MainFactors, Reduction, ShardingRule
from shardwright.core.torch_internals.operators import OpOverload, schema_of

# The batch and the sequence come first.
_LEADING = "bstuvwxyz"
NAMES = _LEADING + "".join(c for c in ascii_lowercase if c not in _LEADING)
"""Factor names, in the order in which they are assigned to dimensions."""


class RuleOptions(TypedDict, total=False):
    """Optional fields of `ShardingRule`, which rule builders accept as keyword arguments."""

    complete: frozenset[str]
    main: MainFactors | None
    kernel: Kernel | None
    reductions: Callable[[Op, Mapping[str, int]], tuple[Reduction, ...]]
    sizes: int | None
    random: bool
    joined: Mapping[str, str]


def from_notation(
    notation: str,
    op: Op,
    *,
    reduced: str | Iterable[str] = (),
    capacity: Mapping[str, int] | None = None,
    **options: Unpack[RuleOptions],
) -> ShardingRule:
    """Build the rule of `op` from notation; factor sizes come from the shapes of its tensors.

    Args:
        notation: inputs and outputs as in `"b s k, j k -> b s j"`.
        reduced: factors that an output lacks and that can be sharded, as names or as one string of
            names separated by spaces.
        capacity: the number that the shard count must divide, by factor; by default the factor's
            size.

    Raises:
        ValueError: if the notation does not match the tensors of `op`, or a factor has several
            sizes.
    """
    input_notation, _, output_notation = notation.partition("->")
    inputs, outputs = (
        _split_into_tensors_and_tokens(input_notation),
        _split_into_tensors_and_tokens(output_notation),
    )
    if (len(inputs), len(outputs)) != (len(op.inputs), len(op.outputs)):
        raise ValueError(
            f"{op}: the notation {notation!r} has {len(inputs)} inputs and {len(outputs)} outputs, "
            f"but the operator has {len(op.inputs)} and {len(op.outputs)}; write the dimensions of"
            " each tensor, separated by commas"
        )
    pairs = list(zip((*inputs, *outputs), (*op.inputs, *op.outputs), strict=True))
    used = {token for tokens, _ in pairs for token in tokens}
    # The tensor with most leading dimensions names them; shorter ones take the last names.
    lengths = [len(v.shape) - len(tokens) + 1 for tokens, v in pairs if "..." in tokens]
    leading = [name for name in NAMES if name not in used][: max(lengths, default=0)]
    dims = [_parse_tensor_factors(tokens, len(value.shape), leading) for tokens, value in pairs]
    return sharding_rule(
        op,
        dims[: len(inputs)],
        dims[len(inputs) :],
        reduced=reduced,
        capacity=capacity,
        **options,
    )


def sharding_rule(
    op: Op,
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    *,
    reduced: str | Iterable[str] = (),
    capacity: Mapping[str, int] | None = None,
    **options: Unpack[RuleOptions],
) -> ShardingRule:
    """Build the rule of `op` from one factor per dimension; factor sizes come from its tensors.

    Args:
        inputs, outputs: the factor of each dimension of each tensor; None if it cannot be sharded.
        reduced, capacity, options: fields of the `ShardingRule`; `reduced` may be one string of
            names separated by spaces, and `capacity` defaults to the factors' sizes.

    Raises:
        ValueError: if the number of factors of a tensor differs from its number of dimensions, or a
            factor has several sizes.
    """
    sizes: dict[str, int] = {}
    for dims, value in zip((*inputs, *outputs), (*op.inputs, *op.outputs), strict=True):
        if len(dims) != len(value.shape):
            raise ValueError(
                f"{op}: {value} has {len(value.shape)} dimensions, but the rule names "
                f"{len(dims)}: {dims}; write one name per dimension"
            )
        for name, size in zip(dims, value.shape, strict=True):
            # The first size above 1: a dimension of size 1 may be broadcast to it.
            if name is not None and sizes.get(name, 1) == 1:
                sizes[name] = size
    capacities = dict(capacity or {})
    broadcast = tuple(
        tuple(
            # A broadcast dimension has one element for all shards, so it stays replicated.
            None if name is None or (size == 1 != sizes[name]) else name
            for name, size in zip(dims, value.shape, strict=True)
        )
        for dims, value in zip(inputs, op.inputs, strict=True)
    )
    for dims, value in zip((*broadcast, *outputs), (*op.inputs, *op.outputs), strict=True):
        for name, size in zip(dims, value.shape, strict=True):
            # A capacity allows several sizes, such as those before and after a strided slice, if it
            # divides them all.
            is_consistent = name is None or (
                gcd(size, capacities[name]) == capacities[name]
                if name in capacities
                else size == sizes[name]
            )
            if not is_consistent:
                raise ValueError(
                    f"{op}: factor {name!r} has size {size} in {value}, but another tensor has "
                    "another size; write different names for dimensions of different sizes"
                )
    return ShardingRule(
        inputs=broadcast,
        outputs=tuple(outputs),
        capacity={**sizes, **capacities},
        reduced=frozenset(reduced.split() if isinstance(reduced, str) else reduced),
        **options,
    )


def factor_names(value: Value, exclude: str = "") -> Dims:
    """Return a factor name for each dimension of `value`, such as `("b", "s", "t")`, without names
    in `exclude`."""
    return tuple([name for name in NAMES if name not in exclude][: len(value.shape)])


def unsharded_at(dims: Dims, *positions: int) -> Dims:
    """Return `dims` with None (never sharded) at `positions`, which may be negative."""
    # PyTorch accepts dimensions 0 and -1 of a scalar, which has no dimension to exclude.
    excluded = {position % len(dims) for position in positions} if dims else set()
    return tuple(None if i in excluded else name for i, name in enumerate(dims))


def aligned_to_output(op: Op, dims: Dims) -> tuple[Dims, ...]:
    """Return the factors of each input, right-aligned to the factors `dims` of the output."""
    return tuple(dims[len(dims) - len(value.shape) :] for value in op.inputs)


def argument(op: Op, name: str, default: Any = None) -> Any:
    """Return the argument `name` of `op`, or `default` if `op.target` has no such parameter."""
    return call_arguments(op).get(name, default)


def draws_random(op: Op) -> bool:
    """Whether ATen tags `op` as drawing from the random generator (`nondeterministic_seeded`)."""
    return torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())


def overloads(*operators: str) -> tuple[Any, ...]:
    """Return the overloads of ATen operators that return tensors and mutate no argument.

    Excludes overloads with named dimensions, and operators that this version of PyTorch lacks.

    Args:
        operators: names of the operators, such as `"mean"`.
    """
    functional = []
    for operator in filter(partial(hasattr, torch.ops.aten), operators):
        packet = getattr(torch.ops.aten, operator)
        for name in packet.overloads():
            overload = getattr(packet, name)
            schema = schema_of(overload)
            # Packets also hold TorchScript's overloads for Python numbers, such as `aten.add.int`.
            makes_tensors = any("Tensor" in str(returned.type) for returned in schema.returns)
            if makes_tensors and not schema.is_mutable and "Dimname" not in str(schema):
                functional.append(overload)
    return tuple(functional)


def _split_into_tensors_and_tokens(notation: str) -> list[list[str]]:
    """Split the inputs or the outputs of a notation into tensors, and each tensor into tokens."""
    # Without the condition an empty side, as in `-> b s` of `zeros`, would be one tensor without
    # dimensions.
    entries = [entry.strip() for entry in notation.split(",")] if notation.strip() else []
    return [[] if entry == "()" else entry.split() for entry in entries]


def _parse_tensor_factors(tokens: list[str], ndim: int, leading: list[str]) -> Dims:
    """Return the factors of a tensor of `ndim` dimensions, with names of `leading` for `...`."""
    if "..." in tokens:
        ellipsis_index, count = tokens.index("..."), ndim - len(tokens) + 1
        if count < 0:
            raise ValueError(
                f"the notation {' '.join(tokens)!r} names {len(tokens) - 1} dimensions, but the"
                f" tensor has only {ndim}; write one name per dimension"
            )
        # Right-aligned, as broadcasting aligns shapes.
        expanded = leading[len(leading) - count :]
        tokens = [*tokens[:ellipsis_index], *expanded, *tokens[ellipsis_index + 1 :]]
    return tuple(None if token in "_." else token for token in tokens)


@cache
def schema_parameters(target: OpTarget) -> dict[str, Any]:
    """Return the default value of each parameter of `target`, by name and in order; None for a
    parameter without default."""
    if isinstance(target, OpOverload):
        schema = schema_of(target).arguments
        # The None is never read, as a call passes every parameter that has no default.
        return {a.name: a.default_value if a.has_default_value() else None for a in schema}
    parameters = inspect.signature(target).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def named_arguments(op: Op) -> dict[str, Any]:
    """Return the arguments that `op` passes, by name, in the order of the call."""
    # Arguments that are not passed have defaults.
    return {**dict(zip(schema_parameters(op.target), op.args, strict=False)), **op.kwargs}


def call_arguments(op: Op) -> dict[str, Any]:
    """Return all arguments of `op`, including defaults, by name."""
    return {**schema_parameters(op.target), **named_arguments(op)}


def input_factors(op: Op, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """Return the factors of each tensor input of `op`, in the order of its inputs, given factors by
    argument name."""
    return tuple(
        dims[name] for name, value in named_arguments(op).items() if isinstance(value, Value)
    )


def argument_binder(op: Op) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    """Return a function that converts the `args` and `kwargs` of a kernel call to a dictionary of
    all arguments by name.

    The signature is read once, because kernels run in every step.
    """
    defaults = schema_parameters(op.target)
    names = tuple(defaults)

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return bind


class WithArguments:
    """Local kernel that calls the operator itself with some arguments replaced.

    Args:
        op: the operator.
        replacements: values of the replaced arguments, by name.
    """

    def __init__(self, op: Op, **replacements: Any) -> None:
        self.replacements = replacements
        names = list(schema_parameters(op.target))
        # Each replacement is passed as the call passes the argument, by position or by name:
        # kernels get the `args` and `kwargs` of the call.
        by_index = {names.index(name): value for name, value in replacements.items()}
        self._target = op.target
        self._positional = {i: value for i, value in by_index.items() if i < len(op.args)}
        self._keywords = {names[i]: value for i, value in by_index.items() if i >= len(op.args)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positional = (self._positional.get(i, value) for i, value in enumerate(args))
        return self._target(*positional, **{**kwargs, **self._keywords})
