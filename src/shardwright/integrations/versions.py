"""Check that the installed version of another library is new enough."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from shardwright.errors import ConfigError


def require_version(package: str, oldest: str, feature: str) -> None:
    """Check that `package` is installed in version `oldest` or a newer one.

    Args:
        package: name of the package, as in the package index.
        oldest: the oldest version that is supported, such as `2.4`.
        feature: the feature that needs the package; first words of the error message.

    Raises:
        ConfigError: if the package is missing or older.
    """
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
