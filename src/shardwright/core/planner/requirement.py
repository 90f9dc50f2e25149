"""Requirements on option values, with error texts for keyword arguments and configuration files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from shardwright.core.cost.units import BYTES, parse_quantity


@dataclass(frozen=True)
class Requirement:
    """Constraint on the value of an option, given in the `Annotated` type of its field.

    Args:
        valid_values: description of the valid values, which follows "expected" in errors of
            configuration files.
        accepts: predicate that is true for valid values.
        hint: description of valid values that follows `option=value: ` in errors of keyword
            arguments.
    """

    valid_values: str
    accepts: Callable[[Any], bool]
    hint: str

    def error(self, name: str, value: Any) -> str:
        """Return the error text for an invalid `value` of the keyword argument `name`."""
        return f"{name}={value!r}: {self.hint}"


def must_be(valid_values: str, accepts: Callable[[Any], bool]) -> Requirement:
    """Return a requirement with errors like `stages=0: must be a whole number of at least 1`."""
    return Requirement(valid_values, accepts, f"must be {valid_values}")


def one_of(choices: Iterable[str]) -> Requirement:
    """Return a requirement with errors like `order='size': must be one of weight, topology`."""
    # `'a', 'b' or 'c'`; a single name has no "or".
    names = tuple(choices)
    quoted = [f"'{name}'" for name in names]
    words = " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))
    return Requirement(words, lambda value: value in names, f"must be one of {', '.join(names)}")


def is_count(value: Any) -> bool:
    """Whether `value` is an integer of at least 1, and not a bool."""
    # YAML's `yes` and a flag in the wrong place are bools, which Python counts as integers.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_dims_by_name(value: Any) -> bool:
    """Whether `value` maps names to a dimension or None."""
    # `type` instead of `isinstance`, which accepts bools.
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and (dim is None or type(dim) is int) for name, dim in value.items()
    )


def is_counts_by_name(value: Any) -> bool:
    """Whether `value` maps names to integers of at least 1."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_count(count) for name, count in value.items()
    )


def is_positive(value: Any) -> bool:
    """Whether `value` is a positive finite number, and not a bool."""
    # NaN is rejected too, as comparisons with it are false.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def parse_bytes(size: int | str) -> int | None:
    """Return `size`, a number or a text such as `24GiB`, in bytes; None if `size` is invalid."""
    number = parse_quantity(size, BYTES)
    return int(number) if number is not None and number >= 1 else None


@cache
def requirements(options: type) -> dict[str, Requirement]:
    """Return a dict from the name to the `Requirement` of each annotated field of an options class.

    A field whose type includes None accepts None too.
    """
    by_name: dict[str, Requirement] = {}
    # `get_type_hints` strips `Annotated` unless extras are included.
    for name, hint in get_type_hints(options, include_extras=True).items():
        if get_origin(hint) is Annotated:
            value_type, requirement = get_args(hint)
            allows_none = NoneType in get_args(value_type)
            by_name[name] = _make_requirement_optional(requirement) if allows_none else requirement
    return by_name


def _make_requirement_optional(requirement: Requirement) -> Requirement:
    accepts = requirement.accepts
    return Requirement(
        requirement.valid_values, lambda value: value is None or accepts(value), requirement.hint
    )
