"""Report all errors of a configuration file at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shardwright.errors import ConfigError
from shardwright.mindformers.keys import InvalidKeyError, Keys, UnsupportedModelError

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class AllErrors:
    """Reader of a configuration file that collects all errors, treating each wrong key as missing.

    Args:
        keys: all keys of the file.
    """

    keys: Keys
    _errors: list[ConfigError] = field(default_factory=list)
    _wrong_keys: list[str] = field(default_factory=list)

    def read(self, reader: Callable[[], _Result]) -> _Result | None:
        """Call `reader` to collect its errors; return its result, or None after an error.

        Each error repeats the call with the invalid key treated as missing. An error whose message
        names an earlier invalid key is dropped, as it may be a consequence.

        Raises:
            UnsupportedModelError: immediately, as no other error matters then.
        """
        # Ends, because each repetition ignores one more key.
        while True:
            try:
                return reader()
            except UnsupportedModelError:
                raise
            except InvalidKeyError as error:
                is_repeated = error.key in self._wrong_keys
                self._collect_error(error, error.key)
                # The key is required: treated as missing, it fails again.
                if is_repeated:
                    return None
                self._wrong_keys.append(error.key)
                # Without this key the reader goes on to later ones.
                self.keys.ignore(error.key)
            except ConfigError as error:
                self._collect_error(error)
                return None

    def _collect_error(self, error: ConfigError, key: str | None = None) -> None:
        # Without the error's own key, which would match itself.
        message = str(error).replace(f"{key}: ", "", 1)
        # Messages name other keys without their sections.
        names = (each.rpartition(".")[2] for each in self._wrong_keys)
        is_consequence = any(re.search(rf"\b{re.escape(name)}\b", message) for name in names)
        if key not in self._wrong_keys and not is_consequence:
            self._errors.append(error)

    def raise_errors(self) -> None:
        """Raise the collected errors as one; do nothing if there are none.

        Raises:
            ConfigError: with the messages of all errors, one after the other.
        """
        # A single error keeps its type and message.
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            prefix = f"{self.keys.file}: "
            messages = [str(error).removeprefix(prefix) for error in self._errors]
            lines = [line for message in messages for line in _indent_lines(message)]
            raise ConfigError("\n".join([f"{prefix}{len(messages)} errors", *lines]))


def _indent_lines(message: str) -> list[str]:
    problem, *remedy = message.split("\n")
    return [f"  {problem}", *(f"    {line}" for line in remedy)]
