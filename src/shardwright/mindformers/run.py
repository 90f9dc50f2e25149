"""Read a MindFormers configuration file, and check its sections against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from shardwright.core.constraints.parse import divisors_text
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.errors import ConfigError
from shardwright.mindformers.all_errors import AllErrors
from shardwright.mindformers.keys import Keys
from shardwright.mindformers.model import MindFormersModel, read_model
from shardwright.mindformers.parallelism import Parallelism, read_parallelism
from shardwright.mindformers.training import Batch, Training, read_batch, read_training
from shardwright.mindformers.transformers_model import (
    has_transformers_keys,
    read_transformers_model,
)
from shardwright.models.sizes import Dimensions


@dataclass(frozen=True)
class LanguageRun:
    """The content of a MindFormers file: language model, training and parallelism.

    Args:
        file: name of the file, the prefix of each error message.
        name: name of the model, for messages and tables.
        layers: number of blocks in each pipeline stage; with `pp_interleave_num`, in each chunk,
            chunks in model order.
        memory_limit: memory limit in bytes per device; None for all of the device's memory.
        dataset: folder or file of the training data; empty if not set.
        strategy_file: path of the file for the strategies of the plan; empty to save none.
        graphs_folder: folder for the texts of graph, plan and program; empty to save none.
        only_strategies: whether the run only saves its strategies, without training.
        notes: settings that differ from the file, with reasons.
        unused: keys of the file that have no effect.
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
    graphs_folder: str
    only_strategies: bool
    notes: tuple[str, ...]
    unused: tuple[str, ...]

    def check_devices(self, devices: int) -> None:
        """Raise ConfigError if the parallel degrees do not multiply to `devices`."""
        check_devices(self.parallelism, self.model.sizes, devices, self.file)


def language_run(content: Mapping[str, Any], file: str = "config") -> LanguageRun:
    """Parse a MindFormers file.

    Args:
        content: the parsed YAML.
        file: name of the file, for error messages.

    Raises:
        ConfigError: if a key is missing, has the wrong type, or contradicts another; one error for
            all keys of the file.
    """
    keys, notes = Keys(content, "", file), list[str]()
    errors = AllErrors(keys)
    read_sizes = read_transformers_model if has_transformers_keys(keys) else read_model
    # Each section is read even if another has an error, so that one run reports all.
    model = errors.read(lambda: read_sizes(keys, notes))
    parallelism = errors.read(lambda: read_parallelism(keys, notes))
    layers = errors.read(
        lambda: check_parallelism(keys, parallelism, model.sizes) if model and parallelism else None
    )
    # After an error, as if there were one stage, so that errors in other sections are reported.
    stages = parallelism.stages if parallelism else 1
    chunks = len(layers) // stages if layers else 1
    batch = errors.read(lambda: read_batch(keys, parallelism, notes) if parallelism else None)
    training = errors.read(lambda: read_training(keys, stages, chunks, notes))
    strategy_file = errors.read(lambda: _read_strategy_output_file(keys)) or ""
    graphs_folder = errors.read(lambda: _read_graphs_folder(keys.section("context"))) or ""
    only_saves = errors.read(lambda: _read_only_save_strategy(keys, strategy_file))
    memory_limit = errors.read(lambda: keys.section("context").size("max_device_memory"))
    dataset = errors.read(lambda: _read_dataset(keys))
    errors.raise_errors()
    assert model and parallelism and layers and batch and training
    if strategy_file:
        notes.append(f"{strategy_file}: strategies of the plan are written as JSON")
    run = LanguageRun(
        file=file,
        name=keys.section("trainer").string("model_name", model.sizes.family),
        model=model,
        parallelism=parallelism,
        batch=batch,
        training=training,
        layers=layers,
        memory_limit=memory_limit,
        dataset=dataset or "",
        strategy_file=strategy_file,
        graphs_folder=graphs_folder,
        only_strategies=bool(only_saves),
        notes=tuple(notes),
        unused=(),
    )
    # Last, when everything has been read.
    return replace(run, unused=tuple(keys.unread()))


def _read_dataset(keys: Keys) -> str:
    return keys.section("train_dataset").section("data_loader").string("dataset_dir")


def _read_strategy_output_file(keys: Keys) -> str:
    parallel = keys.section("parallel")
    config = parallel.section("strategy_ckpt_config")
    files = [parallel.string("strategy_ckpt_save_file"), config.string("save_file")]
    if all(files) and files[0] != files[1]:
        raise config.error(
            "save_file",
            f"{files[1]} conflicts with strategy_ckpt_save_file {files[0]}\nremove one of the keys",
        )
    return files[0] or files[1]


