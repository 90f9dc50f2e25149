"""The public functions with plan options: `plan`, `best_plans` and `AutoParallel`.

All options are parameters of each function, for editors, type checkers and `help`, and are passed
to the planner as a `PlanOptions` (`core/planner/options.py`). A new option is a parameter of each
function, documented in `plan`, and a field of `PlanOptions`.
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
from shardwright.core.layout.layout import Layout
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import ModuleWrapper
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.schedules import schedule_spec
from shardwright.core.plan import Plan
from shardwright.core.plan.ranked import RankedPlans
from shardwright.core.planner.options import COUNT, KeywordOptions, PlanOptions
from shardwright.core.planner.ranking import Ranking, options_to_rank
from shardwright.core.planner.requirement import one_of
from shardwright.core.runtime.counted_calls import watch_rank
from shardwright.core.search.configured_stages import StageConfig
from shardwright.errors import PlanError, StrategyError
from shardwright.progress import OnProgress, ignore_progress

log = logging.getLogger("shardwright")

# The modes of MindSpore's `AutoParallel`; `plan` has more.
PARALLEL_MODE = one_of(("semi_auto", "sharding_propagation", "recursive_programming"))
NOT_PLANNED = "the model is not planned yet\ncall the model, or its `compile(*example)`, first"


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
    batch_norm: str = "whole_batch",
    compute_dtype: str | torch.dtype | None = None,
    memory_limit: int | str | None = None,
    save_graphs: str | Path | None = None,
    dataset_strategy: DatasetStrategy = "full_batch",
    stage_config: StageConfig | None = None,
    axes: Mapping[str, int] | Layout | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None,
    bucket_mb: float = 25.0,
    recompute: str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    on_progress: OnProgress = ignore_progress,
) -> Plan:
    """Decide how every operator of `net` is sharded over `devices` devices.

    Needs no process group and no accelerator, and the model may be on the meta device. Collective
    in a process group of `devices` ranks: rank 0 plans, and the other ranks receive the plan and
    the captured graph, without a timeout.

    Args:
        net: a model, or a captured graph.
        args, kwargs: example arguments with the global batch; only shapes and dtypes matter.
        collective: whether to plan on rank 0 for all ranks. A rank with another model or other
            options than rank 0 makes its own plan.
        devices: number of devices over which the model is sharded.
        mode: `recursive_programming` (the double recursive search), `exact` (all operators and
            axes together, for small models), `sharding_propagation` (outwards from the operators
            pinned with `shard`, with the least redistribution), `semi_auto` (pinned operators as
            pinned, all others along the batch), `data_parallel` (all operators along the batch) or
            `stand_alone` (all operators replicated).
        cluster: `local` (this machine), a built-in cluster (`h100`, `ascend910b`, …), or the path
            of a YAML file.
        cost_model: `symbolic`, the relative costs of the published search, or `time`, the seconds
            of a step on a cluster; by default `time` if there is a cluster.
        mem_coeff: weight of memory relative to communication: small values favor data parallelism,
            large values model parallelism. `auto`: the smallest value whose plan fits into
            `memory_limit`, or into a device of the cluster; at least the default value if
            `cost_model` is `time`.
        order: the order in which the search decides operators: `weight` (largest first) or
            `topology` (as in the graph).
        log_costs: log the costs of every decision at level INFO of the logger `shardwright.search`;
            modes without costs log one line.
        stages: number of pipeline stages, each on an equal share of the devices. The model is
            divided into parts of nearly equal work or, on a cluster, of nearly equal time. `auto`:
            the number with the shortest step, at most `max_stages` and at most `micro_batches`.
        max_stages: the largest number of stages that `stages="auto"` tries.
        suggest_stages: log the number of stages that `auto` would choose if it is not `stages`;
            needs a cluster.
        schedule: order in which stages run micro-batches; `docs/pipeline.md` lists the schedules.
            `auto`: the schedule with the shortest step, with several chunks per stage where that is
            faster.
        micro_batches: number of equal micro-batches of the batch, run one after another; at least
            `stages`. A graph must be captured with one micro-batch. `auto`: the divisor of the
            batch size with the shortest step; the model is captured and planned for each. The loss
            is computed for the global batch (`docs/pipeline.md`); where micro-batches cannot
            compute it, or the model has a batch norm in training mode, `auto` is 1.
        batch_norm: samples over which batch norm in training computes statistics: `whole_batch`,
            not supported with several micro-batches, or `per_micro_batch`, as with gradient
            accumulation in PyTorch, with running statistics updated by each micro-batch.
        compute_dtype: `bfloat16` (or `torch.bfloat16`) computes and communicates in bfloat16;
            parameters and optimizer state stay in float32.
        memory_limit: bytes per device, or a string like `24GiB`. A plan that needs more in a step
            is changed until it fits: first shard parameters and optimizer state (`hsdp`), then
            recompute activations, then raise `mem_coeff`, then add stages. On a cluster the number
            of stages is not changed, and the fastest of all plans that fit is returned, even if
            the first plan fits. By default, for a plan for training, the memory of a device of the
            named cluster (no limit without a cluster or on `local`); then a first plan that fits is
            returned unchanged. `none`: no limit.
        save_graphs: a folder into which the captured graph is written as text before the search,
            then the plan or the error, and the program of rank 0; in a process group by rank 0.
        dataset_strategy: `full_batch` (every rank passes the global batch and reads its shard),
            `data_parallel` (every rank of a stage passes a local batch of equal size), or a tuple
            with an entry (shard counts, a layout, named axes as in `sw.shard`, or None) for each
            tensor input.
        stage_config: index of the pipeline stage of each module, by module name; replaces `stages`.
        axes: the number of devices along each axis that pins name, the outermost axis first, such
            as `{"dp": 2, "tp": 4}`; their product is the number of devices of a stage. Axes of pins
            that are missing here are ignored.
        batch_dims: for inputs by name, the dimension that is split into micro-batches, and that
            modes without a search shard, or None to pass the full input to each micro-batch. By
            default dimension 0 of each input whose dimension 0 has the size of that of the first
            input or, if the loss does not allow that, dimensions that operators combine with
            dimension 0 of some input.
        hsdp: shard parameters over their replicas (ZeRO / FSDP; optimizer parallel): True, an
            `OptimizerParallel`, or a mapping with its fields.
        bucket_mb: largest size in MiB of a bucket of parameters, which are gathered or reduced by
            one collective. A bucket has at most a quarter of all parameters if that is 1 MiB or
            more.
        recompute: `auto` recomputes activations as far as the memory limit requires, before the
            plan is changed in other ways; without a limit, as far as the memory of the cluster's
            devices requires.
        optimizer: the optimizer whose state is counted as memory: `sgd`, `momentum`, `adam`,
            `adamw`, `muon`, or an instance of the class and options that will train.
        on_progress: called with the name of each phase as it begins.

    Raises:
        StrategyError: if an option is not valid, no operator can be sharded, a pinned sharding or
            the number of stages is not possible, or the loss of the global batch is not the sum or
            mean of the losses of micro-batches.
        ConfigError: if the cluster is unknown, or has fewer devices.
        PlanError: if `micro_batches` does not divide the batch size, or `net` is planned, wrapped
            or sharded already.
        MemoryLimitError: if no plan fits into `memory_limit`, or by default into a device of the
            named cluster; the message suggests a limit or a change with which a plan fits.
        LayoutError: if pinned layouts have another number of devices, or contradict each other.
        CaptureError: if the model cannot be captured.
        OSError: if `save_graphs` cannot be written.

    In a process group, errors of rank 0 are raised on all ranks.
    """
    # `locals()` has exactly the parameters here, as no variable is assigned yet.
    options = PlanOptions.from_arguments(locals())
    _check_model_and_arguments(net, args, kwargs)
    # A rank that then calls `parallelize` alone learns where this one waits.
    watch_rank()
    plan_with_options = plan_collectively if collective else plan_model
    return plan_with_options(options, net, args, kwargs)


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
    batch_norm: str = "whole_batch",
    compute_dtype: str | torch.dtype | None = None,
    memory_limit: int | str | None = None,
    save_graphs: str | Path | None = None,
    dataset_strategy: DatasetStrategy = "full_batch",
    stage_config: StageConfig | None = None,
    axes: Mapping[str, int] | Layout | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    hsdp: OptimizerParallel | Mapping[str, Any] | bool | None = None,
    bucket_mb: float = 25.0,
    recompute: str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    on_progress: OnProgress = ignore_progress,
) -> RankedPlans:
    """Return the fastest plans that fit into memory, one of each kind.

    Plans of different kinds differ in ZeRO level, in recomputation or, where these are `"auto"`, in
    the number of micro-batches, the number of stages or the schedule. The first plan is the result
    of `plan` with the same memory limit. Not collective: each process makes its own plans.

    Args:
        net: a model, or a captured graph.
        args, kwargs: example arguments with the global batch; only shapes and dtypes matter.
        top: maximum number of plans.

    The other arguments and errors are those of `plan`.

    Raises:
        StrategyError: without a cluster, which is needed to predict step times, or if `top` is not
            a positive number.
    """
    options = PlanOptions.from_arguments(locals())
    if not COUNT.accepts(top):
        raise StrategyError(COUNT.error("top", top))
    _check_model_and_arguments(net, args, kwargs)
    ranking = Ranking(top)
    decide_model(options_to_rank(options), net, args, kwargs, ranking)
    return ranking.ranked()


def _check_model_and_arguments(net: nn.Module | Graph, args: object, kwargs: object) -> None:
    """Check the types of a model and its example arguments.

    Raises:
        CaptureError: if the model is not a module, `args` not a tuple or `kwargs` not a mapping.
        PlanError: if the model is planned, wrapped or sharded already.
    """
    check_arguments(args, kwargs)
    if not isinstance(net, Graph):
        check_module(net)
        check_not_distributed(net)


class AutoParallel(ModuleWrapper):
    """Wrapper that plans a model in its first call, and shards the model over all ranks.

    The wrapper has the parameters, buffers and names of the model. Parameters are DTensors after
    the first call or `compile`. Create the optimizer after `compile`, or pass it to `sw.adopt`.

    Args:
        network: a model that returns its loss, often a `Pipeline` or a `WithLoss`.
        parallel_mode: `semi_auto`, `sharding_propagation` or `recursive_programming`.

    The other arguments are options of `plan`. The number of devices is the number of ranks.

    Raises:
        StrategyError: if a mode or another argument is not valid.
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
        batch_norm: str = "whole_batch",
        compute_dtype: str | torch.dtype | None = None,
        memory_limit: int | str | None = None,
        save_graphs: str | Path | None = None,
        dataset_strategy: DatasetStrategy = "full_batch",
        stage_config: StageConfig | None = None,
        axes: Mapping[str, int] | Layout | None = None,
        batch_dims: Mapping[str, int | None] | None = None,
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
            optimizer_level: `level1` (ZeRO-1), `level2` (ZeRO-2: gradients are sharded too) or
                `level3` (FSDP: parameters are all-gathered again in the backward pass).

        Raises:
            StrategyError: if an argument is not valid.
            PlanError: if the model is planned already.
        """
        self._change_options(hsdp=OptimizerParallel(optimizer_level, shard_size, threshold))

    def pipeline(
        self,
        stages: int = 1,
        output_broadcast: bool = True,
        interleave: bool = False,
        scheduler: str = "1f1b",
    ) -> None:
        """Divide the devices into pipeline stages.

        The network must be a `Pipeline`, or the option `micro_batches` must be set.

        Args:
            stages: number of stages.
            output_broadcast: no effect, as every stage receives the outputs.
            interleave: whether each stage has several model chunks, as in the schedule
                `interleaved_1f1b`.
            scheduler: name of a schedule; `docs/pipeline.md` lists the schedules.

        Raises:
            StrategyError: if an argument is not valid.
            PlanError: if the model is planned already.
        """
        if not COUNT.accepts(stages):
            raise StrategyError(COUNT.error("stages", stages))
        interleaved = schedule_spec(scheduler, "scheduler").interleaved
        if interleave and interleaved is None:
            raise StrategyError(
                f"interleave=True is not possible with scheduler={scheduler!r}\n"
                "use `scheduler='1f1b'`, which becomes `interleaved_1f1b`"
            )
        if not output_broadcast:
            log.info("output_broadcast=False has no effect: every stage receives the outputs")
        # MindSpore names the schedule and its interleaving separately.
        schedule = interleaved if interleave and interleaved is not None else scheduler
        self._change_options(stages=stages, schedule=schedule)

    def dataset_strategy(self, config: DatasetStrategy) -> None:
        """Set whether ranks pass the global batch, local batches, or other shards of inputs.

        Args:
            config: `full_batch`, `data_parallel`, or an entry for each tensor input (see `plan`).

        Raises:
            StrategyError: if `config` is not valid.
            PlanError: if the model is planned already.
        """
        self._change_options(dataset_strategy=config)

    @property
    def full_batch(self) -> bool:
        """Whether every rank passes the global batch instead of a local batch."""
        return self.options.dataset_strategy == "full_batch"

    @full_batch.setter
    def full_batch(self, value: bool) -> None:
        self.dataset_strategy("full_batch" if value else "data_parallel")

    def load_operator_strategy_file(self, path: str | Path) -> None:
        """Set the operator strategy file, which is read when the model is planned.

        Args:
            path: a file in the format of `save_operator_strategy_file`.

        Raises:
            PlanError: if the model is planned already.
        """
        self._change_options()  # Changes nothing, but raises if the model is planned.
        self._strategies = Path(path)

    # Planning and calls

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Plan and shard the model for an example call.

        Args:
            args, kwargs: arguments with the global batch; only shapes and dtypes matter.

        Raises:
            ShardwrightError: errors of `plan` and `parallelize`.
        """
        (network,) = self._wrapped
        # Strategies are constraints of the search, so they are loaded before it.
        if self._strategies is not None:
            load_strategies(network, self._strategies)
        # Without a process group the model is planned for one device.
        devices = dist.get_world_size() if dist.is_initialized() else 1
        keywords = self.options.keywords(KeywordOptions)
        options = PlanOptions(devices=devices, mode=self.parallel_mode, **keywords)
        self._plan = plan_collectively(options, network, args, kwargs)
        parallel = parallelize(network, self._plan)
        assert isinstance(parallel, ParallelModule)
        # In a tuple, so that the model is not registered as a submodule a second time.
        self._parallel = (parallel,)
        # From now on the wrapper shares the state of the planned model.
        self.wrap(parallel)

    @property
    def plan(self) -> Plan:
        """The plan of the model.

        Raises:
            PlanError: if the model is not planned yet.
        """
        if self._plan is None:
            raise PlanError(NOT_PLANNED)
        return self._plan

    def save_operator_strategy_file(self, path: str | Path) -> None:
        """Write the strategy of every operator to a file, on rank 0 only.

        Args:
            path: the file to write.

        Raises:
            PlanError: if the model is not planned yet.
        """
        self._write_on_rank_0(lambda plan: plan.save_strategies(path))

    def save_plan(self, path: str | Path) -> None:
        """Write the plan to a JSON file, on rank 0 only.

        Args:
            path: the file to write.

        Raises:
            PlanError: if the model is not planned yet.
        """
        self._write_on_rank_0(lambda plan: plan.save(path))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._get_planned_model(args, kwargs)(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward passes of all micro-batches, and accumulate gradients.

        Args:
            args, kwargs: arguments of the model: the global batch with
                `dataset_strategy='full_batch'`, otherwise the local batch.

        Returns:
            The loss of the global batch, a scalar on every rank.
        """
        return self._get_planned_model(args, kwargs).train_step(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the total gradient norm over all devices and stages.

        Args:
            max_norm: maximum norm.

        Returns:
            The norm before clipping, a scalar on every rank.

        Raises:
            PlanError: if the model is not planned yet.
        """
        if not self._parallel:
            raise PlanError(NOT_PLANNED)
        return self._parallel[0].clip_grad_norm_(max_norm)

    def _get_planned_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParallelModule:
        """Return the planned model; the first call plans the model for these arguments."""
        if not self._parallel:
            # The planner needs the shapes of the global batch, a rank may have passed its local
            # batch.
            args, kwargs = whole_example(self.options, args, kwargs)
            self.compile(*args, **kwargs)
        return self._parallel[0]

    def _change_options(self, **changes: Any) -> None:
        # After planning, changes would have no effect: parameters are sharded already.
        if self._parallel:
            raise PlanError(
                "the model is planned already, so its configuration cannot change\n"
                "configure the model before its first call"
            )
        self.options = replace(self.options, **changes)

    def _write_on_rank_0(self, write: Callable[[Plan], None]) -> None:
        plan = self.plan
        # All ranks have the same plan, and often the same file system.
        if not dist.is_initialized() or dist.get_rank() == 0:
            write(plan)
