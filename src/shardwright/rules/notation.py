"""Rules written like an einsum: `"b s k, j k -> b s j"`.

- Tensors are separated by `,`, dimensions by spaces; the inputs stand in the order of `Op.inputs`.
- `_` (or `.`) is a dimension that stays whole, `()` a tensor without dimensions.
- `...` is any number of leading dimensions, aligned on the right as in broadcasting; they are
  named `b s t u v w …`.
- A dimension of size 1 in an input whose factor is larger elsewhere is broadcast: it stays whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from string import ascii_lowercase
from typing import Any, TypedDict, Unpack

import torch

from shardwright.graph.graph import Op, OpTarget, Value
from shardwright.rules.rule import Dims, Kernel, Main, Reduction, ShardingRule
from shardwright.torch_internals.operators import OpOverload, schema_of

_LEADING = "bstuvwxyz"
NAMES = _LEADING + "".join(c for c in ascii_lowercase if c not in _LEADING)
"""The names of dimensions that have none of their own, in order."""


class RuleOptions(TypedDict, total=False):
    """What `ShardingRule` takes besides dimensions and sizes."""

    complete: frozenset[str]
    main: Main | None
    kernel: Kernel | None
    reductions: Callable[[Op, Mapping[str, int]], tuple[Reduction, ...]]
    sizes: int | None
    random: bool


def from_notation(
    notation: str,
    op: Op,
    *,
    reduced: str | Iterable[str] = (),
    capacity: Mapping[str, int] | None = None,
    **options: Unpack[RuleOptions],
) -> ShardingRule:
    """The rule of `op` in notation, sizes taken from the shapes of its tensors.

    Args:
        reduced: factors that an output lacks and that may be cut: names, or one string of them.
        capacity: for factors whose parts must divide another number than the size.

    Raises:
        ValueError: tensors or dimensions do not match those of `op`, or sizes of a factor differ.
    """
    left, _, right = notation.partition("->")
    inputs, outputs = _tensors(left), _tensors(right)
    if (len(inputs), len(outputs)) != (len(op.inputs), len(op.outputs)):
        raise ValueError(
            f"{op}: {notation!r} does not name {len(op.inputs)} inputs, {len(op.outputs)} outputs"
        )
    written = list(zip((*inputs, *outputs), (*op.inputs, *op.outputs), strict=True))
    used = {token for tokens, _ in written for token in tokens}
    lengths = [len(v.shape) - len(tokens) + 1 for tokens, v in written if "..." in tokens]
    leading = [name for name in NAMES if name not in used][: max(lengths, default=0)]
    dims = [_dims(tokens, len(value.shape), leading) for tokens, value in written]
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
    """The rule of `op` with these dimensions, sizes taken from the shapes of its tensors.

    Raises:
        ValueError: the number of dimensions of a tensor or the sizes of a factor differ.
    """
    sizes: dict[str, int] = {}
    for dims, value in zip((*inputs, *outputs), (*op.inputs, *op.outputs), strict=True):
        if len(dims) != len(value.shape):
            raise ValueError(f"{op}: {dims} does not name the dimensions of {value}")
        for name, size in zip(dims, value.shape, strict=True):
            if name is not None:
                sizes[name] = max(size, sizes.get(name, 0))
    given = dict(capacity or {})
    broadcast = tuple(
        tuple(
            None if name is None or (size == 1 and sizes[name] > 1) else name
            for name, size in zip(dims, value.shape, strict=True)
        )
        for dims, value in zip(inputs, op.inputs, strict=True)
    )
    for dims, value in zip((*broadcast, *outputs), (*op.inputs, *op.outputs), strict=True):
        for name, size in zip(dims, value.shape, strict=True):
            fits = name is None or (
                size % given[name] == 0 if name in given else size == sizes[name]
            )
            if not fits:
                raise ValueError(f"{op}: size {size} of {name!r} in {value} differs elsewhere")
    return ShardingRule(
        inputs=broadcast,
        outputs=tuple(outputs),
        capacity={**sizes, **given},
        reduced=frozenset(reduced.split() if isinstance(reduced, str) else reduced),
        **options,
    )


def names(value: Value, taken: str = "") -> Dims:
    """A name for each dimension of `value`, none of them in `taken`: `("b", "s", "t")`."""
    return tuple([name for name in NAMES if name not in taken][: len(value.shape)])


def without(dims: Dims, *whole: int) -> Dims:
    """`dims` where those at the positions `whole` (negative ones from the end) are not cut."""
    positions = {position % len(dims) for position in whole} if dims else set()
    return tuple(None if i in positions else name for i, name in enumerate(dims))


def aligned(op: Op, dims: Dims) -> tuple[Dims, ...]:
    """`dims` of a broadcast result as those of each input: its last ones."""
    return tuple(dims[len(dims) - len(value.shape) :] for value in op.inputs)


def argument(op: Op, name: str, default: Any = None) -> Any:
    """The argument `name` of `op`, or its default; `default` if `op.target` takes none such."""
    return call_arguments(op).get(name, default)


def draws_random(op: Op) -> bool:
    """Whether ATen says of the operator that it draws from the generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())


