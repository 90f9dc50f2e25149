"""What the value of an option must be: one sentence and one test, for keywords and for files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import inf
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from shardwright.core.cost.units import BYTES, quantity


@dataclass(frozen=True)
class Requirement:
    """What a value must be; stands in the `Annotated` type of an option.

    Args:
        words: what completes "expected".
        accepts: whether a value is such; None is accepted wherever the type of the option has it.
        hint: what completes the error of a keyword.
    """

    words: str
    accepts: Callable[[Any], bool]
    hint: str

    def error(self, name: str, value: Any) -> str:
        """What is wrong with this value of the keyword `name`."""
        return f"{name}={value!r}: {self.hint}"


def must_be(words: str, accepts: Callable[[Any], bool]) -> Requirement:
    """A requirement in words: `stages=0: must be a whole number of at least 1`."""
    return Requirement(words, accepts, f"must be {words}")


def one_of(choices: Iterable[str]) -> Requirement:
    """One of some names: `order='size': valid are weight, topology`."""
    names = tuple(choices)
    quoted = [f"'{name}'" for name in names]
    words = " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))
    return Requirement(words, lambda value: value in names, f"valid are {', '.join(names)}")


def is_count(value: Any) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def bytes_of(size: int | str) -> int | None:
    """A number of bytes, or that of a text like `24GiB`; None for anything else."""
    number = quantity(size, BYTES)
    return int(number) if number is not None and number >= 1 else None


@cache
def requirements(options: type) -> dict[str, Requirement]:
    """The requirements of the annotated fields of a class, by name of the field."""
    by_name: dict[str, Requirement] = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, requirement = get_args(hint)
            by_name[name] = _or_none(requirement) if NoneType in get_args(kind) else requirement
    return by_name


def _or_none(requirement: Requirement) -> Requirement:
    accepts = requirement.accepts
    return Requirement(
        requirement.words, lambda value: value is None or accepts(value), requirement.hint
    )
