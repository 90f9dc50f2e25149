"""The one-object form: a model that plans itself when it is first called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.core.api.keywords import method_called_with
from shardwright.core.api.parallelize import parallelize
from shardwright.core.api.plan import plan_collectively
from shardwright.core.constraints import DatasetStrategy
from shardwright.core.constraints.load_strategies import load_strategies
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.module_wrapper import ModuleWrapper
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.pipeline_spec import AUTO
from shardwright.core.partition.schedules import schedule_spec
from shardwright.core.plan import Plan
from shardwright.core.planner.options import COUNT, KeywordOptions, PlanOptions
from shardwright.core.planner.requirement import one_of
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError, StrategyError

log = logging.getLogger("shardwright")

PARALLEL_MODES = ("semi_auto", "sharding_propagation", "recursive_programming")
NOT_PLANNED = "the model is not planned yet: call it, or call compile(*example) before"


@dataclass(frozen=True)
class AutoParallelCall(KeywordOptions):
    """The arguments of `AutoParallel`: its options, all of them keywords, after a model."""

    network: nn.Module
    parallel_mode: Annotated[str, one_of(PARALLEL_MODES)] = "semi_auto"


class AutoParallel(ModuleWrapper):
    """A model that is planned and split over all running processes when it is first called.

    What is configured on it decides the plan; each instance has its own configuration. It bears the
    parameters, buffers and names of the model it was made from, as DTensors from its first call (or
    `compile`) on, so an optimizer is made after `compile`, or handed to `sw.adopt`.

    Args:
        network: a model that returns its loss, often a `Pipeline` or a `WithLoss`.
        parallel_mode: `semi_auto`, `sharding_propagation` or `recursive_programming`.

    All further arguments are the options of `plan`, but for `devices` and `mode`.

    Raises:
        TypeError: for an option that there is not.
        StrategyError: for a mode or a value that is not valid.
    """

    @method_called_with(AutoParallelCall)
    def __init__(self, call: AutoParallelCall) -> None:
        nn.Module.__init__(self)
        self.parallel_mode = call.parallel_mode
        self.options = KeywordOptions(**call.keywords(KeywordOptions))
        self._parallel: tuple[ParallelModule, ...] = ()
        self._strategies: Path | None = None
        self._plan: Plan | None = None
        self.wrap(call.network)

    # What is configured

    def hsdp(
        self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1"
    ) -> None:
        """Shards parameters and optimizer state over devices that hold them whole.

        Args:
            shard_size: over how many devices; -1 for all that hold a parameter whole.
            threshold: parameters of fewer KB stay as they are used.
            optimizer_level: `level1`, `level2` (gradients too) or `level3` (parameters are gathered
                again for the backward pass).

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
        """Divides the devices into pipeline stages; the network is then a `Pipeline`.

        Args:
            stages: groups of devices.
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
        """How inputs arrive: `full_batch`, `data_parallel`, or an entry for each tensor input.

        Raises:
            StrategyError: for another value.
        """
        self._configure(dataset_strategy=config)

    @property
    def full_batch(self) -> bool:
        """Whether every rank receives the whole batch; False: each receives its own part."""
        return self.options.dataset_strategy == "full_batch"

    @full_batch.setter
    def full_batch(self, value: bool) -> None:
        self.dataset_strategy("full_batch" if value else "data_parallel")

    def load_operator_strategy_file(self, path: str | Path) -> None:
        """Pins operators as a file says, when the model is planned."""
        self._configure()
        self._strategies = Path(path)

    # What is done

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Plans and splits the model for an example of its call; only shapes and dtypes matter.

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
        """Writes how every operator is cut; rank 0 does."""
        self._write(lambda plan: plan.save_strategies(path))

    def save_plan(self, path: str | Path) -> None:
        """Writes the plan; rank 0 does."""
        self._write(lambda plan: plan.save(path))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned(args, kwargs)(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward over all micro-batches; gradients are in the parameters after it.

        Returns:
            The loss of the whole batch, on every rank.
        """
        return self._planned(args, kwargs).train_step(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over all devices and stages is at most
        `max_norm`.

        Returns:
            The norm before.
        """
        if not self._parallel:
            raise PlanError(NOT_PLANNED)
        return self._parallel[0].clip_grad_norm_(max_norm)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParallelModule:
        """The model as planned; plans it for this call if it is not planned yet."""
        if not self._parallel:
            args, kwargs = self._whole(args, kwargs)
            self.compile(*args, **kwargs)
        return self._parallel[0]

    def _whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """An example of the whole batch, of a call with this rank's part."""
        strategy, stages = self.options.dataset_strategy, self.options.stages
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        counts: list[tuple[int, ...]] = [(1,) * tensor.ndim for tensor in tensors]
        if strategy == "data_parallel":
            if stages == AUTO:
                raise StrategyError(
                    "stages='auto' with dataset_strategy='data_parallel': the size of the whole"
                    " batch depends on the number of stages; call compile with an example of it"
                )
            world = dist.get_world_size() if dist.is_initialized() else 1
            parts = world // stages
            rows = next((t.shape[0] for t in tensors if t.ndim), None)
            counts = [
                (parts, *(1,) * (t.ndim - 1)) if t.ndim and t.shape[0] == rows else (1,) * t.ndim
                for t in tensors
            ]
        elif not isinstance(strategy, str):
            for index, (entry, tensor) in enumerate(zip(strategy, tensors, strict=False)):
                shards = entry.shard_counts if isinstance(entry, TensorLayout) else entry
                if shards is not None and len(shards) == tensor.ndim:
                    counts[index] = shards
        shapes = iter(counts)

        def whole(tensor: Tensor) -> Tensor:
            shape = [n * c for n, c in zip(tensor.shape, next(shapes), strict=True)]
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        leaves = [whole(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return args, kwargs

    def _configure(self, **changes: Any) -> None:
        if self._parallel:
            raise PlanError("the model is planned already: configure it before its first call")
        self.options = replace(self.options, **changes)

    def _write(self, write: Callable[[Plan], None]) -> None:
        plan = self.plan
        if not dist.is_initialized() or dist.get_rank() == 0:
            write(plan)