def overloads(*operators: str) -> tuple[Any, ...]:
    """All overloads of these ATen operators that make tensors and take dimensions by number."""
    found = []
    for operator in operators:
        packet = getattr(torch.ops.aten, operator)
        for name in packet.overloads():
            overload = getattr(packet, name)
            schema = schema_of(overload)
            makes_tensors = any("Tensor" in str(returned.type) for returned in schema.returns)
            if makes_tensors and not schema.is_mutable and "Dimname" not in str(schema):
                found.append(overload)
    return tuple(found)


def _tensors(side: str) -> list[list[str]]:
    texts = [text.strip() for text in side.split(",")] if side.strip() else []
    return [[] if text == "()" else text.split() for text in texts]


def _dims(tokens: list[str], ndim: int, leading: list[str]) -> Dims:
    if "..." in tokens:
        place, count = tokens.index("..."), ndim - len(tokens) + 1
        if count < 0:
            raise ValueError(f"{' '.join(tokens)!r} does not name {ndim} dimensions")
        tokens = [*tokens[:place], *leading[len(leading) - count :], *tokens[place + 1 :]]
    return tuple(None if token in "_." else token for token in tokens)


@cache
def schema_parameters(target: OpTarget) -> dict[str, Any]:
    """The names of what `target` takes, in order, with their defaults; None without one."""
    if isinstance(target, OpOverload):
        schema = schema_of(target).arguments
        return {a.name: a.default_value if a.has_default_value() else None for a in schema}
    taken = inspect.signature(target).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in taken}


def named_arguments(op: Op) -> dict[str, Any]:
    """What `op` was given, by name, in the order in which it was given; no defaults."""
    return {**dict(zip(schema_parameters(op.target), op.args, strict=False)), **op.kwargs}


def call_arguments(op: Op) -> dict[str, Any]:
    """Every argument of `op` by name, with the defaults where none was given."""
    return {**schema_parameters(op.target), **named_arguments(op)}


def input_dims(op: Op, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
    """The dims of `Op.inputs`, from those of the named arguments."""
    return tuple(
        dims[name] for name, given in named_arguments(op).items() if isinstance(given, Value)
    )


def binder(op: Op) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    """Gives for a call of a kernel of `op` the arguments by name, with the defaults where none was
    given. What does not depend on the call is worked out here, once."""
    defaults = schema_parameters(op.target)
    names = tuple(defaults)

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return bind


def with_arguments(op: Op, **changed: Any) -> Callable[..., Any]:
    """The target of `op` as a function of its arguments that replaces those in `changed`."""
    names = list(schema_parameters(op.target))
    places = {names.index(name): given for name, given in changed.items()}
    positional = {i: given for i, given in places.items() if i < len(op.args)}
    keywords = {names[i]: given for i, given in places.items() if i >= len(op.args)}

    def run(*args: Any, **kwargs: Any) -> Any:
        replaced = (positional.get(i, given) for i, given in enumerate(args))
        return op.target(*replaced, **{**kwargs, **keywords})

    return run
