"""Suggest the nearest parameter in the TypeError for an unknown keyword."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def suggests_keywords(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function to suggest the nearest parameter for an unknown keyword argument.

    Python 3.13 does so without a decorator.

    Args:
        call: the function, or `__init__` of a class.

    Raises:
        TypeError: by the decorated function, if a keyword is unknown.
    """
    parameters = signature(call).parameters
    valid = [name for name in parameters if name != "self"]

    @wraps(call)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Before the call, as Python 3.11's own error would not name the nearest parameter.
        for name in kwargs:
            if name not in parameters:
                where = call.__qualname__.removesuffix(".__init__")
                raise TypeError(
                    f"{where}() has no argument {name!r}: {_suggest_keywords(name, valid)}"
                )
        return call(*args, **kwargs)

    return checked


def _suggest_keywords(name: str, valid: list[str]) -> str:
    """Suggest a valid keyword, such as `memory_limit` for `memory_limt` or `parallel_mode` for
    `mode`; all valid keywords if no keyword is similar."""
    # Names that contain the keyword come first: the closest match of `mode` by letters is `order`.
    nearest = [each for each in valid if name in each] or get_close_matches(name, valid, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"use one of {', '.join(valid)}"
