"""Reading nested keys of a file of many keys, and knowing in the end which were not read."""

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
                raise self.error(name, f"expected keys with values, got {content!r}")
            self._sections[name] = Keys(content, self._name(name), self.file)
        return self._sections[name]

    def has(self, name: str) -> bool:
        """Whether there is a value."""
        return self._value(name) is not None

    def number(
        self,
        name: str,
        default: float | None = None,
        least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> float:
        """A number, also one given as text.

        Raises:
            ConfigError: none, missing, less than `least`, or not between `above` and `below`.
        """
        given = self._value(name)
        number = default if given is None else _number(given)
        if number is None:
            raise self._missing(name) if given is None else self._wrong(name, "a number", given)
        if not (least <= number and above < number < below):
            bounds = ((least, "at least"), (above, "above"), (below, "below"))
            said = [f"{word} {bound:g}" for bound, word in bounds if math.isfinite(bound)]
            raise self.error(name, f"{number:g} must be {' and '.join(said)}")
        return number

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`. Raises: ConfigError: none, or missing."""
        number = float(self.number(name, default))
        if not number.is_integer():
            raise self._wrong(name, "a whole number", self._value(name))
        return int(self.number(name, default, least=least))

    def flag(self, name: str, default: bool) -> bool:
        """True or false, also as text. Raises: ConfigError: something else."""
        given = self._value(name)
        if given is None:
            return default
        if isinstance(given, bool):
            return given
        if isinstance(given, str) and given.lower() in ("true", "false"):
            return given.lower() == "true"
        raise self._wrong(name, "True or False", given)

    def text(self, name: str, default: str = "", valid: Sequence[str] = ()) -> str:
        """Text. Raises: ConfigError: something else, or none of the `valid`."""
        given = self._value(name)
        if given is None:
            return default
        if not isinstance(given, str):
            raise self._wrong(name, "text", given)
        if valid and given not in valid:
            raise self.error(name, f"{given!r} is not known; valid are {', '.join(valid)}")
        return given

    def size(self, name: str) -> int | None:
        """Bytes of a size such as `58GB`, in powers of 1024; None if there is none.

        Raises:
            ConfigError: no size.
        """
        given = self._value(name)
        if given is None:
            return None
        match = _SIZE.fullmatch(given) if isinstance(given, str) else None
        number = _number(match.group(1)) if match else None
        if match is None or number is None or number <= 0:
            raise self._wrong(name, "a size such as 58GB", given)
        return int(number * _SIZES[match.group(2).upper()])

    def any(self, name: str) -> Any:
        """The value as it stands, None if there is none."""
        return self._value(name)

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self._name(name)}: {problem}")

    def unread(self) -> Iterator[str]:
        """Keys that nobody has asked for; a section that nobody has entered is one of them.

        One that resembles a key that was asked for in vain is probably misspelt, and says so.
        """
        for name in self.content:
            if name in self._sections:
                yield from self._sections[name].unread()
            elif name not in self._read:
                wanted = [key for key in self._read if key not in self.content]
                near = get_close_matches(str(name), wanted, n=1, cutoff=0.85)
                yield self._name(name) + (f" (is {near[0]} meant?)" if near else "")

    def _value(self, name: str) -> Any:
        self._read.add(name)
        given = self.content.get(name)
        return None if given in ("None", "") else given

    def _name(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else str(name)

    def _missing(self, name: str) -> ConfigError:
        return self.error(name, "missing")

    def _wrong(self, name: str, expected: str, given: Any) -> ConfigError:
        return self.error(name, f"expected {expected}, got {given!r}")


def _number(given: Any) -> float | None:
    """The finite number that is given or written; None if it is none."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        number = float(given)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
