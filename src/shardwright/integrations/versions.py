"""Check that the installed version of another library is new enough."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from shardwright.errors import ConfigError

OLDEST_VERSIONS = {
    "accelerate": "1.1",
    "lightning": "2.6",
    "torchtitan": "0.3",
    "transformers": "5.3",
}
"""The oldest supported version of each library, as in the extras of `pyproject.toml`."""


def require_version(package: str, feature: str) -> None:
    """Check that a supported version of a library is installed.

    Call it before names of the library are imported, which an older version may lack.

    Args:
        package: name of the library in the package index, a key of `OLDEST_VERSIONS`.
        feature: the feature that needs the library; first words of the error message.

    Raises:
        ConfigError: if the library is missing or too old.
    """
    oldest = OLDEST_VERSIONS[package]
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f"{feature} needs `{package}`, which is not installed\npip install "
            f"'{package}>={oldest}'"
        ) from None
    # Without suffixes, so that a pre-release counts as its release.
    if _parse_release_numbers(installed) < _parse_release_numbers(oldest):
        raise ConfigError(
            f"{feature} needs `{package}` {oldest} or newer, but {installed} is installed\n"
            f"pip install -U '{package}>={oldest}'"
        )


def _parse_release_numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version: `(2, 5)` of `2.5rc1`."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in release[0].split(".")) if release else ()
