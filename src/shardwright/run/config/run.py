"""A configured run, which builds the model, data and optimizer, captures the graph and plans it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.api import WithLoss
from shardwright.core.api.decide import plan_model, plan_task
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
from shardwright.core.micro_batches.interpolated_graph import GraphsBySize
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.plan import Plan
from shardwright.core.plan.ranked import RankedPlans
from shardwright.core.planner.best_candidate import best_candidate
from shardwright.core.planner.candidate import Candidate, PlanTask
from shardwright.core.planner.choose_micro_batches import fastest_over_micro_batches
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking, options_to_rank
from shardwright.core.runtime.micro_batches import (
    empty_full_batch,
    micro_batch,
    valid_num_micro_batches,
)
from shardwright.errors import ConfigError, DataError, ShardwrightError
from shardwright.models.expert_sharding import pin_expert
from shardwright.plain_data import parse_yaml
from shardwright.progress import OnProgress, ignore_progress
from shardwright.run.config.checkpointing import CheckpointPolicy
from shardwright.run.config.formats import ForeignRun, foreign_run
from shardwright.run.config.graph_cache import cached_graph
from shardwright.run.config.load import validate_config
from shardwright.run.config.objects import (
    build_model,
    build_optimizer,
    build_schedule,
    compute_dtype_of,
    load_batches,
    mark_recomputed,
    naming_file,
    wrap_errors,
)
from shardwright.run.config.plan_options import plan_options
from shardwright.run.config.schema import Config, DataSection
from shardwright.run.data.data import Batches
from shardwright.run.data.evaluation import Evaluation
from shardwright.run.loop.loop import LOSSES
from shardwright.text_files import read_text

DEVICES_PER_SERVER = 8
"""Devices per server if no cluster is set: the published MindFormers files assume servers of 8."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """A configured run, with methods that build its model, data, optimizer, graph and plan.

    Args:
        folder: the folder to which imported modules and paths are relative.
        foreign: the parsed file of another framework, whose batch size may depend on the number of
            devices; None for a file in Shardwright's own format.
        file: name of the configuration file, the prefix of each error message.
        on_progress: called before each phase: building, capturing, searching.
    """

    config: Config
    folder: Path
    foreign: ForeignRun | None = None
    file: str = "config"
    on_progress: OnProgress = field(default=ignore_progress, compare=False, repr=False)

    @staticmethod
    def from_file(path: str | Path) -> Run:
        """Load a configuration file, in Shardwright's own format or in the format of a plug-in.

        Raises:
            ConfigError: if the file does not exist, or has an unknown key or an invalid value.
        """
        name, folder = str(path), Path(path).parent
        content = parse_yaml(read_text(path, ConfigError), name, ConfigError)
        foreign = foreign_run(content, name)
        config = validate_config(content, name) if foreign is None else foreign.config()
        return Run(config, folder, foreign, name)

    def for_devices(self, devices: int) -> Run:
        """Return the run adjusted to `devices` devices.

        Raises:
            ConfigError: if the parallel degrees of the file do not multiply to `devices`.
        """
        if self.foreign is None:
            with naming_file(self.file):
                self.config.parallel.check_devices(devices)
            return self
        config = self.foreign.fitted(self.config, devices, self._count_servers(devices))
        return replace(self, config=config)

    def check_node_size(self, node_size: int) -> None:
        """Raise ConfigError if the cluster cannot have several nodes of `node_size` devices."""
        if self.cluster is not None:
            load_cluster(self.cluster).check_node_size(node_size)

    def _count_servers(self, devices: int) -> int:
        """Return the number of servers that `devices` devices occupy."""
        if self.cluster is None:
            return -(-devices // DEVICES_PER_SERVER)
        return load_cluster(self.cluster).num_nodes(devices)

    @cached_property
    def batches(self) -> Batches:
        """The training batches.

        Raises:
            DataError: if the data is missing or damaged.
        """
        return self._load_batches(self.config.data)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """The evaluation data and its schedule; None without `train.evaluation`.

        Raises:
            DataError: if the data is missing or damaged.
        """
        section = self.config.train.evaluation
        if section is None:
            return None
        try:
            batches = self._load_batches(self.config.evaluation_data)
        except DataError as error:
            raise DataError(f"`train.evaluation`: cannot load its data: {error}") from None
        return Evaluation(batches, section.every, section.batches)

    def check_data(self) -> None:
        """Load training and evaluation data to report missing data before capture and planning.

        Raises:
            DataError: if the data is missing or damaged.
        """
        # Both are loaded when they are first read.
        _ = self.batches, self.evaluation

    def _load_batches(self, data: DataSection) -> Batches:
        return load_batches(data, self.config.model, self.folder, self._param_dtype)

    @property
    def num_steps(self) -> int:
        """Number of training steps of the run, from its first epoch to its last."""
        return self.last_step(BEGINNING)

    def last_step(self, start: Position) -> int:
        """Return the number of the last step, counted from 1 over all epochs, if the run resumes
        at `start`.

        The steps before `start` count as `start.step`, even if their batch size was different.
        """
        settings = self.config.train
        # `train.steps` counts from the first step of the run, also after it has resumed.
        steps = start.step + self.batches.steps_from(start, settings.epochs)
        return steps if settings.steps is None else min(steps, settings.steps)

    def model(self) -> nn.Module:
        """Build the model with its loss; initial parameters depend only on `train.seed`.

        Raises:
            ConfigError: if the model cannot be built from its section.
        """
        torch.manual_seed(self.config.train.seed)
        with naming_file(self.file):
            net = build_model(self.config.model, self.folder, self._param_dtype)
        loss = self.config.loss_name
        return net if loss == "none" else WithLoss(net, LOSSES[loss]())

    def plan(self, devices: int) -> Plan:
        """Plan the run for `devices` devices and the shapes of its first batch.

        Needs no process group. Writes the graph, and the plan or the error, to
        `parallel.save_graphs` if the key is set.

        Raises:
            ShardwrightError: if the model cannot be built, captured or planned.
            OSError: if `parallel.save_graphs` cannot be written.
        """
        # Adjusted first: the batch size of a foreign file may depend on the number of devices.
        run, folder = self.for_devices(devices), self.config.parallel.save_graphs
        if folder is None:
            return run._search_plan(devices)
        files = SavedGraphs(self.folder / folder)
        with files.saving_errors():
            plan = run._search_plan(devices, files)
            files.plan(plan)
        return plan

    def _search_plan(self, devices: int, files: SavedGraphs | None = None) -> Plan:
        if self.config.parallel.chooses_micro_batches:
            candidate = self._search_fastest_candidate(devices)
            if files is not None:
                files.graph(candidate.model.graph)
            return candidate.plan()
        model, graph = self.capture()
        # The graph is saved before the search, so that it can be inspected if the search fails.
        if files is not None:
            files.graph(graph)
        return self.plan_graph(model, graph, devices)

    def planned(self, devices: int) -> tuple[Run, nn.Module, Graph, Plan]:
        """Return the run with the number of micro-batches set, its model, graph and plan.

        Raises:
            ShardwrightError: if the model cannot be built, captured or planned.
        """
        if not self.config.parallel.chooses_micro_batches:
            model, graph = self.capture()
            return self, model, graph, self.plan_graph(model, graph, devices)
        candidate = self._search_fastest_candidate(devices)
        # A candidate has only a graph; the model is built again for the chosen number of
        # micro-batches.
        run = self._with_num_micro_batches(candidate.pipeline.micro_batches)
        return run, run.annotated_model(), candidate.model.graph, candidate.plan()

    def with_micro_batches(self, devices: int) -> Run:
        """Choose the fastest number of micro-batches, and return the run with this number.

        Returns the run itself if the configuration sets the number.

        Raises:
            ShardwrightError: if the model cannot be built, captured or planned.
        """
        if not self.config.parallel.chooses_micro_batches:
            return self
        return self._with_num_micro_batches(
            self._search_fastest_candidate(devices).pipeline.micro_batches
        )

    def best_plans(self, devices: int, top: int) -> RankedPlans:
        """Plan the `top` fastest strategies that differ in stages, parameter storage, recomputation
        or micro-batches.

        Raises:
            ShardwrightError: if the model cannot be built, captured or planned, or the
                configuration names no cluster.
        """
        ranking = Ranking(top)
        self.for_devices(devices)._search_fastest_candidate(devices, ranking)
        return ranking.ranked()

    def _search_fastest_candidate(self, devices: int, ranking: Ranking | None = None) -> Candidate:
        """Search for the fastest plan, over all numbers of micro-batches unless the number is set.

        Args:
            ranking: collects all candidates to rank them; None to find only the fastest.

        Returns:
            The fastest candidate.
        """

        def task_of(run: Run, graphs: GraphsBySize | None = None) -> PlanTask:
            model, graph = run.capture(graphs)
            options = run._make_plan_options(model, devices)
            # A ranking compares all plans within the memory limit, not only the first that fits.
            options = options if ranking is None else options_to_rank(options)
            return plan_task(options, graph, ranking=ranking)

        if not self.config.parallel.chooses_micro_batches:
            return best_candidate([task_of(self)], ranking)
        graphs = GraphsBySize()

        def prepare(num_micro_batches: int, captured: bool) -> PlanTask:
            with graphs.deriving(not captured) as uses_derived:
                task = task_of(self._with_num_micro_batches(num_micro_batches), graphs)
            # A derived graph is captured before its plan is the answer.
            return replace(task, is_derived=uses_derived())

        # With one micro-batch the leaves are the global batch, whose divisors are the choices.
        choices = valid_num_micro_batches(self._with_num_micro_batches(1).micro_batch_to_plan())
        return fastest_over_micro_batches(choices, prepare, ranking)

    def _with_num_micro_batches(self, num_micro_batches: int) -> Run:
        parallel = self.config.parallel.model_copy(update={"micro_batches": num_micro_batches})
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))

    def capture(self, graphs: GraphsBySize | None = None) -> tuple[nn.Module, Graph]:
        """Build the model, attach the strategies of the configuration to it, and capture its graph.

        Args:
            graphs: graphs of the model for other numbers of micro-batches.

        Raises:
            ShardwrightError: if the model cannot be built or captured, or the configuration does
                not match it.
        """
        model = self.annotated_model()
        return model, self.capture_graph(model, self.micro_batch_to_plan(), graphs)

    def annotated_model(self) -> nn.Module:
        """Build the model for capture, with the strategies and recomputation of the configuration.

        Raises:
            ShardwrightError: if the model cannot be built, or the configuration does not match it.
        """
        model = self.model_to_plan()
        parallel = self.config.parallel
        if parallel.strategies is not None:
            load_strategies(model, self.folder / parallel.strategies)
        with naming_file(self.file):
            if parallel.expert is not None:
                # `layers` assigns blocks to pipeline stages, in `plan_options`.
                pin_expert(model, **parallel.expert.model_dump(exclude={"layers"}))
            # With `recompute: auto` the planner chooses what to recompute, by the memory limit.
            if parallel.recompute is not None and not parallel.recomputes_as_needed:
                mark_recomputed(model, parallel.recompute)
        return model

    def capture_graph(
        self, model: nn.Module, batch: tuple[Tensor, ...], graphs: GraphsBySize | None = None
    ) -> Graph:
        """Capture the graph of `model`, or read it from the cache.

        The strategies and recomputation of `model` replace those in a cached graph.

        Args:
            batch: one micro-batch; only shapes and dtypes matter.
            graphs: graphs of the model for other numbers of micro-batches.

        Raises:
            CaptureError: if the model cannot be captured.
        """

        def graph_of(leaves: Sequence[Tensor]) -> Graph:
            if graphs is None:
                return self._capture_or_load_graph(model, leaves)
            graph = graphs.graph(leaves, lambda leaves: self._capture_or_load_graph(model, leaves))
            # A derived graph has the tags of the models that were captured.
            return replace(graph, module_tags=module_tags(model))

        graph = graph_of(batch)
        # Captures with other numbers of samples too, to find what depends on the batch size.
        return with_whole_batch(
            graph,
            self.config.parallel.num_micro_batches,
            lambda count: graph_of(empty_full_batch(batch, count)),
            self.config.parallel.batch_norm,
        )

    def _capture_or_load_graph(self, model: nn.Module, batch: Sequence[Tensor]) -> Graph:
        # The planner accepts float32, which needs no autocast, and bfloat16.
        autocast_dtype = torch.bfloat16 if self.compute_dtype == "bfloat16" else None

        def capture_now() -> Graph:
            self.on_progress("capture")
            return capture(
                model, tuple(batch), compute_dtype=autocast_dtype, on_progress=self.on_progress
            )

        if not self._is_graph_cacheable:
            return capture_now()
        shapes = tuple((tuple(each.shape), each.dtype) for each in batch)
        config = self.config
        # All settings on which the graph depends. Not the seed: a graph has no parameter values.
        description = (
            config.model.model_dump(),
            shapes,
            autocast_dtype,
            self._param_dtype,
            config.loss_name,
        )
        # Tags (strategies, recomputation) are not part of the cache key, so a cached graph may have
        # those of another run.
        return replace(cached_graph(description, capture_now), module_tags=module_tags(model))

    @property
    def _is_graph_cacheable(self) -> bool:
        """Whether the graph depends on the configuration only, not on user code or other files."""
        model, data = self.config.model, self.config.data
        # The file of a `transformers` model may change while its path stays.
        model_in_config = model.is_language_model and not isinstance(model.hf, str)
        return model_in_config and data.seq_length is not None

    def model_to_plan(self) -> nn.Module:
        """Build the model for capture: a language model on the meta device, others deferred."""
        self.on_progress("build")
        # Language models read no values while they are built, so the meta device suffices.
        if self.config.model.is_language_model:
            with torch.device("meta"):
                return self.model()
        return self.deferred_model()

    def deferred_model(self) -> nn.Module:
        """Build the model with deferred parameters: each rank initializes only its own shards.

        Falls back to ordinary parameters if the model's code reads parameter values.
        """
        # If the error is that of the model itself, the second attempt raises it again.
        with suppress(ShardwrightError), no_init_parameters():
            return self.model()
        return self.model()

    def micro_batch_to_plan(self) -> tuple[Tensor, ...]:
        """Return an example micro-batch for capture.

        For text, these are meta tensors [micro-batch, sequence] of tokens and labels; no data is
        read.
        """
        data, num_micro_batches = self.config.data, self.config.parallel.num_micro_batches
        with wrap_errors("data", DataError):
            if data.seq_length is None:
                batch = self.example_batch()
            else:
                shape = (data.batch_size, data.seq_length)
                batch = (torch.empty(shape, dtype=torch.long, device="meta"),) * 2
            # The first micro-batch stands for all, whose shapes are equal.
            return tuple(micro_batch(list(batch), 0, num_micro_batches))

    def plan_graph(self, model: nn.Module, graph: Graph, devices: int, **changes: Any) -> Plan:
        """Plan the model and graph that `capture` returned.

        With `parallel.expert`, shardings propagate from the pinned operators to all others.

        Args:
            changes: options of the planner that override the configuration.

        Raises:
            ShardwrightError: if no plan exists, for example within the memory limit.
        """
        return plan_model(self._make_plan_options(model, devices, **changes), graph)

    def _make_plan_options(self, model: nn.Module, devices: int, **changes: Any) -> PlanOptions:
        options = plan_options(self.config, model) | {
            "cluster": self.cluster,
            "compute_dtype": self.compute_dtype,
            "on_progress": self.on_progress,
            # Written by `plan`, not by the commands that compare many plans.
            "save_graphs": None,
        }
        return PlanOptions(devices=devices, **{**options, **changes})

    @cached_property
    def compute_dtype(self) -> str | None:
        """Compute dtype of float32 parameters (mixed precision); None for float32.

        If the file sets neither `parallel.compute_dtype` nor `train.dtype`, the dtype of the
        model's published configuration is used.

        Raises:
            ConfigError: if the model's configuration does not exist.
        """
        requested, train = self.config.parallel.compute_dtype, self.config.train
        # A dtype that the user sets is not overridden by the published one.
        if requested is not None or "dtype" in train.model_fields_set:
            return requested
        with naming_file(self.file):
            return compute_dtype_of(self.config.model, self.folder)

    @property
    def cluster(self) -> str | None:
        """Name of the cluster, or path of its file; None if the configuration names none."""
        cluster = self.config.parallel.cluster
        # A cluster's name has no suffix; the path of its file does.
        if cluster is None or not Path(cluster).suffix:
            return cluster
        return str(self.folder / cluster)

    def example_batch(self) -> tuple[Tensor, ...]:
        """Return the first global batch of the training data."""
        return next(self.batches.epoch(0))

    @property
    def resumes(self) -> bool:
        """Whether the run resumes from its newest checkpoint, if one exists."""
        return self.config.train.resume

    @property
    def checkpoint_policy(self) -> CheckpointPolicy:
        """Initial weights, checkpoint folder and save interval, with the key names of the file."""
        policy = CheckpointPolicy(self.config.train, self.folder, self.file)
        return policy if self.foreign is None else self.foreign.checkpoint_policy(policy)

    def check_checkpoints(self) -> None:
        """Check that the run can start from its weights or checkpoints.

        Raises:
            CheckpointError: if the folder of a new run already has checkpoints, a run to resume has
                none, or the initial weights are missing.
        """
        self.checkpoint_policy.check()

    def checkpoints(self) -> Checkpoints | None:
        """Open the checkpoint folder of the run; None without `train.checkpoint`."""
        return self.checkpoint_policy.checkpoints()

    def save_strategies(self, plan: Plan) -> Path | None:
        """Write the strategies of `plan` to `parallel.save_strategies`.

        Returns:
            The path of the file; None if the key is not set.
        """
        name = self.config.parallel.save_strategies
        if name is None:
            return None
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save_strategies(path)
        return path

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of the configuration for the parameters of `net`."""
        return build_optimizer(self.config.optimizer, net)

    def rate(self, num_steps: int) -> Callable[[int], float] | None:
        """Return the learning rate as a function of the step, from 0; None for a constant rate.

        Args:
            num_steps: number of steps of the run, which scales the schedule.
        """
        schedule = build_schedule(self.config.optimizer)
        return None if schedule is None else lambda step: schedule.rate(step, num_steps)

    @property
    def numbers(self) -> RunNumbers:
        """Dataset size and seeds of the run, which determine the sample order and random draws."""
        config = self.config
        return RunNumbers(self.batches.samples, config.data.seed, config.train.seed)

    @property
    def _param_dtype(self) -> torch.dtype:
        return DTYPES[self.config.train.dtype]
