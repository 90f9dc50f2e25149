"""From a `Config` to the objects that it describes, and to a plan of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.api import WithLoss
from shardwright.core.api.decide import decide_model, plan_model
from shardwright.core.api.save_graphs import SavedGraphs
from shardwright.core.capture.annotations import module_tags
from shardwright.core.capture.capture import capture
from shardwright.core.checkpoint.checkpoint import Checkpoints
from shardwright.core.checkpoint.manifest import RunNumbers
from shardwright.core.checkpoint.position import BEGINNING, Position
from shardwright.core.constraints.load_strategies import load_strategies
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.deferred import no_init_parameters
from shardwright.core.graph.graph import Graph
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.plan import Plan
from shardwright.core.plan.ranked import RankedPlans
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.choose_micro_batches import with_best_micro_batches
from shardwright.core.planner.mean_of_samples import with_mixing
from shardwright.core.planner.options import FileOptions, PlanOptions
from shardwright.core.planner.ranking import Ranking, options_to_rank
from shardwright.core.runtime.micro_batches import micro_batch, numbers_of_pieces, with_samples
from shardwright.errors import ConfigError, DataError, ShardwrightError
from shardwright.models.expert_sharding import expert_stages, pin_expert
from shardwright.progress import OnProgress, ignore_progress, nested_progress
from shardwright.run.config.checkpointing import CheckpointPolicy
from shardwright.run.config.formats import ForeignRun, foreign_run
from shardwright.run.config.graph_cache import cached_graph
from shardwright.run.config.load import validated
from shardwright.run.config.objects import (
    build_model,
    build_optimizer,
    build_schedule,
    compute_dtype_of,
    errors_of,
    load_samples,
    mark_recomputed,
)
from shardwright.run.config.schema import Config, DataSection
from shardwright.run.data.data import Batches
from shardwright.run.data.evaluation import Evaluation
from shardwright.run.loop.loop import LOSSES
from shardwright.text_files import parse_yaml, read_text

DEVICES_OF_A_SERVER = 8
"""The published files are for servers of so many; so is a run without a cluster."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """A configuration and the folder that its modules and paths are relative to.

    Args:
        foreign: the run as a file of another framework describes it; its batch size may depend
            on the number of devices.
        file: its name, which errors start with.
        on_progress: called with what is being built, captured and searched.
    """

    config: Config
    folder: Path
    foreign: ForeignRun | None = None
    file: str = "config"
    on_progress: OnProgress = field(default=ignore_progress, compare=False, repr=False)

    @staticmethod
    def from_file(path: str | Path) -> Run:
        """The run of a configuration in Shardwright's own keys, or in an installed format.

        Raises:
            ConfigError: as `shardwright.run.config.load.load`.
        """
        name, folder = str(path), Path(path).parent
        content = parse_yaml(read_text(path, ConfigError), name, ConfigError)
        foreign = foreign_run(content, name)
        config = validated(content, name) if foreign is None else foreign.config()
        return Run(config, folder, foreign, name)

    def on(self, devices: int) -> Run:
        """The run on so many devices.

        Raises:
            ConfigError: the numbers of the file do not fit `devices`.
        """
        if self.foreign is None:
            with self._naming_file():
                self.config.parallel.check_devices(devices)
            return self
        fitted = self.foreign.fitted(self.config, devices, self._servers(devices))
        return replace(self, config=fitted)

    def check_nodes(self, size: int) -> None:
        """Raises: ConfigError: several nodes of `size` devices are none of the cluster's."""
        if self.cluster is not None:
            load_cluster(self.cluster).check_nodes(size)

    def _servers(self, devices: int) -> int:
        """How many servers the cluster has for so many devices."""
        if self.cluster is None:
            return -(-devices // DEVICES_OF_A_SERVER)
        return load_cluster(self.cluster).servers(devices)

    @cached_property
    def batches(self) -> Batches:
        """Raises: DataError: data that is missing or damaged."""
        return self._batches(self.config.data)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """What the loss is computed on beside training, and when.

        Raises:
            DataError: as `batches`.
        """
        section = self.config.train.evaluation
        if section is None:
            return None
        try:
            batches = self._batches(self.config.evaluation_data)
        except DataError as error:
            raise DataError(f"train.evaluation: {error}") from None
        return Evaluation(batches, section.every, section.batches)

    def check_data(self) -> None:
        """Raises: DataError: as `batches` and `evaluation`, which are there after it."""
        _ = self.batches, self.evaluation

    def _batches(self, data: DataSection) -> Batches:
        samples = load_samples(data, self.config.model, self.folder)
        cast = tuple(
            t.to(self._dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
            for t in samples
        )
        return Batches(cast, data.batch_size, data.seed)

    @property
    def num_steps(self) -> int:
        """Steps of the whole training run."""
        return self.last_step(BEGINNING)

    def last_step(self, start: Position) -> int:
        """The number of steps, from the beginning on, after which a run ends that goes on at
        `start`; of earlier steps the batches may have had another size."""
        settings = self.config.train
        steps = start.step + self.batches.steps_from(start, settings.epochs)
        return steps if settings.steps is None else min(steps, settings.steps)

    def model(self) -> nn.Module:
        """The model with its loss, with parameters that depend on `train.seed` only.

        Raises:
            ConfigError: it cannot be built from its description.
        """
        torch.manual_seed(self.config.train.seed)
        with self._naming_file():
            net = build_model(self.config.model, self.folder, self._dtype)
        loss = self.config.loss_name
        return net if loss == "none" else WithLoss(net, LOSSES[loss]())

    def plan(self, devices: int, files: SavedGraphs | None = None) -> Plan:
        """The plan for `devices` devices, made for the first batch. Needs no process group.

        Args:
            files: where the graph is saved, and then the plan, or the error that there was.
        """
        return self.on(devices)._planned(devices, files)

    def _planned(self, devices: int, files: SavedGraphs | None) -> Plan:
        try:
            run = self.with_micro_batches(devices)
            model, graph = run.captured()
            if files is not None:
                files.graph(graph)
            plan = run.plan_of(model, graph, devices)
        except ShardwrightError as error:
            if files is not None:
                files.error(error)
            raise
        if files is not None:
            files.plan(plan)
        return plan

    def with_micro_batches(self, devices: int) -> Run:
        """The run with the number of micro-batches that takes the least time, where its
        configuration leaves that open.

        Raises:
            ShardwrightError: as `plan`.
        """
        if not self.config.parallel.chooses_micro_batches:
            return self
        return self._in_micro_batches(self._decided(devices).pipeline.micro_batches)

    def best_plans(self, devices: int, top: int) -> RankedPlans:
        """The fastest plans of different kinds, as `shardwright.best_plans` finds them.

        Args:
            top: of so many kinds.

        Raises:
            ShardwrightError: as `plan`, and without a cluster.
        """
        ranking = Ranking(top)
        self.on(devices)._decided(devices, ranking)
        return ranking.ranked()

    def _decided(self, devices: int, ranking: Ranking | None = None) -> Candidate:
        """What the plan is made of, with the number of micro-batches that takes the least time."""

        def decided(run: Run) -> Candidate:
            model, graph = run.captured()
            options = run._options(model, devices)
            options = options if ranking is None else options_to_rank(options)
            return decide_model(options, graph, ranking=ranking)

        def with_number(number: int) -> Candidate:
            part = f"{number} micro-batches", numbers.index(number), len(numbers)
            report = nested_progress(self.on_progress, *part)
            return decided(replace(self._in_micro_batches(number), on_progress=report))

        if not self.config.parallel.chooses_micro_batches:
            return decided(self)
        numbers = numbers_of_pieces(self._in_micro_batches(1).micro_batch_to_plan())
        return with_best_micro_batches(numbers, with_number)

    def _in_micro_batches(self, number: int) -> Run:
        parallel = self.config.parallel.model_copy(update={"micro_batches": number})
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))

    def captured(self) -> tuple[nn.Module, Graph]:
        """The model with all marks that the configuration puts on its operators, and its graph.

        Raises:
            ShardwrightError: it cannot be built or captured, or the configuration does not fit it.
        """
        model, batch = self.model_to_plan(), self.micro_batch_to_plan()
        parallel = self.config.parallel
        if parallel.strategies is not None:
            load_strategies(model, self.folder / parallel.strategies)
        with self._naming_file():
            if parallel.expert is not None:
                pin_expert(model, **parallel.expert.model_dump(exclude={"layers"}))
            if parallel.recompute is not None and not parallel.recomputes_as_needed:
                mark_recomputed(model, parallel.recompute)
        return model, self.graph_of(model, batch)

    def graph_of(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Graph:
        """The graph of `model` on `batch`, a micro-batch, with what is attached to its modules;
        captured, or read from the cache.

        Raises:
            CaptureError: it cannot be captured.
        """
        graph, number = self._graph_of(model, batch), self.config.parallel.num_micro_batches
        return with_mixing(
            graph, number, lambda samples: self._graph_of(model, with_samples(batch, samples))
        )

    def _graph_of(self, model: nn.Module, batch: Sequence[Tensor]) -> Graph:
        half = torch.bfloat16 if self.compute_dtype == "bfloat16" else None

        def captured() -> Graph:
            self.on_progress("capture")
            return capture(model, tuple(batch), compute_dtype=half, on_progress=self.on_progress)

        if not self._describes_graph:
            return captured()
        shapes = tuple((tuple(each.shape), each.dtype) for each in batch)
        config = self.config
        description = (config.model.model_dump(), shapes, half, self._dtype, config.loss_name)
        return replace(cached_graph(description, captured), module_tags=module_tags(model))

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Errors inside name the file."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None

    @property
    def _describes_graph(self) -> bool:
        """Whether the configuration alone says what is captured: no code and no file of the user
        does."""
        model, data = self.config.model, self.config.data
        written = model.is_language_model and not isinstance(model.hf, str)
        return written and data.seq_length is not None

    def model_to_plan(self) -> nn.Module:
        """The model without memory for its parameters, unless the code of a target needs it."""
        self.on_progress("build")
        if self.config.model.is_language_model:
            with torch.device("meta"):
                return self.model()
        return self.deferred_model()

    def deferred_model(self) -> nn.Module:
        """Likewise, with what initializes them; of a model of the meta device nothing does."""
        with suppress(ShardwrightError), no_init_parameters():
            return self.model()
        return self.model()

    def micro_batch_to_plan(self) -> tuple[Tensor, ...]:
        """An example of what the model is captured for; of texts only the shape is needed."""
        data, pieces = self.config.data, self.config.parallel.num_micro_batches
        with errors_of("data", DataError):
            if data.seq_length is None:
                batch = self.example_batch()
            else:
                shape = (data.batch_size, data.seq_length)
                batch = (torch.empty(shape, dtype=torch.long, device="meta"),) * 2
            return tuple(micro_batch(list(batch), 0, pieces))

    def plan_of(self, model: nn.Module, graph: Graph, devices: int, **changes: Any) -> Plan:
        """The plan of what `captured` returned. Operators that an expert has not pinned follow
        those that are.

        Args:
            changes: options in place of those of the configuration.
        """
        return plan_model(self._options(model, devices, **changes), graph)

    def _options(self, model: nn.Module, devices: int, **changes: Any) -> PlanOptions:
        parallel = self.config.parallel
        by_expert = parallel.expert is not None
        options: dict[str, Any] = {
            **parallel.keywords(FileOptions),
            "mode": "sharding_propagation" if by_expert else parallel.mode,
            "cluster": self.cluster,
            "compute_dtype": self.compute_dtype,
            "hsdp": None if parallel.hsdp is None else parallel.hsdp.model_dump(),
            "recompute": "auto" if parallel.recomputes_as_needed else None,
            "optimizer": self.config.optimizer.name,
            "on_progress": self.on_progress,
        }
        if self._has_equal_stages and isinstance(parallel.stages, int) and parallel.stages > 1:
            layers = parallel.expert.layers if parallel.expert else None
            stage_config = expert_stages(model, parallel.stages, layers)
            options |= {"stages": 1, "stage_config": stage_config}
        return PlanOptions(devices=devices, **{**options, **changes})

    @property
    def _has_equal_stages(self) -> bool:
        """Whether each stage takes equally many blocks in a row, as an expert divides them."""
        parallel, model = self.config.parallel, self.config.model
        by_hand = parallel.mode == "semi_auto" and model.is_language_model
        schedule = SCHEDULES.get(parallel.schedule)
        return by_hand and schedule is not None and not schedule.chunked

    @cached_property
    def compute_dtype(self) -> str | None:
        """The dtype in which parameters of float32 are computed. Where the file names neither that
        nor the dtype of parameters, it is that of the model's own configuration.

        Raises:
            ConfigError: the model's configuration does not exist.
        """
        requested, train = self.config.parallel.compute_dtype, self.config.train
        if requested is not None or "dtype" in train.model_fields_set:
            return requested
        with self._naming_file():
            return compute_dtype_of(self.config.model, self.folder)

    @property
    def cluster(self) -> str | None:
        """The name of the cluster, or the path of its file."""
        cluster = self.config.parallel.cluster
        if cluster is None or not Path(cluster).suffix:
            return cluster
        return str(self.folder / cluster)

    def example_batch(self) -> tuple[Tensor, ...]:
        return next(self.batches.epoch(0))

    @property
    def resumes(self) -> bool:
        """Whether the run resumes from its newest checkpoint, if there is one."""
        return self.config.train.resume

    @property
    def checkpoint_policy(self) -> CheckpointPolicy:
        """What the run starts from and saves."""
        policy = CheckpointPolicy(self.config.train, self.folder, self.file)
        return policy if self.foreign is None else self.foreign.checkpoint_policy(policy)

    def check_resumes(self) -> None:
        """Raises: CheckpointError: as `CheckpointPolicy.check`."""
        self.checkpoint_policy.check()

    def checkpoints(self) -> Checkpoints | None:
        """The run's checkpoints; None where it saves none."""
        return self.checkpoint_policy.checkpoints()

    def save_strategies(self, plan: Plan) -> Path | None:
        """Writes the strategies of `plan` where the configuration says; None where it does not."""
        name = self.config.parallel.save_strategies
        if name is None:
            return None
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save_strategies(path)
        return path

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self.config.optimizer, parameters)

    def rate(self, last: int) -> Callable[[int], float] | None:
        """The learning rate of each step of a run of `last` steps, where it changes."""
        schedule = build_schedule(self.config.optimizer)
        return None if schedule is None else lambda step: schedule.rate(step, last)

    @property
    def numbers(self) -> RunNumbers:
        """The numbers on which the order of samples and the random numbers depend."""
        config = self.config
        return RunNumbers(self.batches.samples, config.data.seed, config.train.seed)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.config.train.dtype]
