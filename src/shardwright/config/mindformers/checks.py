"""Which numbers must fit each other, the model and the devices; every error says what would."""

from __future__ import annotations

from math import gcd

from shardwright.config.mindformers.keys import Keys
from shardwright.config.mindformers.parallelism import Parallelism
from shardwright.errors import ConfigError
from shardwright.models.dimensions import Dimensions
from shardwright.strategy.reading import divisors


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
