"""MindFormers' files as a format of `run/config/formats.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.mindformers.run import LanguageRun, language_run
from shardwright.mindformers.translate import translate_run
from shardwright.run.config.checkpointing import CheckpointPolicy
from shardwright.run.config.schema import Config

_SECTIONS = ("runner_config", "parallel_config", "trainer", "use_parallel", "run_mode")


@dataclass(frozen=True)
class MindFormersRun(LanguageRun):
    """A `ForeignRun`."""

    @property
    def devices(self) -> int:
        """Number of devices that the file is written for."""
        return self.parallelism.devices

    def config(self) -> Config:
        """The run in Shardwright's keys."""
        return translate_run(self, self.devices)

    def fitted(self, config: Config, devices: int, servers: int) -> Config:
        """`config` with the batch size and the most stages for `devices` on `servers`.

        Raises:
            ConfigError: the numbers of the file do not fit `devices`.
        """
        self.check_devices(devices)
        data = {"batch_size": self.batch.global_batch(devices)}
        stages = {"max_stages": self.parallelism.most_stages(servers)}
        return config.model_copy(
            update={
                "data": config.data.model_copy(update=data),
                "parallel": config.parallel.model_copy(update=stages),
            }
        )

    def batch_formula(self, devices: int) -> str:
        """How the batch size follows from the numbers of the file."""
        return self.batch.formula(devices)

    def checkpoint_policy(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        """`policy` with MindFormers' keys."""
        return replace(
            policy,
            load_key="load_checkpoint",
            resume_key="resume_training",
            must_resume=self.training.resume,
        )


def recognizes(content: Any) -> bool:
    """Whether `content`, a parsed YAML file, is a MindFormers configuration."""
    return isinstance(content, Mapping) and any(key in content for key in _SECTIONS)


def read_run(content: Mapping[str, Any], file: str) -> MindFormersRun:
    """The run that `content` describes; `file` is its name in errors.

    Raises:
        ConfigError: a missing, invalid or contradictory key.
    """
    return MindFormersRun(**vars(language_run(content, file)))
