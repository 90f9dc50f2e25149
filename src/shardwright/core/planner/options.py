"""The options of a plan as one frozen dataclass: type, default and valid values of each.

`sw.plan`, `sw.best_plans` and `sw.AutoParallel` have the options as parameters and build this
dataclass from them; the docstring of `plan` describes each option. The class of an option says
where it applies:

| class | fields |
|---|---|
| `FileOptions` | parameters of all three, and keys of the section `parallel` in configurations |
| `KeywordOptions` | parameters of all three |
| `PlanOptions` | parameters of `plan` and `best_plans` only |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch

from shardwright.core.constraints import DatasetStrategy, requested_dataset_strategy
from shardwright.core.cost.cluster import LOCAL, Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.layout.axes import MAX_DEVICES
from shardwright.core.layout.layout import DeviceMatrix, Layout
from shardwright.core.micro_batches.batch_norms import BATCH_NORMS, WHOLE_BATCH
from shardwright.core.partition.decisions import BUCKET_BYTES, ZERO_LEVELS, OptimizerParallel
from shardwright.core.partition.pipeline_spec import AUTO, PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.requirement import (
    is_count,
    is_counts_by_name,
    is_dims_by_name,
    is_positive,
    must_be,
    one_of,
    parse_bytes,
    requirements,
)
from shardwright.core.search.configured_stages import StageConfig
from shardwright.core.search.modes import MODES
from shardwright.core.search.request import DEFAULT_MEM_COEFF, VISIT_ORDERS, TimedStep
from shardwright.errors import StrategyError
from shardwright.progress import OnProgress, ignore_progress

MB = 2**20

AUTO_RECOMPUTE = AUTO_MEM_COEFF = "auto"

MEM_COEFFS = tuple(0.1 * 4.0**power for power in range(-2, 9))
"""Values tried for `mem_coeff="auto"`, from 0.00625 to 6553.6. Below this range, even the gradient
all-reduce of a small layer costs more than any sharding saves; above it, plans do not change."""

COUNT = must_be("a whole number of at least 1", is_count)
DEVICES = must_be(
    f"a whole number of at least 1 and at most {MAX_DEVICES}",
    lambda value: is_count(value) and value <= MAX_DEVICES,
)
COUNT_OR_AUTO = must_be(
    "a whole number of at least 1, or 'auto'", lambda value: value == AUTO or is_count(value)
)
POSITIVE = must_be("a positive number", is_positive)
POSITIVE_OR_AUTO = must_be(
    "a positive number, or 'auto'", lambda value: value == AUTO_MEM_COEFF or is_positive(value)
)
AXES = must_be(
    "names of axes with their numbers of devices, such as {'dp': 2, 'tp': 4}",
    lambda value: isinstance(value, Layout) or (is_counts_by_name(value) and len(value) > 0),
)
DIMS = must_be("names of inputs, each with a dimension or None", is_dims_by_name)
FOLDER = must_be(
    "the path of a folder", lambda value: isinstance(value, Path | str) and value != ""
)
NO_LIMIT = "none"
"""Value of `memory_limit` that disables the limit; None means the device memory of the cluster."""
SIZE_OR_NONE = must_be(
    "a number of bytes, or a text like '24GiB' or '2GB', or 'none' for no limit",
    lambda value: value == NO_LIMIT or parse_bytes(value) is not None,
)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options that are also keys of the section `parallel` of a configuration file."""

    mem_coeff: Annotated[float | Literal["auto"], POSITIVE_OR_AUTO] = DEFAULT_MEM_COEFF
    cost_model: Annotated[str | None, one_of(("symbolic", "time"))] = None
    cluster: Cluster | str | Path | None = None
    order: Annotated[str, one_of(VISIT_ORDERS)] = "weight"
    log_costs: bool = False
    stages: Annotated[int | Literal["auto"], COUNT_OR_AUTO] = 1
    max_stages: Annotated[int | None, COUNT] = None
    suggest_stages: bool = False
    micro_batches: Annotated[int | Literal["auto"], COUNT_OR_AUTO] = 1
    batch_norm: Annotated[str, one_of(BATCH_NORMS)] = WHOLE_BATCH
    schedule: Annotated[str, one_of((*SCHEDULES, AUTO))] = "1f1b"
    compute_dtype: Annotated[str | torch.dtype | None, one_of(("float32", "bfloat16"))] = None
    memory_limit: Annotated[int | str | None, SIZE_OR_NONE] = None
    # Not compared: the texts are written, but the plan is the same.
    save_graphs: Annotated[str | Path | None, FOLDER] = field(default=None, compare=False)

    @property
    def chooses_micro_batches(self) -> bool:
        """Whether the planner chooses the number of micro-batches."""
        return self.micro_batches == AUTO

    @property
    def num_micro_batches(self) -> int:
        """The requested number of micro-batches, which must not be 'auto'."""
        assert not isinstance(self.micro_batches, str)
        return self.micro_batches

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Build the options from the `locals()` of a function with the options as parameters."""
        return cls(**{option.name: arguments[option.name] for option in fields(cls)})

    def keywords(self, options_class: type[FileOptions]) -> dict[str, Any]:
        """Return the values of the options that are fields of `options_class`, by name."""
        return {option.name: getattr(self, option.name) for option in fields(options_class)}


@dataclass(frozen=True, kw_only=True)
class KeywordOptions(FileOptions):
    """All options of `AutoParallel`; the fields of `FileOptions` are also keys of configuration
    files.

    Raises:
        StrategyError: if an option has an invalid value.
    """

    dataset_strategy: DatasetStrategy = "full_batch"
    stage_config: StageConfig | None = None
    axes: Annotated[Mapping[str, int] | Layout | None, AXES] = None
    batch_dims: Annotated[Mapping[str, int | None] | None, DIMS] = None
    hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None
    bucket_mb: Annotated[float, POSITIVE] = BUCKET_BYTES / MB
    recompute: str | None = None
    optimizer: str | torch.optim.Optimizer = "adamw"
    on_progress: OnProgress = field(default=ignore_progress, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Options are compared and hashed as keys of caches, so each value has one form: for a dtype
        # its name.
        if isinstance(self.compute_dtype, torch.dtype):
            object.__setattr__(self, "compute_dtype", str(self.compute_dtype).split(".")[1])
        # The class of the instance: `PlanOptions` has more fields than `KeywordOptions`.
        options: type = type(self)
        for name, requirement in requirements(options).items():
            value = getattr(self, name)
            if not requirement.accepts(value):
                raise StrategyError(requirement.error(name, value))
        if self.recompute not in (None, AUTO_RECOMPUTE):
            raise StrategyError(
                f"recompute={self.recompute!r}: must be None or {AUTO_RECOMPUTE!r}\n"
                "to recompute modules of your choice, call sw.recompute(module)"
            )
        if self.axes is not None and not isinstance(self.axes, Layout):
            # One form, so that options with equal axes are equal.
            matrix = Layout(tuple(self.axes.values()), tuple(self.axes))
            object.__setattr__(self, "axes", matrix)
        strategy = requested_dataset_strategy(self.dataset_strategy)
        object.__setattr__(self, "dataset_strategy", strategy)
        for name in ("stages", "schedule"):
            if getattr(self, name) == AUTO and self.stage_config is not None:
                raise StrategyError(
                    f"{name}='auto' conflicts with stage_config, which fixes the stages\n"
                    f"remove {name} or stage_config"
                )
        # `OptimizerParallel` validates its fields when built, so this is where `hsdp` is checked.
        object.__setattr__(self, "hsdp", _parse_hsdp(self.hsdp))

    @property
    def axis_matrix(self) -> DeviceMatrix | None:
        """The device matrix whose axis names pins may use; None without the option `axes`."""
        assert self.axes is None or isinstance(self.axes, Layout)
        return self.axes

    @property
    def sharding(self) -> OptimizerParallel | None:
        """The requested ZeRO / HSDP configuration."""
        assert self.hsdp is None or isinstance(self.hsdp, OptimizerParallel)
        return self.hsdp


@dataclass(frozen=True, kw_only=True)
class PlanOptions(KeywordOptions):
    """All options of `plan` and `best_plans`.

    `AutoParallel` does not take the fields of this class: it has `parallel_mode`, and plans for one
    device per process.

    Raises:
        StrategyError: if an option has an invalid value.
        ConfigError: if the cluster is unknown.
    """

    devices: Annotated[int, DEVICES]
    mode: Annotated[str, one_of(MODES)] = "recursive_programming"

    def __post_init__(self) -> None:
        super().__post_init__()
        # On one device nothing is sharded, so that a script runs there unchanged.
        if self.sharding is not None and self.sharding.shard_size > self.devices > 1:
            raise StrategyError(
                f"hsdp: shard_size={self.sharding.shard_size}, but the plan is for {self.devices}"
                f" devices\nuse shard_size={self.devices} or less, or -1 for all devices that"
                " replicate a parameter"
            )
        requires_cluster = MODES[self.mode].requires_cluster
        if requires_cluster and self.cost_model == "symbolic":
            raise StrategyError(
                f"mode={self.mode!r} minimizes seconds and cannot use cost_model='symbolic'\n"
                "remove cost_model, or set cost_model='time'"
            )
        if self.cost_model is None:
            by_time = self.cluster is not None or requires_cluster
            object.__setattr__(self, "cost_model", "time" if by_time else "symbolic")
        # Numbers of stages and of micro-batches are compared by predicted seconds, whatever cost
        # model the search uses.
        compares_seconds = self.chooses_pipeline or self.chooses_micro_batches
        if self.cluster is None and (self.cost_model == "time" or compares_seconds):
            # Seconds need a cluster: without a name they are those of this machine.
            object.__setattr__(self, "cluster", LOCAL)
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            object.__setattr__(self, "cluster", load_cluster(self.cluster))
        # The mode ignores `mem_coeff`, so trying several values would give one plan several times.
        if self.has_auto_mem_coeff and not self.weighs_memory:
            object.__setattr__(self, "mem_coeff", self.mem_coeffs[0])
        self._check_memory_limit()
        self._check_axis_sizes()

    def _check_axis_sizes(self) -> None:
        matrix, stages = self.axis_matrix, self.stages
        # Without a fixed number of stages, the devices of one are not known yet.
        if matrix is None or isinstance(stages, str) or self.stage_config is not None:
            return
        devices = self.devices // stages
        if matrix.num_devices != devices:
            of_stage = " of a stage" if stages > 1 else ""
            raise StrategyError(
                f"axes ({matrix.sizes}) have {matrix.num_devices} devices, but the plan is for"
                f" {devices}{of_stage}\nuse sizes of axes whose product is {devices}"
            )

    def _check_memory_limit(self) -> None:
        is_auto = {
            "mem_coeff": self.has_auto_mem_coeff,
            "recompute": self.recompute is not None,
        }
        for name in (name for name, chosen_by_limit in is_auto.items() if chosen_by_limit):
            if self.memory_limit == NO_LIMIT:
                raise StrategyError(
                    f"{name}='auto' needs a memory limit, but memory_limit={NO_LIMIT!r}\n"
                    f"remove {name} or memory_limit"
                )
        if self.has_auto_mem_coeff and self.limit is None:
            raise StrategyError(
                f"mem_coeff={AUTO_MEM_COEFF!r} needs a memory limit\n"
                "set memory_limit, for example memory_limit='24GiB', or name a cluster"
            )

    def describe(self, recompute: bool = False) -> str:
        """Summarize the options that attempts vary, such as `hsdp level1, mem_coeff=0.1`.

        Args:
            recompute: whether the planner may recompute operators that the user did not mark.
        """
        sharding, stages = self.sharding, self.stages
        words = [
            f"hsdp {sharding.level}" if sharding is not None else "",
            "recompute" if recompute else "",
            # Modes without search options ignore `mem_coeff`.
            f"mem_coeff={self.fixed_mem_coeff:g}" if self.search_options else "",
            f"{stages} stages" if stages != 1 else "",
            self.schedule if stages != 1 and self.schedule != "1f1b" else "",
        ]
        return ", ".join(word for word in words if word) or "as requested"

    def describe_pipeline(self) -> str:
        """Summarize the pipeline options, such as `8 micro-batches, 2 stages, gpipe`."""
        # A single stage runs without a schedule, so none is named.
        words = [f"{self.micro_batches} micro-batches", f"{self.stages} stages"]
        return ", ".join(words if self.stages == 1 else [*words, self.schedule])

    @property
    def chooses_pipeline(self) -> bool:
        """Whether the planner chooses the number of stages or the schedule."""
        return AUTO in (self.stages, self.schedule)

    @property
    def limit(self) -> int | None:
        """Memory limit of the search in bytes per device; None for a search without a limit.

        The limit is also None if only `default_limit` applies, which is checked after a search
        without a limit.

        Raises:
            StrategyError: if `recompute` needs a memory limit, but none is set.
        """
        if self.memory_limit == NO_LIMIT:
            return None
        if self.memory_limit is None and self.recompute is None:
            # `mem_coeff="auto"` takes the smallest value that fits, here into the devices' memory.
            return self.recorded_limit if self.has_auto_mem_coeff else None
        if self.recorded_limit is None:
            raise StrategyError(
                f"recompute={self.recompute!r} needs a memory limit\n"
                "set memory_limit, for example memory_limit='24GiB', or name a cluster"
            )
        return self.recorded_limit

    @property
    def default_limit(self) -> int | None:
        """Device memory of the named cluster in bytes; None if a limit is requested.

        The limit is also None for the cluster `local`, whose processes share the memory of one
        machine.
        """
        is_named = self.cluster is not None and self.resolved_cluster.name != LOCAL
        # `recompute` and `mem_coeff="auto"` take the devices' memory as their limit from the start.
        has_limit = self.memory_limit is not None or self.limit is not None
        return self.recorded_limit if is_named and not has_limit else None

    @property
    def recorded_limit(self) -> int | None:
        """Memory limit that plans record, in bytes per device: `memory_limit` if it is a size, else
        the device memory of the cluster; None without a cluster."""
        if self.memory_limit is not None and self.memory_limit != NO_LIMIT:
            return parse_bytes(self.memory_limit)
        return None if self.cluster is None else int(self.resolved_cluster.device.memory)

    @property
    def on_accelerator(self) -> bool | None:
        """Whether the cluster has accelerators; None if there is no cluster."""
        # Only processes that share a CPU have a number of devices at full rate.
        return None if self.cluster is None else self.resolved_cluster.device.at_full_rate is None

    @property
    def has_auto_mem_coeff(self) -> bool:
        """Whether the planner chooses `mem_coeff`."""
        return self.mem_coeff == AUTO_MEM_COEFF

    @property
    def mem_coeffs(self) -> tuple[float, ...]:
        """Values that `mem_coeff="auto"` tries, ascending."""
        # With the cost model `time`, the objective differs more from the step time with values
        # below the default.
        smallest = DEFAULT_MEM_COEFF if self.cost_model == "time" else 0.0
        return tuple(value for value in MEM_COEFFS if value >= smallest)

    @property
    def weighs_memory(self) -> bool:
        """Whether the mode weighs memory by `mem_coeff` in its search."""
        return MODES[self.mode].takes_cost_model

    @property
    def fixed_mem_coeff(self) -> float:
        """The requested `mem_coeff`, which must not be 'auto'."""
        assert not isinstance(self.mem_coeff, str)
        return self.mem_coeff

    @property
    def shards_all(self) -> bool:
        """Whether parameters, gradients and optimizer state are sharded over all devices that
        replicate them (ZeRO-3)."""
        sharding = self.sharding
        return (
            # With a given `shard_size` some devices may store copies of a shard.
            sharding is not None and sharding.level == ZERO_LEVELS[-1] and sharding.shard_size == -1
        )

    @property
    def search_options(self) -> dict[str, Any]:
        """Options of the search mode, by name, as recorded in the plan; {} if the mode uses
        none."""
        if not self.weighs_memory:
            return {}
        cost_model = {"cost_model": self.cost_model}
        if self.cost_model == "symbolic":
            return {"mem_coeff": self.mem_coeff, "order": self.order, **cost_model}
        # Without `order`: the search by time decides all operators of an axis together.
        return {"mem_coeff": self.mem_coeff, **cost_model, "cluster": self.resolved_cluster.name}

    @property
    def resolved_cluster(self) -> Cluster:
        """The loaded cluster, which must not be None."""
        assert isinstance(self.cluster, Cluster)
        return self.cluster

    def timed_step(self, pipeline: PipelineSpec) -> TimedStep | None:
        """Return the arguments of the cost model `time`; None with `cost_model="symbolic"`."""
        if self.cost_model != "time":
            return None
        return TimedStep(
            self.resolved_cluster,
            stages=pipeline.stages,
            micro_batches=pipeline.micro_batches,
            optimizer_shard_size=None if self.sharding is None else self.sharding.shard_size,
        )


def _parse_hsdp(hsdp: Any) -> OptimizerParallel | None:
    # False is accepted besides None, so that scripts can pass the value of a flag.
    if hsdp is None or hsdp is False:
        return None
    if hsdp is True:
        return OptimizerParallel()
    if isinstance(hsdp, OptimizerParallel):
        return hsdp
    valid_keys = [option.name for option in fields(OptimizerParallel)]
    if not isinstance(hsdp, Mapping) or not set(hsdp) <= set(valid_keys):
        raise StrategyError(
            f"hsdp={hsdp!r}: must be True, an OptimizerParallel, or a mapping of its fields\n"
            f"valid keys are {', '.join(valid_keys)}, for example hsdp={{'level': 'level1'}}"
        )
    return OptimizerParallel(**hsdp)
