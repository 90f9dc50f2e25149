"""A MindFormers configuration file, read and checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from shardwright.core.constraints.parse import divisors
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.errors import ConfigError
from shardwright.mindformers.keys import Keys
from shardwright.mindformers.model import MindFormersModel, read_model
from shardwright.mindformers.parallelism import Parallelism, read_parallelism
from shardwright.mindformers.training import Batch, Training, read_batch, read_training
from shardwright.models.sizes import Dimensions


@dataclass(frozen=True)
class LanguageRun:
    """A language model, how it is trained, and how that is divided.

    Args:
        file: its name, which every error starts with.
        name: of the model, for people.
        layers: blocks of each stage, where an expert divides them.
        memory_limit: bytes that a device may use, None for what it has.
        dataset: the folder or file of the training data, empty for none.
        strategy_file: where the strategies of a plan are saved.
        only_strategies: whether training ends after saving them.
        notes: what differs from the file, and why.
        unused: keys of the file that have no effect here.
    """

    file: str
    name: str
    model: MindFormersModel
    parallelism: Parallelism
    batch: Batch
    training: Training
    layers: tuple[int, ...]
    memory_limit: int | None
    dataset: str
    strategy_file: str
    only_strategies: bool
    notes: tuple[str, ...]
    unused: tuple[str, ...]

    def check_devices(self, devices: int) -> None:
        """Raises: ConfigError: the numbers of the file do not fit `devices`."""
        check_devices(self.parallelism, self.model.sizes, devices, self.file)


def language_run(content: Mapping[str, Any], file: str = "config") -> LanguageRun:
    """The run that the content of a file describes; `file` is its name in errors.

    Raises:
        ConfigError: a key that is missing, of a wrong kind, or contradicts another.
    """
    keys, notes = Keys(content, "", file), list[str]()
    model, parallelism = read_model(keys, notes), read_parallelism(keys, notes)
    layers = check_parallelism(keys, parallelism, model.sizes)
    strategy_file = _strategy_file(keys)
    if strategy_file:
        notes.append(f"{strategy_file} is written as JSON, the strategies of the plan")
    run = LanguageRun(
        file=file,
        name=keys.section("trainer").text("model_name", model.sizes.family),
        model=model,
        parallelism=parallelism,
        batch=read_batch(keys, parallelism, notes),
        training=read_training(keys, parallelism.stages, notes),
        layers=layers,
        memory_limit=keys.section("context").size("max_device_memory"),
        dataset=keys.section("train_dataset").section("data_loader").text("dataset_dir"),
        strategy_file=strategy_file,
        only_strategies=_only_strategies(keys, strategy_file),
        notes=tuple(notes),
        unused=(),
    )
    return replace(run, unused=tuple(keys.unread()))


def _strategy_file(keys: Keys) -> str:
    parallel = keys.section("parallel")
    config = parallel.section("strategy_ckpt_config")
    files = [parallel.text("strategy_ckpt_save_file"), config.text("save_file")]
    if all(files) and files[0] != files[1]:
        raise config.error("save_file", f"{files[1]}, but strategy_ckpt_save_file says {files[0]}")
    return files[0] or files[1]


def _only_strategies(keys: Keys, strategy_file: str) -> bool:
    only = keys.flag("only_save_strategy", False)
    if only and not strategy_file:
        raise keys.error(
            "only_save_strategy", "True needs parallel.strategy_ckpt_save_file: the file to write"
        )
    return only


def check_parallelism(keys: Keys, parallelism: Parallelism, sizes: Dimensions) -> tuple[int, ...]:
    """The blocks of each stage.

    Raises:
        ConfigError: the numbers do not fit each other, or the model.
    """
    config = keys.section("parallel_config")
    _check_stages(config, parallelism, sizes)
    if parallelism.by_numbers:
        _check_shards(keys, parallelism)
        _check_parts(config, parallelism, sizes)
        _check_sequence(config, parallelism, sizes)
    return _layers_of_stages(keys, parallelism, sizes.num_layers)


def check_devices(parallelism: Parallelism, sizes: Dimensions, devices: int, file: str) -> None:
    """Raises: ConfigError: the numbers do not make `devices`, or stages do not divide them."""
    where = f"{file}: parallel_config"
    if parallelism.by_numbers and parallelism.devices != devices:
        raise ConfigError(
            f"{where}: data_parallel {parallelism.data_parallel} · model_parallel"
            f" {parallelism.model_parallel} · context_parallel {parallelism.context_parallel} ·"
            f" pipeline_stage {parallelism.stages} = {parallelism.devices}, but there are {devices}"
            f" devices; valid are {parallelism.devices} devices, or numbers whose product is"
            f" {devices}"
        )
    if devices % parallelism.stages and not parallelism.auto_pipeline:
        most = min(parallelism.micro_batch_num, sizes.num_layers)
        raise ConfigError(
            f"{where}.pipeline_stage: {parallelism.stages} stages cannot share {devices} devices"
            f" equally; valid are {divisors(devices, most)}, or auto_pipeline: True"
        )


def _check_stages(config: Keys, parallelism: Parallelism, sizes: Dimensions) -> None:
    if parallelism.stages > sizes.num_layers:
        layers = sizes.num_layers
        raise config.error(
            "pipeline_stage",
            f"{parallelism.stages} is more than the {layers} layers; valid is {layers} at most",
        )
    if parallelism.stages > parallelism.micro_batch_num:
        raise config.error(
            "micro_batch_num",
            f"{parallelism.micro_batch_num} must be at least pipeline_stage {parallelism.stages}",
        )


def _layers_of_stages(keys: Keys, parallelism: Parallelism, layers: int) -> tuple[int, ...]:
    """Equally many in each stage, and `offset` more; what does not divide is spread evenly where
    there is no offset."""
    config, stages = keys.section("model").section("model_config"), parallelism.stages
    offset = config.any("offset") if parallelism.by_numbers else None
    if offset in (None, 0):
        places = [number * stages // layers for number in range(layers)]
        return tuple(places.count(stage) for stage in range(stages))
    numbers = offset if isinstance(offset, list) else [offset] * stages
    equal, left = divmod(layers, stages)
    whole = len(numbers) == stages and all(type(each) is int for each in numbers)
    if SCHEDULES[parallelism.schedule].chunked:
        parts = "parts of interleaved stages have equally many layers"
        raise config.error("offset", f"{offset} must be 0: {parts}")
    if not whole or sum(numbers) != left or min(numbers) <= -equal:
        valid = f"valid are {stages} numbers that add up to {left}"
        raise config.error(
            "offset", f"{offset} does not divide {layers} layers over {stages} stages; {valid}"
        )
    return tuple(equal + each for each in numbers)


def _check_shards(keys: Keys, parallelism: Parallelism) -> None:
    size, replicas = (
        parallelism.sharding.shard_size if parallelism.sharding else -1,
        parallelism.data_parallel,
    )
    if size > 0 and replicas % size:
        raise (
            keys.section("parallel")
            .section("parallel_optimizer_config")
            .error(
                "optimizer_weight_shard_size",
                f"{size} does not divide data_parallel {replicas}; valid are -1,"
                f" {divisors(replicas, replicas)}",
            )
        )


def _check_parts(config: Keys, parallelism: Parallelism, sizes: Dimensions) -> None:
    """What is cut by `model_parallel` must divide; a head that is tied to a whole table is not."""
    for name, size in (
        ("data_parallel", parallelism.data_parallel),
        ("expert_num", sizes.num_experts),
    ):
        if size % parallelism.expert_parallel:
            raise config.error(
                "expert_parallel",
                f"{parallelism.expert_parallel} must divide {name} {size}",
            )
    whole_head = parallelism.vocab_emb_dp and sizes.family in ("pangualpha", "gpt")
    cut = {
        "num_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_kv_heads,
        "the feed-forward width": sizes.intermediate_size,
        **({} if whole_head else {"vocab_size": sizes.vocab_size}),
    }
    parts = parallelism.model_parallel
    for name, size in cut.items():
        if size % parts:
            common = gcd(*cut.values())
            raise config.error(
                "model_parallel",
                f"{name} {size} cannot be divided by {parts}; valid are {divisors(common, common)}",
            )


def _check_sequence(config: Keys, parallelism: Parallelism, sizes: Dimensions) -> None:
    positions, parts = sizes.seq_length, parallelism.context_parallel
    if positions % parts:
        raise config.error(
            "context_parallel",
            f"seq_length {positions} cannot be divided by {parts}; valid are"
            f" {divisors(positions, 64)}",
        )
    if parallelism.seq_parallel and positions % (parts * parallelism.model_parallel):
        raise config.error(
            "use_seq_parallel",
            f"seq_length {positions} cannot be divided by context_parallel {parts} ·"
            f" model_parallel {parallelism.model_parallel}; valid is False, or another seq_length",
        )
