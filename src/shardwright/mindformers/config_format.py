"""The plug-in that reads MindFormers files; implements `ConfigFormat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.mindformers.run import LanguageRun, language_run
from shardwright.mindformers.translate import translate_run
from shardwright.run.config.checkpointing import CheckpointPolicy
from shardwright.run.config.schema import Config

_MINDFORMERS_KEYS = ("runner_config", "parallel_config", "trainer", "use_parallel", "run_mode")
"""Top-level keys by which a MindFormers file is recognized."""


@dataclass(frozen=True)
class MindFormersRun(LanguageRun):
    """A run of a MindFormers file; implements `ForeignRun`."""

    @property
    def devices(self) -> int:
        """Number of devices for which the file is written."""
        return self.parallelism.devices

    def config(self) -> Config:
        """Translate the file into a Shardwright configuration for `devices` devices."""
        return translate_run(self, self.devices)

    def fitted(self, config: Config, devices: int, servers: int) -> Config:
        """Return `config` with batch size and `max_stages` for this number of devices and servers.

        Raises:
            ConfigError: if the parallel degrees of the file do not multiply to `devices`.
        """
        self.check_devices(devices)
        data = {"batch_size": self.batch.global_batch(devices)}
        stages = {"max_stages": self.parallelism.max_stages}
        return config.model_copy(
            update={
                "data": config.data.model_copy(update=data),
                "parallel": config.parallel.model_copy(update=stages),
            }
        )

    def batch_formula(self, devices: int) -> str:
        """Return the formula of the global batch size as text, with the values of the file."""
        return self.batch.formula(devices)

    def checkpoint_policy(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Return `policy` with MindFormers' key names, for error messages."""
        return replace(
            policy,
            load_key="load_checkpoint",
            resume_key="resume_training",
            # MindFormers' key needs a checkpoint, while `train.resume` begins a new run without
            # one.
            must_resume=self.training.resume,
        )


def recognizes(content: Any) -> bool:
    """Whether `content`, a parsed YAML file, is a MindFormers configuration."""
    return isinstance(content, Mapping) and any(key in content for key in _MINDFORMERS_KEYS)


def read_run(content: Mapping[str, Any], file: str) -> MindFormersRun:
    """Parse a MindFormers file.

    Args:
        content: the parsed YAML.
        file: name of the file, for error messages.

    Raises:
        ConfigError: if a key is missing, invalid or contradicts another.
    """
    # This class adds only methods, so its fields are those of `LanguageRun`.
    return MindFormersRun(**vars(language_run(content, file)))
