"""Reads text, JSON and YAML files as plain data of bounded size; errors name the file and the key.

Plain data are mappings, lists, strings, booleans, null and numbers of at most 64 bits, which
callers can compare, copy and print without further checks.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from shardwright.errors import ShardwrightError

ErrorType = type[ShardwrightError]

MAX_DEPTH = 100
"""Nesting depth of mappings and lists. Recursive readers stay far from Python's recursion limit."""

MAX_VALUES = 100_000
"""Values of a YAML file with aliases expanded: a few lines of aliases can expand to billions."""

INTEGERS = range(-(2**63), 2**64)
"""Integers of 64 bits, signed or unsigned."""


class _Shortened(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 3, 6, 8, 8
        self.maxstring = self.maxlong = self.maxother = 120


def short_repr(value: object) -> str:
    """Return the `repr` of a value, shortened for a message."""
    return _Shortened().repr(value)


def read_text(path: str | Path, error_type: ErrorType) -> str:
    """Read a UTF-8 file, without the byte order mark that some editors write.

    Raises:
        error_type: the file is missing, cannot be read, or is not UTF-8 text.
    """
    with _file_errors(path, error_type):
        return Path(path).read_text(encoding="utf-8-sig")


def check_exists(path: str | Path, error_type: ErrorType) -> None:
    """Raise `error_type` if a file does not exist.

    Reads nothing: the content of a pipe can be read only once.
    """
    with _file_errors(path, error_type):
        Path(path).stat()


@contextmanager
def _file_errors(path: str | Path, error_type: ErrorType) -> Iterator[None]:
    """Turn errors of reading and decoding into `error_type`, with the name of the file."""
    try:
        yield
    except FileNotFoundError:
        raise error_type(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise error_type(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise error_type(f"{path}: {reason}") from None


def parse_json(text: str, where: str, error_type: ErrorType) -> Any:
    """Parse a JSON text into plain data.

    Args:
        where: the beginning of error messages, such as the name of the file.

    Raises:
        error_type: the text is invalid, has a duplicate key, or has a value that is not plain data.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_duplicates)
        _check_plain(data, math.inf)
    except json.JSONDecodeError as error:
        raise error_type(f"{where}: invalid JSON: {error}") from None
    except RecursionError:
        raise error_type(f"{where}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise error_type(f"{where}: {error}") from None
    return data


def parse_yaml(text: str, where: str, error_type: ErrorType) -> Any:
    """Parse a YAML text into plain data; dates are strings, and `1e-3` is a number.

    Args:
        where: the beginning of error messages, such as the name of the file.

    Raises:
        error_type: the text is invalid, has a duplicate key, an undefined alias or an unknown tag,
            or has a value that is not plain data.
    """
    try:
        # The loader is a SafeLoader: it makes plain data only.
        data = yaml.load(text, Loader=_Loader)
        _check_plain(data, MAX_VALUES)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise error_type(f"{where}: {position}{_yaml_problem(error)}") from None
    except yaml.YAMLError as error:
        raise error_type(f"{where}: invalid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise error_type(f"{where}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise error_type(f"{where}: {error}") from None
    return data


_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} levels deep"


def _check_plain(data: Any, max_values: float) -> None:
    """Raise `ValueError` if a value is not plain, is nested too deeply, or is one of too many."""
    # A loop, not recursion: the data may be nested deeper than Python's recursion limit.
    pending: list[tuple[_ValuePath, int, Any]] = [(None, 0, data)]
    count = 0
    while pending:
        path, depth, value = pending.pop()
        count += 1
        if count > max_values:
            raise ValueError(f"more than {max_values} values, with aliases expanded")
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, dict):
            for key, item in value.items():
                pending.append(((None, short_repr, key), depth + 1, key))
                pending.append(((path, _format_key, key), depth + 1, item))
        elif isinstance(value, list):
            pending += (
                ((path, _format_index, at), depth + 1, item) for at, item in enumerate(value)
            )
        elif problem := _problem(value):
            where = _path_text(path)
            raise ValueError(f"{where}: {problem}" if where else problem)


_ValuePath = tuple[Any, Callable[[Any], str], Any] | None
"""Path of a value: that of its container, a function that formats its key, and the key. Formatted
only for an error: a plan can have millions of values."""

_format_index = "[{}]".format


def _format_key(key: Any) -> str:
    return f".{key if isinstance(key, str) else short_repr(key)}"


def _path_text(path: _ValuePath) -> str:
    if path is None:
        return ""
    outer, format_key, key = path
    return (_path_text(outer) + format_key(key)).lstrip(".")


def _problem(value: Any) -> str:
    if isinstance(value, int) and value not in INTEGERS:
        return f"an integer of {value.bit_length()} bits; at most 64 bits are supported"
    if isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
        return "an unpaired surrogate in a string"
    return ""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"duplicate key {short_repr(key)}")
        unique[key] = value
    return unique


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    alias = re.fullmatch(r"found undefined alias '(.*)'", error.problem or "")
    if alias is None:
        return str(error.problem)
    return f"*{alias[1]} has no anchor: write &{alias[1]} before the value that it refers to"


_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """A safe loader for which 1e-3 is a number and a duplicate key is an error."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, KeyError, AttributeError, TypeError) as error:
            if isinstance(error, yaml.YAMLError):
                raise
            tag = node.tag.rpartition(":")[2]
            text = short_repr(node.value) if isinstance(node, yaml.ScalarNode) else "this"
            raise yaml.constructor.ConstructorError(
                None, None, f"{text} cannot be read as {tag}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a {key_node.id} as a key", key_node.start_mark
                )
            if key_node.tag == f"{_TAG}merge":
                # Not supported: a few lines of nested merges can produce billions of keys.
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "<< is not supported: repeat the keys that it merges",
                    key_node.start_mark,
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {short_repr(key)}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML implements YAML 1.1, where 1e-3 is a string because it has no decimal point.
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
# Timestamps stay strings: a date is not plain data. "value" is the YAML 1.1 tag of a lone "=".
_READ_AS = {tag: tag for tag in ("null", "bool", "int", "float", "str", "seq", "map")}
_Loader.yaml_constructors = {None: yaml.SafeLoader.yaml_constructors[None]} | {
    _TAG + tag: yaml.SafeLoader.yaml_constructors[_TAG + read_as]
    for tag, read_as in (_READ_AS | {"timestamp": "str", "value": "str"}).items()
}
