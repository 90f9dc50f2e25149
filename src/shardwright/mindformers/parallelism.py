"""How a step is divided: `use_parallel`, `parallel` and `parallel_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.errors import ConfigError
from shardwright.mindformers.keys import Keys

_MODES: Mapping[str, str] = {
    "0": "data_parallel",
    "data_parallel": "data_parallel",
    "1": "semi_auto",
    "semi_auto_parallel": "semi_auto",
    "2": "auto",
    "auto_parallel": "auto",
}
_SEARCHES = ("recursive_programming", "dynamic_programming", "sharding_propagation")
_SCHEDULES = ("1f1b", "gpipe", "zero_bubble_v")
AUTO = ("recursive_programming", "sharding_propagation")
"""Modes in which a search decides the operators."""

WHOLE_OPERATORS = ("stand_alone", "data_parallel")
"""Modes in which every operator is computed whole, or on a part of the batch."""


@dataclass(frozen=True)
class Parallelism:
    """How a step is divided over devices.

    Args:
        mode: `stand_alone`, `data_parallel`, `semi_auto` (as an expert divides, or a file of
            strategies says), or one of `AUTO`.
        mem_coeff: of the search; `auto` for the smallest that fits the memory.
        data_parallel, model_parallel, context_parallel: equal parts of the batch, of heads and
            widths, and of the sequence; where a search decides, only `data_parallel` counts, and
            only in the size of the batch.
        expert_parallel: equal parts of the experts, over devices that share the batch.
        stages: pipeline stages; where `auto_pipeline` is on, the requested number.
        schedule: in what order stages run micro-batches.
        auto_pipeline: whether their number is chosen; where the file says False, the number that
            would be chosen is suggested, and None, where it says nothing, neither.
        full_batch: whether every device is given the whole batch.
        seq_parallel: whether norms and residuals are cut along the sequence.
        vocab_emb_dp: whether the embedding table stays whole.
        sharding: of parameters and optimizer state.
        strategies: a file that says how operators are cut, empty for none.
        cluster: for whose devices and links it is planned, a key of our own; empty for none.
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
    def by_numbers(self) -> bool:
        """Whether the numbers say how operators are cut; propagation starts from those that they
        do."""
        return self.mode in ("semi_auto", "sharding_propagation") and not self.strategies

    @property
    def devices(self) -> int:
        """How many devices the numbers of a `semi_auto` configuration make."""
        operator_parts = self.data_parallel * self.model_parallel * self.context_parallel
        return operator_parts * self.stages

    @property
    def pipelined(self) -> bool:
        """Whether there are, or may be, several stages, and so micro-batches."""
        return self.stages > 1 or (bool(self.auto_pipeline) and self.micro_batch_num > 1)

    def most_stages(self, servers: int) -> int:
        """Up to how many stages `auto_pipeline` may choose, or suggest, on so many servers."""
        return min(max(self.stages, servers), self.micro_batch_num)


def read_parallelism(keys: Keys, notes: list[str]) -> Parallelism:
    """Reads how a model is divided; `notes` collects what the mode overrides.

    Raises:
        ConfigError: an unknown mode or search, or numbers that are not positive.
    """
    parallel, config = keys.section("parallel"), keys.section("parallel_config")
    parallelism = Parallelism(
        mode=_mode(keys, parallel),
        mem_coeff=_mem_coeff(config),
        data_parallel=config.whole("data_parallel", 1),
        model_parallel=config.whole("model_parallel", 1),
        context_parallel=config.whole("context_parallel", 1),
        expert_parallel=config.whole("expert_parallel", 1),
        stages=config.whole("pipeline_stage", 1),
        micro_batch_num=config.whole("micro_batch_num", 1),
        schedule=_schedule(parallel.section("pipeline_config")),
        auto_pipeline=_auto_pipeline(parallel),
        full_batch=parallel.flag("full_batch", False),
        seq_parallel=config.flag("use_seq_parallel", False),
        vocab_emb_dp=config.flag("vocab_emb_dp", True),
        sharding=_sharding(parallel),
        strategies=_strategies(keys, parallel),
        cluster=parallel.text("cluster"),
    )
    return _apply_mode(parallelism, config.has("vocab_emb_dp"), notes)


def _auto_pipeline(parallel: Keys) -> bool | None:
    return parallel.flag("auto_pipeline", False) if parallel.has("auto_pipeline") else None


