"""Nested keys of a file, and a record of which were not read."""

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

    Values are taken as people write them: `1e-8` is text to YAML and a number here, and `None`,
    `"None"` and a key without a value are as if the key were not there.

    Args:
        content: what the section holds.
        path: where it stands, `parallel.parallel_optimizer_config`.
        file: the name of the file, which every error starts with.
    """

    content: Mapping[str, Any]
    path: str
    file: str
    _read: set[str] = field(default_factory=set)
    _sections: dict[str, Keys] = field(default_factory=dict)

    def section(self, name: str) -> Keys:
        """The section of this name, an empty one if there is none.

        Raises:
            ConfigError: it is no section.
        """
        if name not in self._sections:
            content = self._value(name) or {}
            if not isinstance(content, Mapping):
                raise self.error(name, f"expected a mapping, got {content!r}")
            self._sections[name] = Keys(content, self._name(name), self.file)
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
        """A number, also as text.

        Raises:
            ConfigError: no number, missing, less than `least`, or not between `above` and `below`.
        """
        value = self._value(name)
        number = default if value is None else _number(value)
        if number is None:
            raise self._missing(name) if value is None else self._wrong(name, "a number", value)
        if not (least <= number and above < number < below):
            bounds = ((least, "at least"), (above, "above"), (below, "below"))
            limits = [f"{word} {bound:g}" for bound, word in bounds if math.isfinite(bound)]
            raise self.error(name, f"{number:g} must be {' and '.join(limits)}")
        return number

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`. Raises: ConfigError: none, or missing."""
        number = float(self.number(name, default))
        if not number.is_integer():
            raise self._wrong(name, "a whole number", self._value(name))
        return int(self.number(name, default, least=least))

    def flag(self, name: str, default: bool) -> bool:
        """True or false, also as text. Raises: ConfigError: something else."""
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise self._wrong(name, "True or False", value)

    def text(self, name: str, default: str = "", valid: Sequence[str] = ()) -> str:
        """Text. Raises: ConfigError: something else, or none of the `valid`."""
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        if valid and value not in valid:
            raise self.error(name, f"{value!r} is not known; valid are {', '.join(valid)}")
        return value

    def size(self, name: str) -> int | None:
        """Bytes of a size such as `58GB`, in powers of 1024; None if there is none.

        Raises:
            ConfigError: no size.
        """
        value = self._value(name)
        if value is None:
            return None
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        number = _number(match.group(1)) if match else None
        if match is None or number is None or number <= 0:
            raise self._wrong(name, "a size such as 58GB", value)
        return int(number * _SIZES[match.group(2).upper()])

    def any(self, name: str) -> Any:
        """The value as it stands, None if there is none."""
        return self._value(name)

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self._name(name)}: {problem}")

    def unread(self) -> Iterator[str]:
        """Keys that were not read; a section that was not opened is one of them.

        One that resembles a missing key that was read is probably misspelt, and says so.
        """
        for name in self.content:
            if name in self._sections:
                yield from self._sections[name].unread()
            elif name not in self._read:
                wanted = [key for key in self._read if key not in self.content]
                near = get_close_matches(str(name), wanted, n=1, cutoff=0.85)
                yield self._name(name) + (f" (did you mean {near[0]}?)" if near else "")

    def _value(self, name: str) -> Any:
        self._read.add(name)
        value = self.content.get(name)
        return None if value in ("None", "") else value

    def _name(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else str(name)

    def _missing(self, name: str) -> ConfigError:
        return self.error(name, "missing")

    def _wrong(self, name: str, expected: str, value: Any) -> ConfigError:
        return self.error(name, f"expected {expected}, got {value!r}")


def _number(value: Any) -> float | None:
    """The finite number, also of its text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