def _read_graphs_folder(context: Keys) -> str:
    """Return the folder for graphs; empty if `save_graphs` is False or 0."""
    folder = context.string("save_graphs_path", "graphs")
    # MindSpore's levels 1, 2 and 3 differ in how many of its own texts are written.
    # Not a bool, which is an int in Python: True and False are flags.
    is_level = type(context.any("save_graphs")) is int
    saves = context.integer("save_graphs", minimum=0) if is_level else None
    return folder if saves or (saves is None and context.flag("save_graphs", False)) else ""


def _read_only_save_strategy(keys: Keys, strategy_file: str) -> bool:
    only_saves = keys.flag("only_save_strategy", False)
    if only_saves and not strategy_file:
        raise keys.error(
            "only_save_strategy",
            "True needs the path of the file to write\nset `parallel.strategy_ckpt_save_file`",
        )
    return only_saves


def check_parallelism(keys: Keys, parallelism: Parallelism, sizes: Dimensions) -> tuple[int, ...]:
    """Check the parallel degrees against each other and the model.

    Args:
        keys: all keys of the file.
        parallelism: parallel degrees of the file.
        sizes: dimensions of the model.

    Returns:
        The number of blocks in each stage, or in each chunk.

    Raises:
        ConfigError: if a degree does not divide the dimension that it shards.
    """
    config = keys.section("parallel_config")
    _check_num_stages(config, parallelism, sizes)
    # In a search, degrees shard nothing that could be indivisible.
    if parallelism.shards_by_degrees:
        _check_tensor_parallel(config, parallelism, sizes)
        _check_sequence_sharding(config, parallelism, sizes)
    return _read_layers_per_chunk(keys, parallelism, sizes.num_layers)


def check_devices(parallelism: Parallelism, sizes: Dimensions, devices: int, file: str) -> None:
    """Check that the parallel degrees fit the number of devices.

    Raises:
        ConfigError: if the degrees do not multiply to `devices`, or `devices` is not a multiple of
            the number of stages.
    """
    section_path = f"{file}: parallel_config"
    # In a search, the degrees do not decide the number of devices.
    if parallelism.shards_by_degrees and parallelism.devices != devices:
        raise ConfigError(
            f"{section_path}: data_parallel {parallelism.data_parallel} · model_parallel"
            f" {parallelism.model_parallel} · context_parallel {parallelism.context_parallel} ·"
            f" pipeline_stage {parallelism.stages} = {parallelism.devices}, but there are {devices}"
            f" devices\nuse {parallelism.devices} devices, or degrees whose product is {devices}"
        )
    # With `auto_pipeline`, the planner chooses another number.
    if devices % parallelism.stages and not parallelism.auto_pipeline:
        max_stages = min(parallelism.micro_batch_num, sizes.num_layers)
        raise ConfigError(
            f"{section_path}.pipeline_stage: {parallelism.stages} stages cannot share"
            f" {devices} devices equally\n"
            f"use one of {divisors_text(devices, max_stages)}, or set `auto_pipeline: True`"
        )


def _check_num_stages(config: Keys, parallelism: Parallelism, sizes: Dimensions) -> None:
    if parallelism.stages > sizes.num_layers:
        layers = sizes.num_layers
        raise config.error(
            "pipeline_stage",
            f"{parallelism.stages} stages are more than the {layers} layers\nuse at most {layers}",
        )
    if parallelism.stages > parallelism.micro_batch_num:
        raise config.error(
            "micro_batch_num",
            f"fewer micro-batches than {parallelism.stages} pipeline stages\n"
            f"set it to at least {parallelism.stages}",
        )


