"""Typed access to the nested keys of a file, with a record of unread keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shardwright.errors import ConfigError

_SIZES = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([KMGT]B)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Keys:
    """The keys of one section.

    Values are parsed leniently: `1e-8` is a string in YAML 1.1 but a number here; `None`, `"None"`
    and an empty value count as a missing key.

    Args:
        content: the mapping of the section.
        path: its path in the file, for example `parallel.parallel_optimizer_config`.
        file: name of the file, the start of each error message.
    """

    content: Mapping[str, Any]
    path: str
    file: str
    _read: set[str] = field(default_factory=set)
    _sections: dict[str, Keys] = field(default_factory=dict)

    def section(self, name: str) -> Keys:
        """The subsection `name`; empty if missing.

        Raises:
            ConfigError: the value is not a mapping.
        """
        if name not in self._sections:
            content = self._value(name) or {}
            if not isinstance(content, Mapping):
                raise self.error(name, f"expected a mapping, got {content!r}")
            self._sections[name] = Keys(content, self._full_name(name), self.file)
        return self._sections[name]

    def has(self, name: str) -> bool:
        """Whether the key is present and not null."""
        return self._value(name) is not None

    def number(
        self,
        name: str,
        default: float | None = None,
        least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> float:
        """The number at `name`, which may be written as a string.

        Args:
            default: the value of a missing key; None if it is required.
            least: inclusive lower bound.
            above, below: exclusive bounds.

        Raises:
            ConfigError: the key is missing, not a number, or out of bounds.
        """
        value = self._value(name)
        number = default if value is None else _number(value)
        if number is None:
            raise self._missing(name) if value is None else self._invalid(name, "a number", value)
        if not (least <= number and above < number < below):
            bounds = ((least, "at least"), (above, "above"), (below, "below"))
            limits = [f"{word} {bound:g}" for bound, word in bounds if math.isfinite(bound)]
            raise self.error(name, f"{number:g} must be {' and '.join(limits)}")
        return number

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """The integer at `name`, at least `least`.

        Raises:
            ConfigError: the key is missing, not an integer, or less than `least`.
        """
        number = float(self.number(name, default))
        if not number.is_integer():
            raise self._invalid(name, "a whole number", self._value(name))
        return int(self.number(name, default, least=least))

    def flag(self, name: str, default: bool) -> bool:
        """The boolean at `name`, which may be written as a string.

        Raises:
            ConfigError: the value is not a boolean.
        """
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise self._invalid(name, "True or False", value)

    def text(self, name: str, default: str = "", valid: Sequence[str] = ()) -> str:
        """The string at `name`.

        Args:
            valid: the valid values; any string if empty.

        Raises:
            ConfigError: the value is not a string, or not one of `valid`.
        """
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._invalid(name, "a string", value)
        if valid and value not in valid:
            raise self.error(name, f"{value!r} is not known; valid are {', '.join(valid)}")
        return value

    def size(self, name: str) -> int | None:
        """The size at `name` in bytes; `58GB` is 58 · 2^30. None if missing.

        Raises:
            ConfigError: the value is not a size.
        """
        value = self._value(name)
        if value is None:
            return None
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        number = _number(match.group(1)) if match else None
        if match is None or number is None or number <= 0:
            raise self._invalid(name, "a size such as 58GB", value)
        return int(number * _SIZES[match.group(2).upper()])

    def any(self, name: str) -> Any:
        """The value at `name` as parsed by YAML; None if missing."""
        return self._value(name)

    def error(self, name: str, problem: str) -> ConfigError:
        """An error that starts with the file and the full key."""
        return ConfigError(f"{self.file}: {self._full_name(name)}: {problem}")

    def unread(self) -> Iterator[str]:
        """Keys that were never read, and sections that were never opened, with their full path.

        A key that resembles a missing one is probably misspelled, and gets a suggestion.
        """
        for name in self.content:
            if name in self._sections:
                yield from self._sections[name].unread()
            elif name not in self._read:
                missing = [key for key in self._read if key not in self.content]
                near = get_close_matches(str(name), missing, n=1, cutoff=0.85)
                yield self._full_name(name) + (f" (did you mean {near[0]}?)" if near else "")

    def _value(self, name: str) -> Any:
        self._read.add(name)
        value = self.content.get(name)
        return None if value in ("None", "") else value

    def _full_name(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else str(name)

    def _missing(self, name: str) -> ConfigError:
        return self.error(name, "missing")

    def _invalid(self, name: str, expected: str, value: Any) -> ConfigError:
        return self.error(name, f"expected {expected}, got {value!r}")


def _number(value: Any) -> float | None:
    """`value` as a finite number; None if it is neither a number nor the text of one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
