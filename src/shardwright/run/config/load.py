"""From a YAML file to a `Config`, with every mistake of the file named at once."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardwright.errors import ConfigError
from shardwright.run.config.schema import Config
from shardwright.text_files import parse_yaml, read_text, short_repr

TYPES_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def load(path: str | Path) -> Config:
    """The configuration in the file at `path`.

    Raises:
        ConfigError: no such file, no valid YAML, unknown keys, wrong types or contradictions: one
            line for each.
    """
    return parse(read_text(path, ConfigError), str(path))


def parse(text: str, name: str = "config") -> Config:
    """The configuration written in `text`; errors start with `name`. Raises: as `load`."""
    return validated(parse_yaml(text, name, ConfigError), name)


def validated(content: Any, name: str) -> Config:
    """The configuration that is in the plain data of a file. Raises: as `load`."""
    if not isinstance(content, dict):
        valid = ", ".join(Config.model_fields)
        raise ConfigError(
            f"{name}: expected a mapping with the keys {valid}, got {_shown(content)}"
        )
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        problems = [f"{name}: {_problem(details)}" for details in error.errors()]
        raise ConfigError("\n".join(problems)) from None


def _problem(details: ErrorDetails) -> str:
    """One line: the key, its value, and what is valid."""
    path, kind, value = details["loc"], details["type"], details["input"]
    key = ".".join(str(part) for part in path)
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_valid_keys(path)}"
    if kind == "missing":
        return f"{key}: missing"
    if kind in TYPES_WANTED:
        return f"{key}: expected {TYPES_WANTED[kind]}, got {_shown(value)}"
    if kind in ("literal_error", "option_error"):
        valid = details["ctx"]["expected"]
        return f"{key}: expected {valid}, got {_shown(value)}{_nearest(value, valid)}"
    if kind == "string_pattern_mismatch":
        return f"{key}: expected 'module:callable', got {_shown(value)}"
    if kind == "value_error":
        return f"{key}: {details['ctx']['error']}" if key else str(details["ctx"]["error"])
    return f"{key}: {details['msg'].replace('Input', 'value', 1)}, got {_shown(value)}"


def _valid_keys(path: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = Config
    for part in path[:-1]:
        annotation = section.model_fields[str(part)].annotation
        # A section that may be left out is a union with None.
        section = next(
            kind
            for kind in get_args(annotation) or (annotation,)
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        )
    keys = [field.alias or name for name, field in section.model_fields.items()]
    near = difflib.get_close_matches(str(path[-1]), keys, n=1)
    return f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(keys)}"


def _nearest(value: object, valid: str) -> str:
    near = difflib.get_close_matches(str(value), re.findall(r"'(\w+)'", valid), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    kinds = {"str": " (a string)", "dict": " (a mapping)", "list": " (a list)"}
    return f"{short_repr(value)}{kinds.get(type(value).__name__, '')}"
