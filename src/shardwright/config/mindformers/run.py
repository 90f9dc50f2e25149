"""A configuration of the MindFormers shape, read and checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from shardwright.config.mindformers.keys import Keys
from shardwright.config.mindformers.model import MindFormersModel, model
from shardwright.config.mindformers.parallelism import Parallelism, parallelism
from shardwright.config.mindformers.training import Batch, Training, batch, training
from shardwright.constraints.parse import divisors
from shardwright.errors import ConfigError
from shardwright.models.sizes import Dimensions

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
    model: MindFormersModel
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


def is_mindformers(content: Any) -> bool:
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


def _attending(made: MindFormersModel, ways: Parallelism, notes: list[str]) -> MindFormersModel:
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


def check_parallelism(keys: Keys, ways: Parallelism, sizes: Dimensions) -> None:
    """Raises: ConfigError: the numbers do not fit each other, or the model."""
    config = keys.section("parallel_config")
    _check_stages(config, ways, sizes)
    if ways.by_numbers:
        _check_offset(keys, ways)
        _check_shards(keys, ways)
        _check_parts(config, ways, sizes)
        _check_sequence(config, ways, sizes)


def check_devices(ways: Parallelism, sizes: Dimensions, devices: int, file: str) -> None:
    """Raises: ConfigError: the numbers do not make `devices`, or stages do not divide them."""
    where = f"{file}: parallel_config"
    if ways.by_numbers and ways.devices != devices:
        raise ConfigError(
            f"{where}: data_parallel {ways.data_parallel} · model_parallel"
            f" {ways.model_parallel} · context_parallel {ways.context_parallel} ·"
            f" pipeline_stage {ways.stages} = {ways.devices}, but there are {devices} devices;"
            f" valid are {ways.devices} devices, or numbers whose product is {devices}"
        )
    if devices % ways.stages and not ways.auto_pipeline:
        raise ConfigError(
            f"{where}.pipeline_stage: {ways.stages} stages cannot share {devices} devices equally;"
            f" valid are {divisors(devices, min(ways.micro_batch_num, sizes.num_layers))}, or"
            " auto_pipeline: True"
        )


def _check_stages(config: Keys, ways: Parallelism, sizes: Dimensions) -> None:
    if ways.stages > sizes.num_layers:
        layers = sizes.num_layers
        raise config.error(
            "pipeline_stage",
            f"{ways.stages} is more than the {layers} layers; valid is {layers} at most",
        )
    if ways.stages > ways.micro_batch_num:
        raise config.error(
            "micro_batch_num",
            f"{ways.micro_batch_num} must be at least pipeline_stage {ways.stages}",
        )


def _check_offset(keys: Keys, ways: Parallelism) -> None:
    config = keys.section("model").section("model_config")
    offset = config.any("offset")
    if ways.stages > 1 and offset not in (None, 0) and offset != [0] * ways.stages:
        raise config.error(
            "offset", f"{offset} is not built: stages take equally many layers; valid is 0"
        )


def _check_shards(keys: Keys, ways: Parallelism) -> None:
    size, replicas = ways.sharding.shard_size if ways.sharding else -1, ways.data_parallel
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


def _check_parts(config: Keys, ways: Parallelism, sizes: Dimensions) -> None:
    """What is cut by `model_parallel` must divide; a head that is tied to a whole table is not."""
    whole_head = ways.vocab_emb_dp and sizes.family == "pangualpha"
    cut = {
        "num_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_kv_heads,
        "the feed-forward width": sizes.intermediate_size,
        **({} if whole_head else {"vocab_size": sizes.vocab_size}),
    }
    parts = ways.model_parallel
    for name, size in cut.items():
        if size % parts:
            common = gcd(*cut.values())
            raise config.error(
                "model_parallel",
                f"{name} {size} cannot be divided by {parts}; valid are {divisors(common, common)}",
            )


def _check_sequence(config: Keys, ways: Parallelism, sizes: Dimensions) -> None:
    positions, parts = sizes.seq_length, ways.context_parallel
    if positions % parts:
        raise config.error(
            "context_parallel",
            f"seq_length {positions} cannot be divided by {parts}; valid are"
            f" {divisors(positions, 64)}",
        )
    if ways.seq_parallel and positions % (parts * ways.model_parallel):
        raise config.error(
            "use_seq_parallel",
            f"seq_length {positions} cannot be divided by context_parallel {parts} ·"
            f" model_parallel {ways.model_parallel}; valid is False, or another seq_length",
        )
