"""A configuration of the MindFormers shape, read and checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.config.mindformers.batch import Batch, batch
from shardwright.config.mindformers.checks import check_devices, check_parallelism
from shardwright.config.mindformers.keys import Keys
from shardwright.config.mindformers.model import Model, model
from shardwright.config.mindformers.parallelism import Parallelism, parallelism
from shardwright.config.mindformers.training import Training, training

_MARKS = ("runner_config", "parallel_config", "trainer", "use_parallel", "run_mode")


@dataclass(frozen=True)
class LanguageRun:
    """A language model, how it is trained, and how that is divided.

    Args:
        file: its name, which every error starts with.
        name: of the model, for people.
        memory_limit: bytes that a device may use, None for what it has.
        dataset: the folder or file of the training data, empty for none.
        strategy_file: where the strategies of a plan are saved.
        only_strategies: whether that is all that a run of training does.
        notes: what is taken otherwise than the file says, and why.
        unused: keys of the file that mean nothing here.
    """

    file: str
    name: str
    model: Model
    parallelism: Parallelism
    batch: Batch
    training: Training
    memory_limit: int | None
    dataset: str
    strategy_file: str
    only_strategies: bool
    notes: tuple[str, ...]
    unused: tuple[str, ...]

    def check_devices(self, devices: int) -> None:
        """Raises: ConfigError: the numbers of the file do not fit so many devices."""
        check_devices(self.parallelism, self.model.sizes, devices, self.file)


def has_this_shape(content: Any) -> bool:
    """Whether the content of a YAML file is of the MindFormers shape."""
    return isinstance(content, Mapping) and any(mark in content for mark in _MARKS)


def language_run(content: Mapping[str, Any], file: str = "config") -> LanguageRun:
    """The run that the content of a file describes; `file` is its name in errors.

    Raises:
        ConfigError: a key that is missing, of a wrong kind, or contradicts another.
    """
    keys, notes = Keys(content, "", file), list[str]()
    made, ways = model(keys, notes), parallelism(keys, notes)
    check_parallelism(keys, ways, made.sizes)
    made = _attending(made, ways, notes)
    strategy_file = _strategy_file(keys)
    if strategy_file:
        notes.append(f"{strategy_file} is written as JSON, the strategies of the plan")
    found = LanguageRun(
        file=file,
        name=keys.section("trainer").text("model_name", made.sizes.family),
        model=made,
        parallelism=ways,
        batch=batch(keys, ways, notes),
        training=training(keys),
        memory_limit=keys.section("context").size("max_device_memory"),
        dataset=keys.section("train_dataset").section("data_loader").text("dataset_dir"),
        strategy_file=strategy_file,
        only_strategies=_only_strategies(keys, strategy_file),
        notes=tuple(notes),
        unused=(),
    )
    return replace(found, unused=tuple(keys.unread()))


def _attending(made: Model, ways: Parallelism, notes: list[str]) -> Model:
    """The model with attention that can be divided among the parts of the sequence: by its heads,
    else by its queries, which needs the mask as a tensor."""
    parts = ways.context_parallel * ways.model_parallel
    heads = made.sizes.num_kv_heads
    if ways.context_parallel == 1 or made.attention != "fused" or heads % parts == 0:
        return made
    notes.append(
        f"attention is masked, not fused: {heads} heads of keys and values cannot be divided among"
        f" context_parallel {ways.context_parallel} · model_parallel {ways.model_parallel}"
    )
    return replace(made, attention="masked")


def _strategy_file(keys: Keys) -> str:
    parallel = keys.section("parallel")
    config = parallel.section("strategy_ckpt_config")
    said = [parallel.text("strategy_ckpt_save_file"), config.text("save_file")]
    if all(said) and said[0] != said[1]:
        raise config.error("save_file", f"{said[1]}, but strategy_ckpt_save_file says {said[0]}")
    return said[0] or said[1]


def _only_strategies(keys: Keys, strategy_file: str) -> bool:
    only = keys.flag("only_save_strategy", False)
    if only and not strategy_file:
        raise keys.error(
            "only_save_strategy", "True needs parallel.strategy_ckpt_save_file: where to"
        )
    return only
