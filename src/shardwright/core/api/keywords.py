"""Functions whose keywords are the fields of a dataclass.

A decorated function receives one value of the dataclass, and is called with the arguments of its
constructor. Type checkers and editors see these arguments (the signature is that of the
constructor, handed on as a `ParamSpec`), and so do `inspect.signature` and `help` at run time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

Arguments = ParamSpec("Arguments")
Request = TypeVar("Request")
Result = TypeVar("Result")
Instance = TypeVar("Instance")


def called_with(
    call: Callable[Arguments, Request],
) -> Callable[[Callable[[Request], Result]], Callable[Arguments, Result]]:
    """Gives a function the arguments of the dataclass `call`.

    The docstrings of the option classes below `call` become part of that of the function.

    Raises: at a call
        TypeError: for an argument that there is not, with the nearest that there is, or one that is
            missing.
    """
    signature = _signature(call)

    def decorate(function: Callable[[Request], Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            _check_call(function.__name__, signature, args, kwargs)
            return function(call(*args, **kwargs))

        _describe(checked, call, signature, get_type_hints(function).get("return"))
        return checked

    return decorate


def method_called_with(
    call: Callable[Arguments, Request],
) -> Callable[
    [Callable[[Instance, Request], Result]],
    Callable[Concatenate[Instance, Arguments], Result],
]:
    """Likewise for a method; in errors an `__init__` bears the name of its class."""
    signature = _signature(call)

    def decorate(
        method: Callable[[Instance, Request], Result],
    ) -> Callable[Concatenate[Instance, Arguments], Result]:
        name = method.__qualname__.removesuffix(".__init__")

        @wraps(method)
        def checked(self: Instance, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            _check_call(name, signature, args, kwargs)
            return method(self, call(*args, **kwargs))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        whole = signature.replace(parameters=[itself, *signature.parameters.values()])
        _describe(checked, call, whole, None)
        return checked

    return decorate


def _signature(call: Callable[..., Any]) -> inspect.Signature:
    """The constructor's, with types in place of their text, and what is required first."""
    hints = get_type_hints(call)
    parameters = [
        each.replace(annotation=hints[each.name])
        for each in inspect.signature(call).parameters.values()
    ]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters.sort(key=lambda each: (each.kind, each.kind == keyword_only and _has_default(each)))
    return inspect.Signature(parameters)


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty


def _check_call(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    valid = signature.parameters
    for each in kwargs:
        if each not in valid:
            raise TypeError(f"{name}() has no argument {each!r}: {_nearest(each, valid)}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None


def _nearest(name: str, valid: Iterable[str]) -> str:
    longer = [each for each in valid if name in each]
    near = longer or get_close_matches(name, valid, n=1)
    return f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(valid)}"


def _describe(
    function: Callable[..., Any],
    call: Callable[..., Any],
    signature: inspect.Signature,
    returned: Any,
) -> None:
    """What `help` and `inspect.signature` show of `function`."""
    function.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    function.__annotations__ = get_type_hints(call) | {"return": returned}
    before, args, after = (function.__doc__ or "").partition("    Args:\n")
    if args:
        own, blank, rest = after.partition("\n\n")
        function.__doc__ = f"{before}{args}{own}\n{_documented_options(call)}{blank}{rest}"


def _documented_options(call: Callable[..., Any]) -> str:
    """The lines on arguments in the docstrings of the classes that the dataclass is made of."""
    lines: list[str] = []
    assert isinstance(call, type)
    for each in reversed(call.__mro__[1:-1]):
        _, _, args = inspect.cleandoc(each.__doc__ or "").partition("\nArgs:\n")
        text, _, _ = args.partition("\n\n")
        lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines)
