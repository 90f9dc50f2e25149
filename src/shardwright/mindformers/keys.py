"""Read typed values of the nested keys of a configuration file, and record which keys are read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from shardwright.errors import ConfigError
from shardwright.plain_data import INTEGERS

_BYTES_PER_UNIT = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_SIZE_PATTERN = re.compile(r"\s*([0-9.]+)\s*([KMGT]B)\s*", re.IGNORECASE)


class InvalidKeyError(ConfigError):
    """Error in the value of one key of a configuration file.

    Args:
        key: full path of the key.
    """

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class UnsupportedModelError(InvalidKeyError):
    """Error of a model that cannot be built; reported alone, without other errors of the file."""


@dataclass(frozen=True)
class Keys:
    """Reader of the keys of one section of a configuration file.

    Values are parsed leniently: `1e-8` is a string in YAML 1.1 but a number here; `None`, `"None"`
    and an empty value count as a missing key.

    Args:
        content: the parsed section.
        path: path of the section in the file, for example `parallel.parallel_optimizer_config`.
        file: name of the file, the prefix of each error message.
    """

    content: Mapping[str, Any]
    path: str
    file: str
    _read_names: set[str] = field(default_factory=set)
    _opened_sections: dict[str, Keys] = field(default_factory=dict)
    _ignored_keys: set[str] = field(default_factory=set)

    def section(self, name: str) -> Keys:
        """Return the subsection `name`; an empty section if the key is missing.

        Raises:
            ConfigError: if the value is not a mapping.
        """
        # One reader for each section, which records all keys that are read.
        if name not in self._opened_sections:
            # YAML reads an empty section as None.
            content = self._read_value(name) or {}
            if not isinstance(content, Mapping):
                raise self.error(
                    name, f"{content!r} is not a mapping\nwrite one `key: value` per line"
                )
            path = self._make_full_key(name)
            self._opened_sections[name] = Keys(
                content, path, self.file, _ignored_keys=self._ignored_keys
            )
        return self._opened_sections[name]

    def with_defaults(self, defaults: Mapping[str, Any]) -> Keys:
        """Return a reader of this section that uses `defaults` for missing keys.

        Keys that the new reader reads are recorded as read in this section.
        """
        content = {**defaults, **self.content}
        # `replace` passes on the sets of this reader, so that keys read there count here.
        return replace(self, content=content)

    def has(self, name: str) -> bool:
        """Whether the key is present and not null."""
        return self._read_value(name) is not None

    def number(
        self,
        name: str,
        default: float | None = None,
        minimum: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> float:
        """Return the number at `name`, which may be written as a string.

        Args:
            default: value of a missing key; None if the key is required.
            minimum: smallest valid value.
            above, below: exclusive lower and upper bounds.

        Raises:
            ConfigError: if the key is missing, not a number, or out of bounds.
        """
        value = self._read_value(name)
        number = default if value is None else _parse_number(value)
        if number is None:
            if value is None:
                raise self._make_missing_key_error(name)
            raise self.error(name, f"{value!r} is not a number\nset it to a number such as 0.5")
        if not (minimum <= number and above < number < below):
            bounds = ((minimum, "at least"), (above, "above"), (below, "below"))
            limits = [f"{word} {bound:g}" for bound, word in bounds if math.isfinite(bound)]
            raise self.error(
                name, f"{number:g} is out of range\nset a number {' and '.join(limits)}"
            )
        return number

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the integer at `name`, which must be at least `minimum`.

        Raises:
            ConfigError: if the key is missing, not an integer of 64 bits, or less than `minimum`.
        """
        number, value = float(self.number(name, default)), self._read_value(name)
        # A float cannot represent all digits of a large integer.
        integer = value if isinstance(value, int) else int(number)
        if not number.is_integer():
            raise self.error(name, f"{value!r} is not an integer\nset it to an integer such as 8")
        if integer not in INTEGERS:
            raise self.error(name, f"{value!r} is out of range\nset an integer below 2^63")
        # After the checks of integers, whose errors are more exact.
        self.number(name, default, minimum=minimum)
        return integer

    def flag(self, name: str, default: bool) -> bool:
        """Return the boolean at `name`, which may be written as a string.

        Raises:
            ConfigError: if the value is not a boolean.
        """
        value = self._read_value(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise self.error(name, f"{value!r} is not a boolean\nset it to True or False")

    def string(self, name: str, default: str = "", valid: Sequence[str] = ()) -> str:
        """Return the string at `name`.

        Args:
            valid: valid values; if empty, every string is valid.

        Raises:
            ConfigError: if the value is not a string, or not one of `valid`.
        """
        value = self._read_value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, f"{value!r} is not a string\nwrite the value in quotes")
        if valid and value not in valid:
            raise self.error(name, f"{value!r} is not supported\nuse one of {', '.join(valid)}")
        return value

    def size(self, name: str) -> int | None:
        """Return the memory size at `name` in bytes (`58GB` is 58 · 2^30), or None without the key.

        Raises:
            ConfigError: if the value is not a size.
        """
        value = self._read_value(name)
        if value is None:
            return None
        match = _SIZE_PATTERN.fullmatch(value) if isinstance(value, str) else None
        # The pattern also matches numbers with several points.
        number = _parse_number(match.group(1)) if match else None
        if match is None or number is None or number <= 0:
            raise self.error(name, f"{value!r} is not a memory size\nset it to a size such as 58GB")
        return int(number * _BYTES_PER_UNIT[match.group(2).upper()])

    def any(self, name: str) -> Any:
        """Return the value at `name` as parsed from YAML; None if the key is missing."""
        return self._read_value(name)

    def ignore(self, key: str) -> None:
        """Treat a key as missing from now on, in this section and in its subsections.

        Args:
            key: full path of the key.
        """
        self._ignored_keys.add(key)

    def error(self, name: str, problem: str) -> InvalidKeyError:
        """Return an error whose message starts with the file and the full key."""
        key = self._make_full_key(name)
        return InvalidKeyError(f"{self.file}: {key}: {problem}", key)

    def unread(self) -> Iterator[str]:
        """Yield the full paths of keys that were never read and of sections never opened.

        If a key resembles a valid key that is missing, the valid key follows as a suggestion.
        """
        for name in self.content:
            if name in self._opened_sections:
                yield from self._opened_sections[name].unread()
            elif name not in self._read_names:
                missing = [key for key in self._read_names if key not in self.content]
                # Stricter than difflib's default of 0.6, because most unread keys are not
                # misspelled.
                close_matches = get_close_matches(str(name), missing, n=1, cutoff=0.85)
                yield self._make_full_key(name) + (
                    f" (did you mean {close_matches[0]}?)" if close_matches else ""
                )

    def _read_value(self, name: str) -> Any:
        self._read_names.add(name)
        value = self.content.get(name)
        return (
            None
            if value in ("None", "") or self._make_full_key(name) in self._ignored_keys
            else value
        )

    def _make_full_key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else str(name)

    def _make_missing_key_error(self, name: str) -> ConfigError:
        return self.error(name, "the key is missing")


def _parse_number(value: Any) -> float | None:
    """Convert a number or a numeric string to a finite float; None for other values."""
    # A bool is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
