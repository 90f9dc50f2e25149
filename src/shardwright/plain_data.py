"""Parse JSON and YAML texts into plain data of bounded size; errors name the file and the key.

Plain data are mappings, lists, strings, booleans, null and numbers of at most 64 bits, which
callers can compare, copy and print without further checks.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import yaml

from shardwright.errors import (
    ShardwrightError,
    ShardwrightWarning,
    has_control_characters,
    warn_user,
)

ErrorType = type[ShardwrightError]

DIGEST = "digest"
"""Key of the digest of a derived file, such as a plan."""

MAX_DEPTH = 100
"""Maximum nesting depth of mappings and lists, far below Python's recursion limit."""

MAX_VALUES = 100_000
"""Maximum number of values in a YAML file after expansion of aliases, which could otherwise expand
a few lines to billions of values."""

INTEGERS = range(-(2**63), 2**63)
"""Supported integers: those of 64 bits with a sign, which NumPy and C++ store.

All readers of files check this range, so that no integer overflows deep inside a call."""


class EditedFileWarning(ShardwrightWarning):
    """Warning that a plan or a calibration has changed since it was written."""


class _ShortRepr(reprlib.Repr):
    """A `repr` that limits the depth and length of containers and the length of strings."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 3, 6, 8, 8
        self.maxstring = self.maxlong = self.maxother = 120


def short_repr(value: object) -> str:
    """Return the `repr` of a value, shortened for a message."""
    return _ShortRepr().repr(value)


def content_digest(data: Mapping[str, Any]) -> str:
    """Return a digest of plain data without its key `digest`, independent of the file's formatting
    and order of keys."""
    content = {key: value for key, value in data.items() if key != DIGEST}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    # 64 bits suffice to notice accidental changes.
    return sha256(canonical.encode()).hexdigest()[:16]


def warn_if_edited(data: Mapping[str, Any], location: str) -> None:
    """Warn if plain data do not match their digest. Data without a digest are accepted.

    Args:
        location: name of the file.
    """
    if data.get(DIGEST) not in (None, content_digest(data)):
        warn_user(
            f"{location} was edited or damaged after it was written: its digest differs\n"
            f"if you have edited it, remove the entry `{DIGEST}`; otherwise write the file again",
            EditedFileWarning,
        )


def parse_json(text: str, location: str, error_type: ErrorType) -> Any:
    """Parse a JSON text into plain data.

    Args:
        location: prefix of error messages, such as the name of the file.

    Raises:
        error_type: if the text is invalid, or has a duplicate key or a value that is not plain
            data.
    """
    try:
        data = json.loads(text, object_pairs_hook=_make_dict_with_unique_keys)
        # JSON has no aliases, so the size of the text bounds the number of values.
        _check_plain_data(data, math.inf)
    except json.JSONDecodeError as error:
        raise error_type(f"{location}: invalid JSON: {error}\nwrite the file again") from None
    # `json.loads` recurses, and reaches Python's limit before `_check_plain_data` can count.
    except RecursionError:
        raise error_type(f"{location}: {_TOO_DEEP}") from None
    except ValueError as error:
        # Python refuses to convert thousands of digits, with advice for its programs.
        problem = _TOO_LARGE if "integer string conversion" in str(error) else str(error)
        raise error_type(f"{location}: {problem}") from None
    return data


def parse_yaml(text: str, location: str, error_type: ErrorType) -> Any:
    """Parse a YAML text into plain data; dates are strings, and `1e-3` is a number.

    Args:
        location: prefix of error messages, such as the name of the file.

    Raises:
        error_type: if the text is invalid, or has a duplicate key, an undefined alias, an unknown
            tag, or a value that is not plain data.
    """
    try:
        # The loader is a SafeLoader: it makes plain data only.
        data = yaml.load(text, Loader=_PlainYamlLoader)
        _check_plain_data(data, MAX_VALUES)
    except yaml.MarkedYAMLError as error:
        start = error.problem_mark
        position = f"line {start.line + 1}, column {start.column + 1}: " if start else ""
        raise error_type(f"{location}: {position}{_describe_yaml_error(error)}") from None
    except yaml.YAMLError as error:
        raise error_type(f"{location}: invalid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise error_type(f"{location}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise error_type(f"{location}: {error}") from None
    return data


_TOO_LARGE = "integers must be from -2^63 to 2^63 - 1"
_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} levels deep"


def _check_plain_data(data: Any, max_values: float) -> None:
    """Raise ValueError if a value is not plain or nested too deeply, or there are too many values.

    Args:
        max_values: maximum number of values, including keys and containers.
    """
    # Not recursive, because the data may be nested deeper than Python's recursion limit.
    pending_values: list[tuple[_ValuePath, int, Any]] = [(None, 0, data)]
    count = 0
    while pending_values:
        path, depth, value = pending_values.pop()
        count += 1
        if count > max_values:
            raise ValueError(
                f"more than {max_values} values after expanding aliases; use fewer aliases"
            )
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, dict):
            for key, item in value.items():
                # Keys are names, which messages and tables print: a line break would forge a line.
                if isinstance(key, str) and has_control_characters(key):
                    raise ValueError(
                        f"the key {short_repr(key)} has control characters; remove them"
                    )
                # A key is a value to check as well; its path is the key alone.
                pending_values.append(((None, short_repr, key), depth + 1, key))
                pending_values.append(((path, _format_key, key), depth + 1, item))
        elif isinstance(value, list):
            pending_values += (
                ((path, _format_index, index), depth + 1, item) for index, item in enumerate(value)
            )
        elif problem := _describe_unsupported_value(value):
            location = _format_value_path(path)
            raise ValueError(f"{location}: {problem}" if location else problem)


_ValuePath = tuple[Any, Callable[[Any], str], Any] | None
"""Path of a value: (path of its container, function that formats its key, key); None for the root.

