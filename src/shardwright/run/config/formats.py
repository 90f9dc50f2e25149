"""Plug-ins that read configuration files of other frameworks.

A plug-in is a module with the functions of `ConfigFormat`, registered as an entry point in the
group `shardwright.config_formats`, for example `shardwright.mindformers`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from shardwright.run.config.checkpointing import CheckpointPolicy
from shardwright.run.config.schema import Config

ENTRY_POINT_GROUP = "shardwright.config_formats"


class ForeignRun(Protocol):
    """A run described by a configuration file of another framework."""

    @property
    def name(self) -> str:
        """Name of the model, for messages and tables."""

    @property
    def devices(self) -> int:
        """Number of devices for which the file is written."""

    @property
    def memory_limit(self) -> int | None:
        """Memory limit in bytes per device; None for all of the device's memory."""

    @property
    def only_strategies(self) -> bool:
        """Whether the run ends after writing the strategies of its plan, without training."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on settings that differ from the file, with reasons."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys of the file that have no effect."""

    def config(self) -> Config:
        """Translate the file into a Shardwright configuration for `devices` devices."""

    def fitted(self, config: Config, devices: int, servers: int) -> Config:
        """Return `config` with batch size and stages for this number of devices and servers.

        Raises:
            ConfigError: if the parallel degrees of the file do not multiply to `devices`.
        """

    def batch_formula(self, devices: int) -> str:
        """Return the formula of the global batch size as text, with the values of the file."""

    def checkpoint_policy(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Return `policy` with the key names of this format, for error messages."""


class ConfigFormat(Protocol):
    """Reader of one framework's configuration files."""

    def recognizes(self, content: Any) -> bool:
        """Whether `content`, a parsed YAML file, has this format."""

    def read_run(self, content: Any, file: str) -> ForeignRun:
        """Parse the content of a configuration file.

        Args:
            content: the parsed YAML.
            file: name of the file, for error messages.

        Raises:
            ConfigError: if a key is missing, invalid or contradicts another.
        """


# Looking up entry points reads the metadata of all installed packages.
@cache
def config_formats() -> tuple[ConfigFormat, ...]:
    """Load all installed configuration formats."""
    return tuple(entry.load() for entry in entry_points(group=ENTRY_POINT_GROUP))


def foreign_run(content: Any, file: str) -> ForeignRun | None:
    """Parse a configuration file of another framework; None if no installed format recognizes it.

    Args:
        content: the parsed YAML.
        file: name of the file, for error messages.
    """
    matching_formats = (each for each in config_formats() if each.recognizes(content))
    # No format recognizes a file in Shardwright's own format, which needs no plug-in.
    config_format = next(matching_formats, None)
    return None if config_format is None else config_format.read_run(content, file)
