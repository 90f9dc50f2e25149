"""Parse YAML into a `Config`, and report all mistakes of a file at once."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardwright.errors import ConfigError
from shardwright.plain_data import parse_yaml, short_repr
from shardwright.run.config.known_keys import key_hint
from shardwright.run.config.schema import Config
from shardwright.text_files import read_text

# Pydantic's messages name Python types; a user of YAML reads these instead.
EXPECTED_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
"""Name of the expected YAML type in error messages, by pydantic's error type."""


def load(path: str | Path) -> Config:
    """Load the configuration file at `path`.

    Raises:
        ConfigError: if the file does not exist, is invalid YAML, or has unknown keys, values of a
            wrong type or contradictory values; one line per mistake.
    """
    return parse(read_text(path, ConfigError), str(path))


def parse(text: str, name: str = "config") -> Config:
    """Parse the YAML `text` of a configuration.

    Args:
        name: prefix of each error message, usually the file name.

    Raises:
        ConfigError: if a key is unknown or a value invalid; one line per mistake.
    """
    return validate_config(parse_yaml(text, name, ConfigError), name)


def validate_config(content: Any, name: str) -> Config:
    """Validate a parsed YAML file.

    Args:
        content: the parsed YAML.
        name: prefix of each error message, usually the file name.

    Raises:
        ConfigError: if a key is unknown or a value invalid; one line per mistake.
    """
    # Pydantic's message would not tell which keys a file has.
    if not isinstance(content, dict):
        valid = ", ".join(Config.model_fields)
        raise ConfigError(
            f"{name}: the configuration must be a mapping, not {_format_value(content)}; use the"
            f" keys {valid}"
        )
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        problems = [f"{name}: {_format_validation_error(details)}" for details in error.errors()]
        raise ConfigError("\n".join(problems)) from None


def _format_validation_error(details: ErrorDetails) -> str:
    """Return the message of one validation error: key, invalid value, and valid values."""
    path, error_type, value = details["loc"], details["type"], details["input"]
    key = ".".join(str(key_part) for key_part in path)
    if error_type == "extra_forbidden":
        return f"{key}: unknown key; {_format_valid_key_hint(path)}"
    if error_type == "missing":
        return f"{key}: the key is missing"
    if error_type in EXPECTED_TYPES:
        return f"{key}: expected {EXPECTED_TYPES[error_type]}, got {_format_value(value)}"
    # "option_error" is of the schema's own validators, with the context of pydantic's literals.
    if error_type in ("literal_error", "option_error"):
        valid = details["ctx"]["expected"]
        hint = _suggest_valid_value(value, valid)
        return f"{key}: expected {valid}, got {_format_value(value)}{hint}"
    # The only pattern of the schema is that of `ImportTarget`.
    if error_type == "string_pattern_mismatch":
        return f"{key}: expected 'module:callable', got {_format_value(value)}"
    if error_type == "value_error":
        # A check of the whole file has no key.
        return f"{key}: {details['ctx']['error']}" if key else str(details["ctx"]["error"])
    # Pydantic's messages begin with "Input should", but a YAML file has values, not an input.
    return f"{key}: {details['msg'].replace('Input', 'value', 1)}, got {_format_value(value)}"


def _format_valid_key_hint(path: tuple[int | str, ...]) -> str:
    """Format a hint for an unknown key at `path`: the most similar valid key, or all valid keys."""
    section: type[BaseModel] = Config
    for key in path[:-1]:
        annotation = section.model_fields[str(key)].annotation
        # An optional section is annotated `Section | None`.
        section = next(
            member
            for member in get_args(annotation) or (annotation,)
            if isinstance(member, type) and issubclass(member, BaseModel)
        )
    # The alias is the key in files, such as `async`, which Python reserves.
    keys = [field.alias or name for name, field in section.model_fields.items()]
    return key_hint(str(path[-1]), keys)


def _suggest_valid_value(value: object, valid_values: str) -> str:
    # Pydantic quotes the choices of a literal, as in "'stop' or 'skip'".
    close_matches = difflib.get_close_matches(str(value), re.findall(r"'(\w+)'", valid_values), n=1)
    return f"; did you mean {close_matches[0]}?" if close_matches else ""


def _format_value(value: object) -> str:
    # YAML reads a key without a value as None.
    if value is None:
        return "nothing"
    # Only types that the value itself may not show: the string '8' looks like the number 8.
    yaml_types = {"str": " (a string)", "dict": " (a mapping)", "list": " (a list)"}
    return f"{short_repr(value)}{yaml_types.get(type(value).__name__, '')}"