Only errors format a path, because a plan can have millions of values.
"""

_format_index = "[{}]".format


def _format_key(key: Any) -> str:
    return f".{key if isinstance(key, str) else short_repr(key)}"


def _format_value_path(path: _ValuePath) -> str:
    if path is None:
        return ""
    container_path, format_key, key = path
    return (_format_value_path(container_path) + format_key(key)).lstrip(".")


def _describe_unsupported_value(value: Any) -> str:
    if isinstance(value, int) and value not in INTEGERS:
        return _TOO_LARGE
    # A lone surrogate can be neither encoded as UTF-8 nor printed.
    # ASCII first, a fast test that most strings pass.
    if isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
        return "the string has an unpaired surrogate"
    return ""


def _make_dict_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"duplicate key {short_repr(key)}; remove one of the two")
        unique[key] = value
    return unique


def _describe_yaml_error(error: yaml.MarkedYAMLError) -> str:
    alias = re.fullmatch(r"found undefined alias '(.*)'", error.problem or "")
    if alias is None:
        return str(error.problem)
    return f"*{alias[1]} has no anchor: write &{alias[1]} before the value that it refers to"


_TAG = "tag:yaml.org,2002:"


class _PlainYamlLoader(yaml.SafeLoader):
    """A SafeLoader that reads 1e-3 as a number and rejects duplicate keys and too many values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # While the text is parsed, which takes minutes for millions of values.
        self._num_nodes += 1
        if self._num_nodes > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values; write fewer")
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and _is_ambiguous_number(node):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{short_repr(node.value)} is one number in YAML 1.1 and something else in YAML 1.2"
                "; write a decimal number without leading zeros, or quote a string",
                node.start_mark,
            )
        try:
            return super().construct_object(node, deep)
        # PyYAML raises these errors for scalars such as `!!int x`, without a position in the file.
        except (ValueError, ArithmeticError, KeyError, AttributeError, TypeError) as error:
            if isinstance(error, yaml.YAMLError):
                raise
            tag = node.tag.rpartition(":")[2]
            scalar = short_repr(node.value) if isinstance(node, yaml.ScalarNode) else "this"
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{scalar} cannot be read as {tag}; quote the value to write a string",
                node.start_mark,
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key is a {key_node.id}; use a string or number",
                    key_node.start_mark,
                )
            if key_node.tag == f"{_TAG}merge":
                # A few lines of nested merges can produce billions of keys.
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "the merge key << is not supported; repeat the merged keys",
                    key_node.start_mark,
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"duplicate key {short_repr(key)}; remove one of the two",
                    key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _is_ambiguous_number(node: yaml.ScalarNode) -> bool:
    """Return whether a scalar is an octal (010 is 8) or sexagesimal (1:30 is 90) number of YAML
    1.1, which its author hardly means."""
    is_number = node.tag in (f"{_TAG}int", f"{_TAG}float")
    return is_number and re.search(r"^[-+]?0[0-9_]+$|:", node.value) is not None


# PyYAML implements YAML 1.1, in which 1e-3 is a string because it has no decimal point. It finds a
# resolver by the first character of a value.
_PlainYamlLoader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
# Timestamps are read as strings, because dates are not plain data. "value" is the YAML 1.1 tag of a
# lone "=".
_READ_AS = {tag: tag for tag in ("null", "bool", "int", "float", "str", "seq", "map")}
_PlainYamlLoader.yaml_constructors = {None: yaml.SafeLoader.yaml_constructors[None]} | {
    _TAG + tag: yaml.SafeLoader.yaml_constructors[_TAG + read_as]
    for tag, read_as in (_READ_AS | {"timestamp": "str", "value": "str"}).items()
}
