"""Objects that a configuration names by "package.module:callable"."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError


def call_target(key: str, target: str, arguments: Mapping[str, Any], folder: Path) -> Any:
    """Import `target`, call it with `arguments` and return what it returns.

    Args:
        key: where the configuration names the target, for messages.
        folder: the configuration's folder; its modules come before those installed.

    Raises:
        ConfigError: no such module or attribute, not callable, or it does not take `arguments`.
    """
    function = _import(key, target, folder)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        signature = inspect.signature(function)
        raise ConfigError(f"{key}: {target}{signature} cannot be called: {error}") from None
    return function(**arguments)


def _import(key: str, target: str, folder: Path) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there: something that it imports is not
        raise ConfigError(
            f"{key}: no module {error.name} in {folder} nor among the installed packages"
        ) from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key}: module {module_name} has no {attribute}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{key}: {target} is {found!r}, which cannot be called")
    return found  # type: ignore[no-any-return]