def _mode(keys: Keys, parallel: Keys) -> str:
    mode_number = parallel.any("parallel_mode")
    mode_number = 0 if mode_number is None else mode_number
    if isinstance(mode_number, bool) or str(mode_number) not in _MODES:
        hybrid = str(mode_number) == "3"
        problem = "is hybrid parallel, which is not supported" if hybrid else "is not known"
        raise parallel.error(
            "parallel_mode",
            f"{mode_number!r} {problem}; valid are 0 (data parallel), 1 (semi-auto), 2 (auto)",
        )
    search = _search(parallel)
    if not keys.flag("use_parallel", False):
        return "stand_alone"
    mode = _MODES[str(mode_number)]
    return search if mode == "auto" else mode


def _search(parallel: Keys) -> str:
    """What `search_mode`, or its old name, says. Dynamic programming is what `sharding_propagation`
    replaced; here the recursive search takes its place."""
    names = ("search_mode", "auto_parallel_search_mode")
    searches = [parallel.text(name, valid=_SEARCHES) for name in names]
    if all(searches) and searches[0] != searches[1]:
        raise parallel.error(
            names[0], f"{searches[0]}, but its old name {names[1]} says {searches[1]}"
        )
    search = searches[0] or searches[1] or "recursive_programming"
    return "recursive_programming" if search == "dynamic_programming" else search


def _mem_coeff(config: Keys) -> float | str:
    value = config.any("mem_coeff")
    if value == "auto":
        return "auto"
    try:
        return config.number("mem_coeff", 0.1, above=0)
    except ConfigError:
        wrong = f"expected a positive number, or 'auto', got {value!r}"
        raise config.error("mem_coeff", wrong) from None


def _schedule(config: Keys) -> str:
    """Interleaved stages have several parts of the model each."""
    schedule = config.text("pipeline_scheduler", "1f1b", valid=_SCHEDULES)
    if not config.flag("pipeline_interleave", False):
        return schedule
    if schedule == "gpipe":
        raise config.error("pipeline_interleave", "True needs pipeline_scheduler 1f1b, not gpipe")
    return "interleaved_1f1b" if schedule == "1f1b" else schedule


def _strategies(keys: Keys, parallel: Keys) -> str:
    """The file of strategies that is read."""
    file, mode = parallel.text("strategy_ckpt_load_file"), _mode(keys, parallel)
    if file and mode in WHOLE_OPERATORS:
        raise parallel.error(
            "strategy_ckpt_load_file",
            f"the mode is {mode}, which takes no strategies: set use_parallel: True and"
            " parallel_mode 1 or 2",
        )
    return file


def _sharding(parallel: Keys) -> OptimizerParallel | None:
    """Gradients are sharded too where their accumulation is."""
    config = parallel.section("parallel_optimizer_config")
    size = config.whole("optimizer_weight_shard_size", -1, least=-1)
    if size == 0:
        raise config.error(
            "optimizer_weight_shard_size", "0 must be at least 1, or -1 for all devices"
        )
    level = "level2" if config.flag("gradient_accumulation_shard", False) else "level1"
    threshold = config.whole("parallel_optimizer_threshold", 64, least=0)
    if not parallel.flag("enable_parallel_optimizer", False):
        return None
    return OptimizerParallel(level, size, threshold)


def _apply_mode(parallelism: Parallelism, names_vocab: bool, notes: list[str]) -> Parallelism:
    """What the mode excludes is set as MindFormers sets it, with a note if the file differs."""
    mode = parallelism.mode
    if mode in WHOLE_OPERATORS:
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
        parallelism = replace(parallelism, data_parallel=1, **changes)  # type: ignore[arg-type]
    if parallelism.auto_pipeline is not None and (mode not in AUTO or parallelism.by_numbers):
        if parallelism.auto_pipeline:
            notes.append(f"auto_pipeline is False: the mode is {mode}")
        parallelism = replace(parallelism, auto_pipeline=None)
    stages = parallelism.stages
    if parallelism.vocab_emb_dp and (stages > 1 or mode in AUTO):
        if names_vocab:
            reason = f"pipeline_stage is {stages}" if stages > 1 else f"the mode is {mode}"
            notes.append(f"vocab_emb_dp is False: {reason}")
        parallelism = replace(parallelism, vocab_emb_dp=False)
    return parallelism
