"""From a YAML file to a `Config`, with every mistake of the file named at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardwright.config.schema import Config
from shardwright.errors import ConfigError

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
    return parse(read_text(path), str(path))


def parse(text: str, name: str = "config") -> Config:
    """The configuration written in `text`; errors start with `name`. Raises: as `load`."""
    return validated(parse_yaml(text, name), name)


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
    return f"{value!r}{kinds.get(type(value).__name__, '')}"


def read_text(path: str | Path) -> str:
    """The text of a file. Raises: ConfigError: no such file, or no text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: {reason}") from None


def parse_yaml(text: str, name: str) -> Any:
    """The plain data written in `text`; errors start with `name`.

    Raises:
        ConfigError: no valid YAML, a key that is given twice, an alias without its anchor.
    """
    try:
        # The loader is a SafeLoader: it makes plain data only.
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{name}: {place}{_yaml_problem(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: invalid YAML: {error}") from None


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    alias = re.fullmatch(r"found undefined alias '(.*)'", error.problem or "")
    if alias is None:
        return str(error.problem)
    return f"*{alias[1]} has no anchor: write &{alias[1]} before the value that it stands for"


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, a key that is given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: Mapping[Any, Any] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key}", key_node.start_mark
                )
            seen = {**seen, key: True}
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, takes 1e-3 for text, because it has no point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
