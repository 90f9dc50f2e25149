"""How the work is divided: `use_parallel`, `parallel` and `parallel_config`, with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.config.mindformers.keys import Keys
from shardwright.decided import OptimizerParallel
from shardwright.errors import ConfigError
from shardwright.models.dimensions import Dimensions

_MODES: Mapping[str, str] = {
    "0": "data_parallel",
    "data_parallel": "data_parallel",
    "1": "semi_auto",
    "semi_auto_parallel": "semi_auto",
    "2": "auto",
    "auto_parallel": "auto",
}
_SEARCHES = ("recursive_programming", "dynamic_programming", "sharding_propagation")
AUTO = ("recursive_programming", "sharding_propagation")
"""Modes in which a search decides the operators."""

WHOLE_OPERATORS = ("stand_alone", "data_parallel")
"""Modes in which every operator is computed whole, or on a part of the batch."""


@dataclass(frozen=True)
class Parallelism:
    """How a step is divided over devices.

    Args:
        mode: `stand_alone`, `data_parallel`, `semi_auto` (as `data_parallel`, `model_parallel` and
            `stages` say), or one of `AUTO`.
        mem_coeff: of the search; `auto` for the smallest that fits the memory.
        data_parallel, model_parallel, context_parallel: equal parts of the batch, of heads and
            widths, and of the sequence; where a search decides, only `data_parallel` counts, and
            only in the size of the batch.
        stages: pipeline stages; where `auto_pipeline` is on, the number that is asked for.
        auto_pipeline: whether their number is chosen; where the file says False, the number that
            would be chosen is suggested, and None, where it says nothing, neither.
        full_batch: whether every device is given the whole batch.
        seq_parallel: whether norms and residuals are cut along the sequence.
        vocab_emb_dp: whether the embedding table stays whole.
        sharding: of parameters and optimizer state.
    """

    mode: str
    mem_coeff: float | str = 0.1
    data_parallel: int = 1
    model_parallel: int = 1
    context_parallel: int = 1
    stages: int = 1
    micro_batch_num: int = 1
    auto_pipeline: bool | None = None
    full_batch: bool = False
    seq_parallel: bool = False
    vocab_emb_dp: bool = False
    sharding: OptimizerParallel | None = None

    @property
    def devices(self) -> int:
        """How many devices the numbers of a `semi_auto` configuration make."""
        ways = self.data_parallel * self.model_parallel * self.context_parallel
        return ways * self.stages

    @property
    def pipelined(self) -> bool:
        """Whether there are, or may be, several stages, and so micro-batches."""
        return self.stages > 1 or (bool(self.auto_pipeline) and self.micro_batch_num > 1)

    def most_stages(self, servers: int) -> int:
        """Up to how many stages `auto_pipeline` may choose, or suggest, on so many servers."""
        return min(max(self.stages, servers), self.micro_batch_num)

    def check_devices(self, devices: int) -> None:
        """Raises: ConfigError: the numbers do not make `devices`, or stages do not divide them."""
        if self.mode == "semi_auto" and self.devices != devices:
            raise ConfigError(
                f"parallel_config: data_parallel {self.data_parallel} · model_parallel"
                f" {self.model_parallel} · context_parallel {self.context_parallel} ·"
                f" pipeline_stage {self.stages} = {self.devices}, but there are {devices} devices"
            )
        if devices % self.stages and not self.auto_pipeline:
            valid = [n for n in range(1, self.micro_batch_num + 1) if devices % n == 0]
            raise ConfigError(
                f"parallel_config.pipeline_stage: {self.stages} stages cannot share {devices}"
                f" devices equally; valid are {', '.join(map(str, valid))}, or auto_pipeline: True"
            )


def parallelism(keys: Keys, sizes: Dimensions, notes: list[str]) -> Parallelism:
    """Reads and checks how `sizes` is divided; `notes` takes what is set right without asking.

    Raises:
        ConfigError: an unknown mode or search, numbers that are not positive or do not fit.
    """
    parallel, config = keys.section("parallel"), keys.section("parallel_config")
    found = Parallelism(
        mode=_mode(keys, parallel),
        mem_coeff=_mem_coeff(config),
        data_parallel=config.whole("data_parallel", 1),
        model_parallel=config.whole("model_parallel", 1),
        context_parallel=config.whole("context_parallel", 1),
        stages=config.whole("pipeline_stage", 1),
        micro_batch_num=config.whole("micro_batch_num", 1),
        auto_pipeline=_auto_pipeline(parallel),
        full_batch=parallel.flag("full_batch", False),
        seq_parallel=config.flag("use_seq_parallel", False),
        vocab_emb_dp=config.flag("vocab_emb_dp", True),
        sharding=_sharding(parallel),
    )
    _check_no_experts(keys, config)
    found = _set_right(found, config.has("vocab_emb_dp"), notes)
    _check_stages(config, found, sizes)
    if found.mode == "semi_auto":
        _check_parts(config, found, sizes)
    return found


def _auto_pipeline(parallel: Keys) -> bool | None:
    return parallel.flag("auto_pipeline", False) if parallel.has("auto_pipeline") else None


def _mode(keys: Keys, parallel: Keys) -> str:
    given = parallel.any("parallel_mode")
    given = 0 if given is None else given
    if isinstance(given, bool) or str(given) not in _MODES:
        raise parallel.error(
            "parallel_mode",
            f"{given!r} is not known; valid are 0 (data parallel), 1 (semi-auto), 2 (auto)",
        )
    search = _search(parallel)
    if not keys.flag("use_parallel", False):
        return "stand_alone"
    mode = _MODES[str(given)]
    return search if mode == "auto" else mode


def _search(parallel: Keys) -> str:
    """What `search_mode`, or its old name, says. Dynamic programming is what `sharding_propagation`
    replaced; here the recursive search takes its place."""
    names = ("search_mode", "auto_parallel_search_mode")
    said = [parallel.text(name, valid=_SEARCHES) for name in names]
    if all(said) and said[0] != said[1]:
        raise parallel.error(names[0], f"{said[0]}, but its old name {names[1]} says {said[1]}")
    search = said[0] or said[1] or "recursive_programming"
    return "recursive_programming" if search == "dynamic_programming" else search


def _mem_coeff(config: Keys) -> float | str:
    if config.any("mem_coeff") == "auto":
        return "auto"
    coefficient = config.number("mem_coeff", 0.1)
    if not coefficient > 0:
        raise config.error("mem_coeff", f"{coefficient:g} must be a positive number, or auto")
    return coefficient


def _sharding(parallel: Keys) -> OptimizerParallel | None:
    """Gradients are sharded too where their accumulation is."""
    config = parallel.section("parallel_optimizer_config")
    size = config.whole("optimizer_weight_shard_size", -1, least=-1)
    if size == 0:
        raise config.error("optimizer_weight_shard_size", "0 must be -1 (as many as go) or more")
    level = "level2" if config.flag("gradient_accumulation_shard", False) else "level1"
    threshold = config.whole("parallel_optimizer_threshold", 64, least=0)
    if not parallel.flag("enable_parallel_optimizer", False):
        return None
    return OptimizerParallel(level, size, threshold)


def _check_no_experts(keys: Keys, config: Keys) -> None:
    moe = keys.section("moe_config")
    if moe.whole("expert_num", 1) > 1 or config.whole("expert_parallel", 1) > 1:
        raise keys.error("moe_config", "models with several experts are not built here")


def _set_right(found: Parallelism, vocab_is_said: bool, notes: list[str]) -> Parallelism:
    """What the modes exclude, set as the original sets it, with a note where it was said."""
    if found.mode in WHOLE_OPERATORS:
        excluded = {
            "full_batch": (found.full_batch, False),
            "model_parallel": (found.model_parallel, 1),
            "context_parallel": (found.context_parallel, 1),
            "stages": (found.stages, 1),
            "micro_batch_num": (found.micro_batch_num, 1),
        }
        for name, (given, taken) in excluded.items():
            if given != taken:
                key = "pipeline_stage" if name == "stages" else name
                notes.append(f"{key} is {taken}, not {given}: the mode is {found.mode}")
        taken_all = {name: taken for name, (_, taken) in excluded.items()}
        found = replace(found, data_parallel=1, **taken_all)  # type: ignore[arg-type]
    if found.auto_pipeline is not None and found.mode not in AUTO:
        if found.auto_pipeline:
            notes.append(f"auto_pipeline is False: the mode is {found.mode}")
        found = replace(found, auto_pipeline=None)
    if found.vocab_emb_dp and (found.stages > 1 or found.mode in AUTO):
        if vocab_is_said:
            why = f"pipeline_stage is {found.stages}" if found.stages > 1 else "a search decides"
            notes.append(f"vocab_emb_dp is False: {why}")
        found = replace(found, vocab_emb_dp=False)
    return found


def _check_stages(config: Keys, found: Parallelism, sizes: Dimensions) -> None:
    if found.stages > sizes.num_layers:
        raise config.error(
            "pipeline_stage", f"{found.stages} is more than the {sizes.num_layers} layers"
        )
    if found.stages > found.micro_batch_num:
        raise config.error(
            "micro_batch_num",
            f"{found.micro_batch_num} must be at least pipeline_stage {found.stages}",
        )
    size = found.sharding.shard_size if found.sharding else -1
    if found.mode == "semi_auto" and size > 0 and found.data_parallel % size:
        raise config.error(
            "data_parallel",
            f"{found.data_parallel} cannot be divided by optimizer_weight_shard_size {size}",
        )


def _check_parts(config: Keys, found: Parallelism, sizes: Dimensions) -> None:
    """What an expert's configuration cuts must divide."""
    parts = found.model_parallel
    for name, size in (
        ("num_heads", sizes.num_heads),
        ("n_kv_heads", sizes.num_kv_heads),
        ("the feed-forward width", sizes.intermediate_size),
        ("vocab_size", 1 if found.vocab_emb_dp else sizes.vocab_size),
    ):
        if size % parts and size > 1:
            raise config.error("model_parallel", f"{name} {size} cannot be divided by {parts}")
    if sizes.seq_length % found.context_parallel:
        raise config.error(
            "context_parallel",
            f"seq_length {sizes.seq_length} cannot be divided by {found.context_parallel}",
        )