def _read_layers_per_chunk(keys: Keys, parallelism: Parallelism, layers: int) -> tuple[int, ...]:
    """Return the number of transformer blocks in each pipeline chunk, in model order.

    A stage has one chunk, or `pp_interleave_num` chunks with an interleaved schedule. With the key
    `offset`, each chunk has layers // chunks blocks plus its offset; without the key, the remainder
    of the division is spread over the chunks.
    """
    config, stages = keys.section("model").section("model_config"), parallelism.stages
    # Blocks of multi-token prediction, which are not built, are the last ones.
    further = config.integer("mtp_depth", 0, minimum=0)
    interleave = config.integer("pp_interleave_num", 1)
    if parallelism.schedule != "interleaved_1f1b" or not parallelism.shards_by_degrees:
        # In all other cases the planner assigns blocks to chunks.
        interleave = 1
    chunks = stages * interleave
    if chunks > layers:
        raise config.error(
            "pp_interleave_num",
            f"{stages} stages of {interleave} chunks are more than the {layers} layers\nuse at most"
            f" {layers // stages}",
        )
    offset = config.any("offset") if parallelism.shards_by_degrees else None
    if offset in (None, 0):
        # Sizes differ by at most one block, as in `expert_stages`.
        chunk_of_layer = [layer * chunks // layers for layer in range(layers)]
        return tuple(chunk_of_layer.count(chunk) for chunk in range(chunks))
    if SCHEDULES[parallelism.schedule].allows_several_chunks and interleave == 1:
        # Without it, the planner assigns chunks of equal numbers of layers.
        reason = "chunks of interleaved schedules have equal numbers of layers"
        remedy = "set it to 0"
        if parallelism.schedule == "interleaved_1f1b":
            remedy += ", or `pp_interleave_num` to the number of chunks of a stage"
        raise config.error("offset", f"{offset} is not supported, because {reason}\n{remedy}")
    layers_per_chunk, remainder = divmod(layers + further, chunks)
    offsets = _expand_chunk_offsets(offset, stages, interleave)
    # Every chunk must keep at least one layer.
    if offsets is None or sum(offsets) != remainder or min(offsets) <= -layers_per_chunk:
        lists = f"{interleave} lists of {stages} numbers" if interleave > 1 else f"{stages} numbers"
        divisions = f"{stages} stages" + (f" of {interleave} chunks" if interleave > 1 else "")
        raise config.error(
            "offset",
            f"{offset} does not divide {layers + further} layers over {divisions}\nuse {lists} that"
            f" add up to {remainder}",
        )
    blocks = [layers_per_chunk + each for each in offsets]
    if blocks[-1] <= further:
        raise config.error(
            "offset",
            f"the last stage has only the layers of `mtp_depth` {further}, which are not built\nset"
            f" it to a list whose last stage has more than {further} layers",
        )
    return (*blocks[:-1], blocks[-1] - further)


def _expand_chunk_offsets(offset: Any, stages: int, chunks_per_stage: int) -> list[int] | None:
    """Expand MindFormers' `offset` to the number of extra blocks of each chunk, in model order.

    Args:
        offset: a number for all chunks, a list with a number for each stage, or a list of such
            lists for each chunk of a stage.
        stages: number of pipeline stages.
        chunks_per_stage: number of chunks of each stage (`pp_interleave_num`).

    Returns:
        The extra blocks of each chunk, possibly negative; None if there are not as many integers
        as chunks.
    """
    # One number stands for all stages, and one list of numbers for every chunk.
    row = offset if isinstance(offset, list) else [offset] * stages
    is_nested = all(isinstance(each, list) for each in row)
    rows = row if is_nested else [row] * chunks_per_stage
    fits = len(rows) == chunks_per_stage and all(len(each) == stages for each in rows)
    offsets = [each for row in rows for each in row]
    # `type` instead of `isinstance`, because a bool is an int.
    return offsets if fits and all(type(each) is int for each in offsets) else None


def _check_tensor_parallel(config: Keys, parallelism: Parallelism, sizes: Dimensions) -> None:
    # Experts may be sharded over the devices of all three.
    degrees = (
        parallelism.data_parallel,
        parallelism.context_parallel,
        parallelism.model_parallel,
    )
    for name, size in (
        ("data_parallel · context_parallel · model_parallel", prod(degrees)),
        ("expert_num", sizes.num_experts),
    ):
        if size % parallelism.expert_parallel:
            raise config.error(
                "expert_parallel",
                f"{parallelism.expert_parallel} does not divide {name} {size}\nuse a divisor of "
                f"{size}",
            )
    # These families tie the output layer to the embedding, which `vocab_emb_dp` replicates.
    replicated_head = parallelism.vocab_emb_dp and sizes.family in ("pangualpha", "gpt")
    sharded_sizes = {
        "num_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_kv_heads,
        "the feed-forward width": sizes.intermediate_size,
        **({} if replicated_head else {"vocab_size": sizes.vocab_size}),
    }
    degree = parallelism.model_parallel
    for name, size in sharded_sizes.items():
        if size % degree:
            # The degree must divide all sizes, and so their greatest common divisor.
            common = gcd(*sharded_sizes.values())
            raise config.error(
                "model_parallel",
                f"{name} {size} is not divisible by {degree}\nuse one of"
                f" {divisors_text(common, common)}",
            )


def _check_sequence_sharding(config: Keys, parallelism: Parallelism, sizes: Dimensions) -> None:
    seq_length, degree = sizes.seq_length, parallelism.context_parallel
    if seq_length % degree:
        raise config.error(
            "context_parallel",
            f"seq_length {seq_length} is not divisible by {degree}\nuse one of"
            f" {divisors_text(seq_length, 64)}",
        )
    if parallelism.seq_parallel and seq_length % (degree * parallelism.model_parallel):
        raise config.error(
            "use_seq_parallel",
            f"seq_length {seq_length} is not divisible by context_parallel {degree} · "
            f"model_parallel {parallelism.model_parallel}\nset it to False, or change `seq_length`",
        )
