"""The public calls that take plan options: `plan`, `best_plans` and `AutoParallel`.

Each spells out all options, for editors, type checkers and `help`, and collects them in one value
(`core/planner/options.py`) for the planner. A new option is a parameter of each call, documented in
`plan`, and a field of that value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.core.api.decide import decide_model, plan_collectively, plan_model
from shardwright.core.api.not_distributed import check_not_distributed
from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.unknown_keyword import suggests_keywords
from shardwright.core.api.whole_example import whole_example
from shardwright.core.capture.capturable import check_arguments, check_module
from shardwright.core.constraints import DatasetStrategy
from shardwright.core.constraints.load_strategies import load_strategies
from shardwright.core.cost.cluster import Cluster
from shardwright.core.graph.graph import Graph
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import ModuleWrapper
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.schedules import schedule_spec
from shardwright.core.plan import Plan
from shardwright.core.plan.ranked import RankedPlans
from shardwright.core.planner.options import COUNT, KeywordOptions, PlanOptions
from shardwright.core.planner.ranking import Ranking, options_to_rank
from shardwright.core.planner.requirement import one_of
from shardwright.core.search.assign_stages import StageConfig
from shardwright.errors import PlanError, StrategyError
from shardwright.progress import OnProgress, ignore_progress

log = logging.getLogger("shardwright")

PARALLEL_MODE = one_of(("semi_auto", "sharding_propagation", "recursive_programming"))
NOT_PLANNED = "the model is not planned yet: call it, or call compile(*example) before"


@suggests_keywords
def plan(
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    collective: bool = True,
    *,
    devices: int,
    mode: str = "recursive_programming",
    cluster: Cluster | str | Path | None = None,
    cost_model: str | None = None,
    mem_coeff: float | Literal["auto"] = 0.1,
    order: str = "weight",
    log_costs: bool = False,
    stages: int | Literal["auto"] = 1,
    max_stages: int | None = None,
    suggest_stages: bool = False,
    schedule: str = "1f1b",
    micro_batches: int | Literal["auto"] = 1,
    compute_dtype: str | torch.dtype | None = None,
    memory_limit: int | str | None = None,
    dataset_strategy: DatasetStrategy = "full_batch",
    stage_config: StageConfig | None = None,
    hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None,
    bucket_mb: float = 25.0,
    recompute: str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    on_progress: OnProgress = ignore_progress,
) -> Plan:
    """Decides how every operator of `net` is split over `devices` devices.

    Needs no process group and touches no device; a model on the meta device will do. In a process
    group of `devices` ranks all of them call this, as often and in the same order; rank 0 plans,
    and the others receive its plan and the captured model, however long that takes.

    Args:
        net: a model, or a graph that was captured before.
        args, kwargs: an example of its call, with the whole batch; only shapes and dtypes matter.
        collective: False lets this rank plan for itself, whatever the others do. So does a rank
            whose model or options are not those of rank 0.
        devices: number of devices over which the model is split.
        mode: `recursive_programming` (the double recursive search), `exact` (all operators and
            axes together, for small models), `sharding_propagation` (from the operators that
            `shard` has pinned outwards, with the least redistribution), `semi_auto` (operators
            that `shard` has pinned as pinned, all others along the batch), `data_parallel`
            (everything follows the batch) or `stand_alone` (nothing is cut).
        cluster: `local` (this machine), a built-in one (`h100`, `ascend910b`, …), or a YAML file.
        cost_model: `symbolic`, the relative costs of the published search, or `time`, the seconds
            of a step on a cluster; by default `time` if there is a cluster.
        mem_coeff: weight of memory relative to communication: small values favor data parallel,
            large ones model parallel. `auto`: the smallest that fits `memory_limit`, or the memory
            of the cluster's devices; by step time, from the default on.
        order: in which the search decides operators, by `weight` or `topology`.
        log_costs: log every decision at level INFO of the logger `shardwright.search`; a mode that
            weighs no costs says so.
        stages: number of pipeline stages. Each is an equal share of the devices and runs a part of
            the model; parts have nearly equal work, or on a cluster nearly equal time. `auto`: the
            number with the shortest step, at most `max_stages` and at most `micro_batches`.
        max_stages: the largest number that `stages="auto"` tries.
        suggest_stages: log the number that `auto` would choose if it is not `stages`; needs a
            cluster.
        schedule: order in which stages run micro-batches; `docs/pipeline.md` lists them. `auto`:
            the one with the shortest step, with several chunks a stage where that is faster.
        micro_batches: pieces into which the batch is split, computed one after the other; at least
            as many as stages. A graph must be captured with one micro-batch. `auto`: of all numbers
            that divide the batch the one with the shortest step; each is captured and planned by
            itself. The loss of the batch must be a weighted sum of those of its micro-batches
            (`docs/pipeline.md`); `auto` is 1 where it is not known to be one.
        compute_dtype: `bfloat16` (or `torch.bfloat16`) computes and communicates in bfloat16 what
            is stored in float32; parameters and optimizer state stay in float32.
        memory_limit: bytes per device, or a text like `24GiB`. A plan that needs more in a step is
            changed until it fits: parameters and optimizer state are sharded (`hsdp`), then
            operators are recomputed in the backward pass, then `mem_coeff` grows, then there are
            more stages. On a cluster the stages stay, and the fastest that fits of all the others
            is taken, also if the plan would fit as it is. By default, for a plan for training, the
            memory of a device of the named cluster (none without a cluster or on `local`), with
            which a plan that fits stays as it is. `none`: no limit.
        dataset_strategy: `full_batch` (every device receives the whole batch and keeps its shard),
            `data_parallel` (every device of a stage receives its own equal part), or a tuple with
            an entry (shard counts, a layout, or None) for each tensor input.
        stage_config: names of modules, each with the number of its stage, in place of `stages`.
        hsdp: shards parameters over devices that would replicate them (optimizer parallel): True,
            an `OptimizerParallel`, or a mapping with its fields.
        bucket_mb: size in MiB up to which collectives of parameters are merged.
        recompute: `auto` recomputes as much as the memory limit requires before anything else is
            changed; without a limit, as the memory of the cluster's devices requires.
        optimizer: whose state counts in the memory: `sgd`, `momentum`, `adam`, `adamw`, or an
            optimizer like the one to be used.
        on_progress: called with the name of each part of the work as it begins.

    Raises: what rank 0 raises while it plans, on all ranks.
        StrategyError: if an option is not valid, nothing can be cut, an operator cannot be cut
            as it is pinned, stages cannot be as requested, or micro-batches would train another
            loss than the whole batch.
        ConfigError: if there is no such cluster, or it has fewer devices.
        PlanError: if the batch cannot be split into so many micro-batches.
        MemoryLimitError: if nothing fits into `memory_limit`, or by default into the devices of the
            named cluster; says what would.
        LayoutError: if pinned layouts are not of this number of devices, or do not fit together.
        CaptureError: if the model cannot be captured.
    """
    options = PlanOptions.from_arguments(locals())
    _check_input(net, args, kwargs)
    do = plan_collectively if collective else plan_model
    return do(options, net, args, kwargs)


@suggests_keywords
def best_plans(
    net: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    top: int = 5,
    *,
    devices: int,
    mode: str = "recursive_programming",
    cluster: Cluster | str | Path | None = None,
    cost_model: str | None = None,
    mem_coeff: float | Literal["auto"] = 0.1,
    order: str = "weight",
    log_costs: bool = False,
    stages: int | Literal["auto"] = 1,
    max_stages: int | None = None,
    suggest_stages: bool = False,
    schedule: str = "1f1b",
    micro_batches: int | Literal["auto"] = 1,
    compute_dtype: str | torch.dtype | None = None,
    memory_limit: int | str | None = None,
    dataset_strategy: DatasetStrategy = "full_batch",
    stage_config: StageConfig | None = None,
    hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None,
    bucket_mb: float = 25.0,
    recompute: str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    on_progress: OnProgress = ignore_progress,
) -> RankedPlans:
    """Find the fastest plan of each of several kinds that fit into memory.

    Kinds differ in what the options leave open (`"auto"`) of the number of micro-batches, the
    number of stages and the schedule, in the level of sharded parameters and optimizer state, and
    in recomputation. The first plan is the result of `plan` with the same memory limit.

    Args:
        net, args, kwargs: as in `plan`; each process plans for itself.
        top: number of kinds.

    The other arguments are those of `plan`.

    Raises: as `plan`, and
        StrategyError: without a cluster, which is needed to predict seconds.
    """
    options = PlanOptions.from_arguments(locals())
    if not COUNT.accepts(top):
        raise StrategyError(COUNT.error("top", top))
    _check_input(net, args, kwargs)
    ranking = Ranking(top)
    decide_model(options_to_rank(options), net, args, kwargs, ranking)
    return ranking.ranked()


def _check_input(net: nn.Module | Graph, args: object, kwargs: object) -> None:
    """
    Raises:
        CaptureError: if the model is no module, or the arguments have another form.
        PlanError: if the model is planned, wrapped or sharded already.
    """
    check_arguments(args, kwargs)
    if not isinstance(net, Graph):
        check_module(net)
        check_not_distributed(net)


class AutoParallel(ModuleWrapper):
    """Wrap a model, and plan and shard it over all processes in its first call.

    Each instance has its own configuration, which decides the plan. It has the parameters, buffers
    and names of the model, as DTensors after the first call or `compile`. Make the optimizer after
    `compile`, or pass it to `sw.adopt`.

    Args:
        network: a model that returns its loss, often a `Pipeline` or a `WithLoss`.
        parallel_mode: `semi_auto`, `sharding_propagation` or `recursive_programming`.

    The other arguments are those of `plan`; it plans for as many devices as there are processes.

    Raises:
        StrategyError: for a mode or a value that is not valid.
    """

    @suggests_keywords
    def __init__(
        self,
        network: nn.Module,
        parallel_mode: str = "semi_auto",
        *,
        cluster: Cluster | str | Path | None = None,
        cost_model: str | None = None,
        mem_coeff: float | Literal["auto"] = 0.1,
        order: str = "weight",
        log_costs: bool = False,
        stages: int | Literal["auto"] = 1,
        max_stages: int | None = None,
        suggest_stages: bool = False,
        schedule: str = "1f1b",
        micro_batches: int | Literal["auto"] = 1,
        compute_dtype: str | torch.dtype | None = None,
        memory_limit: int | str | None = None,
        dataset_strategy: DatasetStrategy = "full_batch",
        stage_config: StageConfig | None = None,
        hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None,
        bucket_mb: float = 25.0,
        recompute: str | None = None,
        optimizer: str | torch.optim.Optimizer = "adamw",
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        options = KeywordOptions.from_arguments(locals())
        if not PARALLEL_MODE.accepts(parallel_mode):
            raise StrategyError(PARALLEL_MODE.error("parallel_mode", parallel_mode))
        super().__init__()
        self.parallel_mode = parallel_mode
        self.options = options
        self._parallel: tuple[ParallelModule, ...] = ()
        self._strategies: Path | None = None
        self._plan: Plan | None = None
        self.wrap(network)

    # Configuration

    def hsdp(
        self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1"
    ) -> None:
        """Shard parameters and optimizer state over their replicas (HSDP).

        Args:
            shard_size: number of devices to shard over; -1 for all replicas.
            threshold: smallest size in KB of parameters that are sharded.
            optimizer_level: `level1`, `level2` (gradients too) or `level3` (parameters are
                gathered again in the backward pass).

        Raises:
            StrategyError: for a value that is not valid.
        """
        self._configure(hsdp=OptimizerParallel(optimizer_level, shard_size, threshold))

    def pipeline(
        self,
        stages: int = 1,
        output_broadcast: bool = True,
        interleave: bool = False,
        scheduler: str = "1f1b",
    ) -> None:
        """Divide the devices into pipeline stages; the network is then a `Pipeline`.

        Args:
            stages: number of stages.
            output_broadcast: results reach every stage; they always do.
            interleave: several chunks of the model a stage: the schedule `interleaved_1f1b`.
            scheduler: the name of a schedule; `docs/pipeline.md` lists them.

        Raises:
            StrategyError: for a value that is not valid.
        """
        if not COUNT.accepts(stages):
            raise StrategyError(COUNT.error("stages", stages))
        interleaved = schedule_spec(scheduler, "scheduler").interleaved
        if interleave and interleaved is None:
            raise StrategyError(
                f"interleave=True is the schedule interleaved_1f1b, not {scheduler!r}"
            )
        if not output_broadcast:
            log.info("output_broadcast=False has no effect: every stage receives the results")
        schedule = interleaved if interleave and interleaved is not None else scheduler
        self._configure(stages=stages, schedule=schedule)

    def dataset_strategy(self, config: DatasetStrategy) -> None:
        """Set how each rank passes inputs: `full_batch`, `data_parallel`, or one entry per tensor.

        Raises:
            StrategyError: for another value.
        """
        self._configure(dataset_strategy=config)

    @property
    def full_batch(self) -> bool:
        """Whether every rank is passed the global batch instead of its own part."""
        return self.options.dataset_strategy == "full_batch"

    @full_batch.setter
    def full_batch(self, value: bool) -> None:
        self.dataset_strategy("full_batch" if value else "data_parallel")

    def load_operator_strategy_file(self, path: str | Path) -> None:
        """Take strategies of operators from a file when the model is planned."""
        self._configure()
        self._strategies = Path(path)

    # Planning and calls

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Plan and shard the model for an example call; only shapes and dtypes matter.

        Raises: as `plan` and `parallelize`.
        """
        (network,) = self._wrapped
        if self._strategies is not None:
            load_strategies(network, self._strategies)
        devices = dist.get_world_size() if dist.is_initialized() else 1
        keywords = self.options.keywords(KeywordOptions)
        options = PlanOptions(devices=devices, mode=self.parallel_mode, **keywords)
        self._plan = plan_collectively(options, network, args, kwargs)
        parallel = parallelize(network, self._plan)
        assert isinstance(parallel, ParallelModule)
        self._parallel = (parallel,)
        self.wrap(parallel)

    @property
    def plan(self) -> Plan:
        """The plan.

        Raises:
            PlanError: if the model is not planned yet.
        """
        if self._plan is None:
            raise PlanError(NOT_PLANNED)
        return self._plan

    def save_operator_strategy_file(self, path: str | Path) -> None:
        """Write the strategy of every operator, on rank 0."""
        self._write(lambda plan: plan.save_strategies(path))

    def save_plan(self, path: str | Path) -> None:
        """Write the plan, on rank 0."""
        self._write(lambda plan: plan.save(path))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned(args, kwargs)(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward over all micro-batches, and accumulate gradients.

        Returns:
            The loss of the whole batch, on every rank.
        """
        return self._planned(args, kwargs).train_step(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the norm of all gradients, over all devices and stages, to `max_norm`.

        Returns:
            The norm before clipping.
        """
        if not self._parallel:
            raise PlanError(NOT_PLANNED)
        return self._parallel[0].clip_grad_norm_(max_norm)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParallelModule:
        """The planned model; plans it for this call if it is not planned yet."""
        if not self._parallel:
            args, kwargs = whole_example(self.options, args, kwargs)
            self.compile(*args, **kwargs)
        return self._parallel[0]

    def _configure(self, **changes: Any) -> None:
        if self._parallel:
            raise PlanError("the model is planned already: configure it before its first call")
        self.options = replace(self.options, **changes)

    def _write(self, write: Callable[[Plan], None]) -> None:
        plan = self.plan
        if not dist.is_initialized() or dist.get_rank() == 0:
            write(plan)
