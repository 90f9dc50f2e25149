"""Text, JSON and YAML that people write: plain data of bounded size, or one error that says where.

What is read holds only mappings, lists, texts, booleans, null and numbers of at most 64 bits, so
that whatever reads it further can compare, copy and print all of it.
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

ErrorKind = type[ShardwrightError]

MAX_DEPTH = 100
"""Levels of mappings and lists in each other; recursion over what is read stays far from Python's
limit."""

MAX_VALUES = 100_000
"""Values of a YAML file, each alias counted as all that it stands for."""

INTEGERS = range(-(2**63), 2**64)
"""What fits into 64 bits, signed or not."""


class _Shortened(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 3, 6, 8, 8
        self.maxstring = self.maxlong = self.maxother = 120


def short_repr(value: object) -> str:
    """The `repr` of a value, shortened to what fits into a message."""
    return _Shortened().repr(value)


def read_text(path: str | Path, kind: ErrorKind) -> str:
    """The text of a file, without the byte order mark that some editors write.

    Raises:
        kind: the file is missing, cannot be read, or is not UTF-8 text.
    """
    with _naming(path, kind):
        return Path(path).read_text(encoding="utf-8-sig")


def check_exists(path: str | Path, kind: ErrorKind) -> None:
    """Reads nothing, so that what a pipe holds is still there to be read.

    Raises:
        kind: there is no such file.
    """
    with _naming(path, kind):
        Path(path).stat()


@contextmanager
def _naming(path: str | Path, kind: ErrorKind) -> Iterator[None]:
    """Errors of the operating system and of decoding, as one that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise kind(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise kind(f"{path}: {reason}") from None


def parse_json(text: str, where: str, kind: ErrorKind) -> Any:
    """The plain data of a JSON text.

    Raises:
        kind: no valid JSON, a duplicate key, or a value that is not plain data; starts with
            `where`.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique)
        _check(data, math.inf)
    except json.JSONDecodeError as error:
        raise kind(f"{where}: invalid JSON: {error}") from None
    except RecursionError:
        raise kind(f"{where}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise kind(f"{where}: {error}") from None
    return data


def parse_yaml(text: str, where: str, kind: ErrorKind) -> Any:
    """The plain data of a YAML text; dates are text, and `1e-3` is a number.

    Raises:
        kind: no valid YAML, a duplicate key, an alias without its anchor, a tag of another kind of
            value, or a value that is not plain data; starts with `where`.
    """
    try:
        # The loader is a SafeLoader: it makes plain data only.
        data = yaml.load(text, Loader=_Loader)
        _check(data, MAX_VALUES)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise kind(f"{where}: {place}{_yaml_problem(error)}") from None
    except yaml.YAMLError as error:
        raise kind(f"{where}: invalid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise kind(f"{where}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise kind(f"{where}: {error}") from None
    return data


_TOO_DEEP = f"more than {MAX_DEPTH} levels of lists and mappings in each other"


def _check(data: Any, most: float) -> None:
    """Raises: ValueError: a value that is not plain, too many of them, or too deeply nested."""
    pending: list[tuple[_Place, int, Any]] = [(None, 0, data)]
    count = 0
    while pending:
        place, depth, value = pending.pop()
        count += 1
        if count > most:
            raise ValueError(f"more than {most} values, counting what aliases stand for")
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(value, dict):
            for key, item in value.items():
                pending.append(((None, short_repr, key), depth + 1, key))
                pending.append(((place, _dotted, key), depth + 1, item))
        elif isinstance(value, list):
            pending += (((place, _NUMBER, at), depth + 1, item) for at, item in enumerate(value))
        elif problem := _problem(value):
            where = _place_text(place)
            raise ValueError(f"{where}: {problem}" if where else problem)


_Place = tuple[Any, Callable[[Any], str], Any] | None
"""Where a value is: the place of what holds it, how its key there is written, and the key. Text is
made of it only for an error: a plan can have millions of values."""

_NUMBER = "[{}]".format


def _dotted(key: Any) -> str:
    return f".{key if isinstance(key, str) else short_repr(key)}"


def _place_text(place: _Place) -> str:
    if place is None:
        return ""
    outer, written, key = place
    return (_place_text(outer) + written(key)).lstrip(".")


def _problem(value: Any) -> str:
    if isinstance(value, int) and value not in INTEGERS:
        return f"an integer of {value.bit_length()} bits; at most 64 are read"
    if isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
        return "half of a surrogate pair in a text"
    return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    return f"*{alias[1]} has no anchor: write &{alias[1]} before the value that it stands for"


_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, a key that is given twice is a mistake."""

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
                # A few lines can merge billions of keys.
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "<< is not read: repeat the keys that it merges",
                    key_node.start_mark,
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {short_repr(key)}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, takes 1e-3 for text, because it has no point.
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
_READ_AS = {kind: kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
_Loader.yaml_constructors = {None: yaml.SafeLoader.yaml_constructors[None]} | {
    _TAG + kind: yaml.SafeLoader.yaml_constructors[_TAG + other]
    for kind, other in (_READ_AS | {"timestamp": "str", "value": "str"}).items()
}
