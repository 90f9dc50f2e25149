"""A configuration of the MindFormers shape, read and checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.mindformers.batch import Batch, batch
from shardwright.config.mindformers.keys import Keys
from shardwright.config.mindformers.model import Model, model
from shardwright.config.mindformers.parallelism import Parallelism, parallelism
from shardwright.config.mindformers.training import Training, training

_MARKS = ("runner_config", "parallel_config", "trainer")


@dataclass(frozen=True)
class LanguageRun:
    """A language model, how it is trained, and how that is divided.

    Args:
        name: of the model, for people.
        memory_limit: bytes that a device may use, None for what it has.
        dataset: the folder or file of the training data, empty for none.
        strategy_file: where the strategies of a plan are saved.
        notes: what is taken otherwise than the file says, and why.
        unused: keys of the file that mean nothing here.
    """

    name: str
    model: Model
    parallelism: Parallelism
    batch: Batch
    training: Training
    memory_limit: int | None
    dataset: str
    strategy_file: str
    notes: tuple[str, ...]
    unused: tuple[str, ...]


def has_this_shape(content: Any) -> bool:
    """Whether the content of a YAML file is of the MindFormers shape."""
    return isinstance(content, Mapping) and any(mark in content for mark in _MARKS)


def language_run(content: Mapping[str, Any], file: str = "config") -> LanguageRun:
    """The run that the content of a file describes; `file` is its name in errors.

    Raises:
        ConfigError: a key that is missing, of a wrong kind, or contradicts another.
    """
    keys, notes = Keys(content, "", file), list[str]()
    made = model(keys, notes)
    ways = parallelism(keys, made.sizes, notes)
    strategy_file = _strategy_file(keys)
    if strategy_file:
        notes.append(f"{strategy_file} is written as JSON, the strategies of the plan")
    found = LanguageRun(
        name=keys.section("trainer").text("model_name", made.sizes.family),
        model=made,
        parallelism=ways,
        batch=batch(keys, ways, notes),
        training=training(keys),
        memory_limit=keys.section("context").size("max_device_memory"),
        dataset=keys.section("train_dataset").section("data_loader").text("dataset_dir"),
        strategy_file=strategy_file,
        notes=tuple(notes),
        unused=(),
    )
    return LanguageRun(**{**vars(found), "unused": tuple(keys.unread())})


def _strategy_file(keys: Keys) -> str:
    parallel = keys.section("parallel")
    config = parallel.section("strategy_ckpt_config")
    said = [parallel.text("strategy_ckpt_save_file"), config.text("save_file")]
    if all(said) and said[0] != said[1]:
        raise config.error("save_file", f"{said[1]}, but strategy_ckpt_save_file says {said[0]}")
    return said[0] or said[1]
