"""Find unknown keys of a configuration file without importing its schema.

The schema needs torch, whose import takes seconds. So this module reads the keys of each section
from the source of the schema: the annotated fields of its classes.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2]

# `ParallelSection` inherits the keys of `FileOptions`, which the second file defines.
SOURCES = ("run/config/schema.py", "core/planner/options.py")
"""Source files of the section classes, relative to the package."""

SectionKeys = Mapping[str, "str | None"]
"""Keys of a section. The value is the class name of a nested section; None for a plain value."""


def unknown_keys(content: Any, file: str) -> str:
    """Return a message with one line per unknown key; empty if all keys are known.

    A file whose top-level keys resemble none of the schema belongs to another framework, and is
    not checked.

    Args:
        content: the parsed YAML.
        file: name of the file.
    """
    keys = section_keys()["Config"]
    # Other content is reported by the schema, with its own message.
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        return ""
    # One key that resembles none is enough, as other frameworks share keys such as `model`.
    if not all(key in keys or close_keys(key, keys) for key in content):
        return ""
    return "\n".join(f"{file}: {line}" for line in _iterate_unknown_keys(content, "Config", ""))


def key_hint(key: str, keys: SectionKeys | list[str]) -> str:
    """Format a hint for an unknown key: the most similar valid key, or all valid keys."""
    close = close_keys(key, keys)
    return f"did you mean {close[0]}?" if close else f"valid keys: {', '.join(keys)}"


def close_keys(key: str, keys: SectionKeys | list[str]) -> list[str]:
    """Return a list with the key of `keys` most similar to `key`; empty if none is similar."""
    return difflib.get_close_matches(key, keys, n=1)


def _iterate_unknown_keys(content: Mapping[Any, Any], section: str, prefix: str) -> Iterator[str]:
    keys = section_keys()[section]
    for key, value in content.items():
        if key not in keys:
            yield f"{prefix}{key}: unknown key; {key_hint(str(key), keys)}"
            continue
        below = keys[key]
        # A plain value in place of a section is a mistake that the schema reports.
        if below is not None and isinstance(value, Mapping):
            yield from _iterate_unknown_keys(value, below, f"{prefix}{key}.")


@cache
def section_keys() -> Mapping[str, SectionKeys]:
    """Return the keys of each section of a configuration, by name of the section's class."""
    classes: dict[str, ast.ClassDef] = {}
    for source in SOURCES:
        for node in ast.parse((PACKAGE / source).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
    return {name: dict(_iterate_annotated_keys(name, classes)) for name in classes}


def _iterate_annotated_keys(
    name: str, classes: Mapping[str, ast.ClassDef]
) -> Iterator[tuple[str, str | None]]:
    node = classes[name]
    # From the last base to the first, so that keys override as in Python's attribute look-up.
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _iterate_annotated_keys(base.id, classes)
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            # Through `| None` and `Annotated`, whose parts are names as well.
            names = (
                child.id for child in ast.walk(field.annotation) if isinstance(child, ast.Name)
            )
            # Names of section classes end in `Section`; other names are the types of plain values.
            sections = [each for each in names if each.endswith("Section")]
            yield _get_field_alias(field) or field.target.id, sections[0] if sections else None


def _get_field_alias(field: ast.AnnAssign) -> str | None:
    """Return the YAML key of a field that has an alias, such as `async`; otherwise None."""
    if not isinstance(field.value, ast.Call):
        return None
    aliases = (each.value for each in field.value.keywords if each.arg == "alias")
    return next((str(each.value) for each in aliases if isinstance(each, ast.Constant)), None)
