"""YAML as people write it, every mistake of it an error with its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwright.errors import ConfigError


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
        raise ConfigError(f"{name}: {place}{_problem(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: no valid YAML: {error}") from None


def _problem(error: yaml.MarkedYAMLError) -> str:
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
                    None, None, f"the key {key} is given twice", key_node.start_mark
                )
            seen = {**seen, key: True}
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML reads, takes 1e-3 for text, because it has no point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
