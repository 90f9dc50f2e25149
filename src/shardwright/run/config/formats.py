"""Configuration files of other frameworks, which packages add as plug-ins.

A plug-in is a module with the functions of `ConfigFormat`, registered as an entry point in the
group `shardwright.config_formats`; `shardwright.mindformers` is one.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from shardwright.run.config.checkpointing import CheckpointPolicy
from shardwright.run.config.schema import Config

GROUP = "shardwright.config_formats"


class ForeignRun(Protocol):
    """A run as the file of another framework describes it."""

    @property
    def name(self) -> str:
        """Name of the model, for messages and tables."""

    @property
    def devices(self) -> int:
        """Number of devices that the file is written for."""

    @property
    def memory_limit(self) -> int | None:
        """Bytes that each device may use; None for all that it has."""

    @property
    def only_strategies(self) -> bool:
        """Whether the run ends after writing the strategies of its plan."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences from what the file says, and their reasons."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys of the file that have no effect."""

    def config(self) -> Config:
        """The run in Shardwright's keys, for `devices` devices."""

    def fitted(self, config: Config, devices: int, servers: int) -> Config:
        """`config` with the batch size and the stages for another number of devices.

        Raises:
            ConfigError: the numbers of the file do not fit `devices`.
        """

    def batch_formula(self, devices: int) -> str:
        """How the batch size follows from the numbers of the file, as a sentence."""

    def checkpoint_policy(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        """`policy` with the keys by which the file asks for it."""


class ConfigFormat(Protocol):
    """Reads the files of one framework."""

    def recognizes(self, content: Any) -> bool:
        """Whether `content`, a parsed YAML file, is of this format."""

    def read_run(self, content: Any, file: str) -> ForeignRun:
        """The run that `content` describes; `file` is its name in errors.

        Raises:
            ConfigError: a missing, invalid or contradictory key.
        """


@cache
def config_formats() -> tuple[ConfigFormat, ...]:
    """The installed formats."""
    return tuple(entry.load() for entry in entry_points(group=GROUP))


def foreign_run(content: Any, file: str) -> ForeignRun | None:
    """The run in a file of another framework; None if `content` is of no installed format."""
    recognized = (each for each in config_formats() if each.recognizes(content))
    found = next(recognized, None)
    return None if found is None else found.read_run(content, file)
