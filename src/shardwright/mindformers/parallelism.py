"""Read `use_parallel`, `parallel` and `parallel_config` of a MindFormers file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.errors import ConfigError
from shardwright.mindformers.keys import Keys

# MindFormers' numbers, and MindSpore's names.
_MODES: Mapping[str, str] = {
    "0": "data_parallel",
    "data_parallel": "data_parallel",
    "1": "semi_auto",
    "semi_auto_parallel": "semi_auto",
    "2": "auto",
    "auto_parallel": "auto",
}
_SEARCHES = ("recursive_programming", "dynamic_programming", "sharding_propagation")
_SCHEDULES = ("1f1b", "gpipe", "zero_bubble_v", "seqpipe")
SEARCH_MODES = ("recursive_programming", "sharding_propagation")
"""Modes in which a search decides how operators are sharded."""

WITHOUT_OPERATOR_PARALLEL = ("stand_alone", "data_parallel")
"""Modes in which operators are sharded along the batch dimension only."""


@dataclass(frozen=True)
class Parallelism:
    """Parallel degrees and options of a MindFormers file.

    Args:
        mode: `stand_alone`, `data_parallel`, `semi_auto` (Megatron-style degrees, or a strategy
            file), or one of `SEARCH_MODES`.
        mem_coeff: weight of memory relative to communication in the search; `auto` for the smallest
            value with which the plan fits into memory.
        data_parallel, model_parallel, context_parallel: degrees of data, tensor and context
            parallelism. In a search, only `data_parallel` has an effect, on the batch size.
        expert_parallel: degree of expert parallelism, a divisor of the product of these degrees.
        stages: number of pipeline stages; with `auto_pipeline`, the requested number.
        micro_batch_num: number of micro-batches.
        schedule: pipeline schedule.
        auto_pipeline: True to choose the number of stages, False to only suggest one, None (key
            missing) to do neither.
        full_batch: whether every device gets the global batch, not its own shard.
        seq_parallel: Megatron's sequence parallelism: norms and residuals sharded along the
            sequence.
        vocab_emb_dp: whether the token embedding is replicated instead of sharded.
        sharding: ZeRO / FSDP sharding of parameters and optimizer state.
        strategies: path of the strategy file to load; empty if not set.
        cluster: the cluster to plan for, a key that MindFormers does not have; empty if not set.
    """

    mode: str
    mem_coeff: float | str = 0.1
    data_parallel: int = 1
    model_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    stages: int = 1
    micro_batch_num: int = 1
    schedule: str = "1f1b"
    auto_pipeline: bool | None = None
    full_batch: bool = False
    seq_parallel: bool = False
    vocab_emb_dp: bool = False
    sharding: OptimizerParallel | None = None
    strategies: str = ""
    cluster: str = ""

    @property
    def shards_by_degrees(self) -> bool:
        """Whether the parallel degrees determine all shardings, directly or by propagation."""
        return self.mode in ("semi_auto", "sharding_propagation") and not self.strategies

    @property
    def devices(self) -> int:
        """Number of devices of a `semi_auto` configuration: the product of its degrees."""
        devices_per_stage = self.data_parallel * self.model_parallel * self.context_parallel
        return devices_per_stage * self.stages

    @property
    def pipelined(self) -> bool:
        """Whether there are several pipeline stages, or the planner may choose several."""
        # A stage needs a micro-batch of its own, so one micro-batch means one stage.
        return self.stages > 1 or (bool(self.auto_pipeline) and self.micro_batch_num > 1)

    @property
    def max_stages(self) -> int:
        """Largest number of stages for `auto_pipeline`: one micro-batch per stage."""
        return self.micro_batch_num


def read_parallelism(keys: Keys, notes: list[str]) -> Parallelism:
    """Read the sections `parallel` and `parallel_config`.

    Args:
        keys: all keys of the file.
        notes: receives a note for each key that the mode overrides.

    Raises:
        ConfigError: if the mode or search is not supported, or a degree is not positive.
    """
    parallel, config = keys.section("parallel"), keys.section("parallel_config")
    parallelism = Parallelism(
        mode=_read_parallel_mode(keys, parallel),
        mem_coeff=_read_mem_coeff(config),
        data_parallel=config.integer("data_parallel", 1),
        model_parallel=config.integer("model_parallel", 1),
        context_parallel=config.integer("context_parallel", 1),
        expert_parallel=config.integer("expert_parallel", 1),
        stages=config.integer("pipeline_stage", 1),
        micro_batch_num=config.integer("micro_batch_num", 1),
        schedule=_read_pipeline_schedule(parallel.section("pipeline_config"), keys, notes),
        auto_pipeline=_read_auto_pipeline(parallel),
        full_batch=parallel.flag("full_batch", False),
        seq_parallel=config.flag("use_seq_parallel", False),
        vocab_emb_dp=config.flag("vocab_emb_dp", True),
        sharding=_read_zero_options(parallel),
        strategies=_read_strategy_input_file(keys, parallel),
        cluster=parallel.string("cluster"),
    )
    parallelism = _override_options_for_mode(parallelism, config.has("vocab_emb_dp"), notes)
    return _override_shard_size(parallelism, notes)


def _read_auto_pipeline(parallel: Keys) -> bool | None:
    return parallel.flag("auto_pipeline", False) if parallel.has("auto_pipeline") else None


def _read_parallel_mode(keys: Keys, parallel: Keys) -> str:
    parallel_mode = parallel.any("parallel_mode")
    parallel_mode = 0 if parallel_mode is None else parallel_mode
    # A bool is an int in Python: `parallel_mode: True` must not mean 1.
    if isinstance(parallel_mode, bool) or str(parallel_mode) not in _MODES:
        hybrid = " (hybrid parallel)" if str(parallel_mode) == "3" else ""
        raise parallel.error(
            "parallel_mode",
            f"{parallel_mode!r}{hybrid} is not supported\n"
            "use 0 (data parallel), 1 (semi-auto) or 2 (auto)",
        )
    # In every mode, so that mistakes are reported and the key never counts as unused.
    search = _read_search_mode(parallel)
    if not keys.flag("use_parallel", False):
        return "stand_alone"
    mode = _MODES[str(parallel_mode)]
    return search if mode == "auto" else mode


def _read_search_mode(parallel: Keys) -> str:
    """Read `search_mode`, or its deprecated name `auto_parallel_search_mode`.

    Replaces dynamic programming, which is not implemented here, by the recursive search.
    """
    names = ("search_mode", "auto_parallel_search_mode")
    searches = [parallel.string(name, valid=_SEARCHES) for name in names]
    if all(searches) and searches[0] != searches[1]:
        raise parallel.error(
            names[0],
            f"{searches[0]} conflicts with its old name {names[1]}: {searches[1]}\nremove one key",
        )
    search = searches[0] or searches[1] or "recursive_programming"
    return "recursive_programming" if search == "dynamic_programming" else search


def _read_mem_coeff(config: Keys) -> float | str:
    value = config.any("mem_coeff")
    if value == "auto":
        return "auto"
    try:
        return config.number("mem_coeff", 0.1, above=0)
    except ConfigError:
        raise config.error(
            "mem_coeff", f"{value!r} is neither a positive number nor 'auto'\nset it to 'auto'"
        ) from None


def _read_pipeline_schedule(config: Keys, keys: Keys, notes: list[str]) -> str:
    schedule = config.string("pipeline_scheduler", "1f1b", valid=_SCHEDULES)
    interleaves = config.flag("pipeline_interleave", False)
    if schedule == "seqpipe":
        seq_split_num = keys.section("parallel_config").integer("seq_split_num", 1)
        model = keys.section("model").section("model_config")
        # With `seqpipe`, MindFormers sets `pipeline_interleave` also without several chunks.
        interleaves = interleaves and model.integer("pp_interleave_num", 1) > 1
        schedule = "1f1b"
        notes.append(
            f"pipeline_scheduler is {'interleaved_1f1b' if interleaves else '1f1b'}, not seqpipe:"
            f" sequences are not divided into seq_split_num {seq_split_num} parts, so activations"
            " take more memory"
        )
    if not interleaves:
        return schedule
    if schedule == "gpipe":
        raise config.error(
            "pipeline_interleave",
            "True is not supported with gpipe\nset `pipeline_scheduler: 1f1b`",
        )
    # `zero_bubble_v` always has two chunks per stage.
    return "interleaved_1f1b" if schedule == "1f1b" else schedule


def _read_strategy_input_file(keys: Keys, parallel: Keys) -> str:
    """Read the path of the strategy file to load; empty if not set."""
    file, mode = parallel.string("strategy_ckpt_load_file"), _read_parallel_mode(keys, parallel)
    if file and mode in WITHOUT_OPERATOR_PARALLEL:
        raise parallel.error(
            "strategy_ckpt_load_file",
            f"the mode is {mode}, which does not use strategies\nset `use_parallel: True` and"
            " `parallel_mode: 1` or `2`",
        )
    return file


def _read_zero_options(parallel: Keys) -> OptimizerParallel | None:
    """Read the ZeRO options `parallel_optimizer_config`; None if ZeRO is not enabled."""
    config = parallel.section("parallel_optimizer_config")
    size = config.integer("optimizer_weight_shard_size", -1, minimum=-1)
    if size == 0:
        raise config.error(
            "optimizer_weight_shard_size",
            "cannot shard over 0 devices\nuse at least 1, or -1 for all",
        )
    # Sharded gradient accumulation is ZeRO stage 2.
    level = "level2" if config.flag("gradient_accumulation_shard", False) else "level1"
    # In KB; 64 is MindSpore's default.
    threshold = config.integer("parallel_optimizer_threshold", 64, minimum=0)
    # Returns only here, so that the keys of the section count as read.
    if not parallel.flag("enable_parallel_optimizer", False):
        return None
    return OptimizerParallel(level, size, threshold)


def _override_options_for_mode(
    parallelism: Parallelism, sets_vocab_emb_dp: bool, notes: list[str]
) -> Parallelism:
    """Override options that the mode excludes, as MindFormers does.

    Args:
        sets_vocab_emb_dp: whether the file has the key `vocab_emb_dp`.
        notes: receives a note for each overridden option.
    """
    mode = parallelism.mode
    if mode in WITHOUT_OPERATOR_PARALLEL:
        excluded = {
            "full_batch": (parallelism.full_batch, False),
            "model_parallel": (parallelism.model_parallel, 1),
            "context_parallel": (parallelism.context_parallel, 1),
            "expert_parallel": (parallelism.expert_parallel, 1),
            "stages": (parallelism.stages, 1),
            "micro_batch_num": (parallelism.micro_batch_num, 1),
        }
        for name, (requested, effective) in excluded.items():
            if requested != effective:
                key = "pipeline_stage" if name == "stages" else name
                notes.append(f"{key} is {effective}, not {requested}: the mode is {mode}")
        changes = {name: effective for name, (_, effective) in excluded.items()}
        # Without a note for `data_parallel`: in these modes every device is a replica.
        parallelism = replace(parallelism, data_parallel=1, **changes)  # type: ignore[arg-type]
    # Only a search that shards operators by itself chooses the stages too.
    if parallelism.auto_pipeline is not None and (
        mode not in SEARCH_MODES or parallelism.shards_by_degrees
    ):
        if parallelism.auto_pipeline:
            notes.append(f"auto_pipeline is False: the mode is {mode}")
        parallelism = replace(parallelism, auto_pipeline=None)
    stages = parallelism.stages
    if parallelism.vocab_emb_dp and (stages > 1 or mode in SEARCH_MODES):
        # The default is True, so only a value in the file is worth a note.
        if sets_vocab_emb_dp:
            reason = f"pipeline_stage is {stages}" if stages > 1 else f"the mode is {mode}"
            notes.append(f"vocab_emb_dp is False: {reason}")
        parallelism = replace(parallelism, vocab_emb_dp=False)
    return parallelism


def _override_shard_size(parallelism: Parallelism, notes: list[str]) -> Parallelism:
    """Ignore `optimizer_weight_shard_size` if it does not divide the number of replicas, as in
    MindSpore."""
    sharding, replicas = parallelism.sharding, parallelism.data_parallel
    # In a search, degrees do not decide the number of replicas.
    if sharding is None or not parallelism.shards_by_degrees or sharding.shard_size < 0:
        return parallelism
    if replicas % sharding.shard_size == 0:
        return parallelism
    notes.append(
        f"optimizer_weight_shard_size {sharding.shard_size} has no effect: it does not divide"
        f" data_parallel {replicas}"
    )
    return replace(parallelism, sharding=replace(sharding, shard_size=-1))
