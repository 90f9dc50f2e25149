"""What was decided for a model, before all that follows from it is written into a plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.core.constraints import arrivals, input_entries, requested_storage, resolve
from shardwright.core.constraints.recompute import recompute_of
from shardwright.core.constraints.shard import Pins
from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.cost.memory import Memory, memory
from shardwright.core.cost.predict import Predicted, predict
from shardwright.core.cost.step_time import TimeModel, operator_seconds
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.communication import storage_as_used
from shardwright.core.partition.decisions import Decisions, Recompute, Storage
from shardwright.core.partition.fold_axes import dtensor_axes, fold_axes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.plan import Plan, make_plan
from shardwright.core.planner.options import MB, PlanOptions
from shardwright.core.planner.pipeline import pipeline_spec
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.align_axis_splits import align_axis_splits
from shardwright.core.search.assign_stages import balanced_stages
from shardwright.core.search.modes import MODES, check_takes_pins
from shardwright.core.search.nearby_cuts import group_equal_axes
from shardwright.core.search.optimizer_sharding import sharded_storage
from shardwright.core.search.reassign_equal_axes import reassign_equal_axes
from shardwright.core.search.request import SearchRequest
from shardwright.core.search.ring_cuts import ring_cuts
from shardwright.errors import StrategyError
from shardwright.progress import share_reporter

log = logging.getLogger("shardwright.search")


@dataclass(frozen=True)
class CapturedModel:
    """A captured model and what its user attached to it.

    Args:
        modules: names that can be stages.
        training: the mode it was captured in.
        loss_reduction: of the losses of its micro-batches.
        dry_runs: of its parts, whose results serve every candidate.
        searched: the cuts of earlier searches and their seconds, by the arguments of each.
        divisions: of the operators into chunks, for cuts of earlier searches.
        predictions: of earlier candidates; searches with other arguments often decide the same.
    """

    graph: Graph
    pins: Pins
    modules: tuple[str, ...]
    training: bool
    loss_reduction: str = "mean"
    dry_runs: DryRunCache = field(default_factory=DryRunCache)
    searched: dict[object, tuple[Sequence[Mapping[str, Cuts]], float]] = field(default_factory=dict)
    divisions: dict[object, Mapping[str, int]] = field(default_factory=dict)
    predictions: list[tuple[tuple[object, ...], Predicted]] = field(default_factory=list)

    @cached_property
    def recompute(self) -> Mapping[str, Recompute]:
        """What the user has marked."""
        return recompute_of(self.graph)

    @property
    def is_pinned(self) -> bool:
        """Whether the user has pinned operators or parameters."""
        return bool(self.pins.strategies or self.pins.parameters)


@dataclass(frozen=True)
class Candidate:
    """Decisions with the options that they were made for.

    Args:
        mesh: the device matrix of one stage, with an axis for each prime factor.
        measured: what each device needs, where that was found out.
        pinned: cuts that are fixed.
    """

    model: CapturedModel
    options: PlanOptions
    mesh: DeviceMatrix
    decisions: Decisions
    pipeline: PipelineSpec
    search_seconds: float
    measured: Memory | None = None
    pinned: Mapping[str, Cuts] = field(default_factory=dict)

    @cached_property
    def partitioned(self) -> Partitioned:
        """The model, divided as decided."""
        return Partitioned(self.model.graph, self.mesh, self.decisions, self.pipeline)

    @cached_property
    def folded(self) -> Partitioned:
        """The same on a device matrix of as few axes as it needs."""
        return fold_axes(self.partitioned)

    @cached_property
    def predicted(self) -> Predicted | None:
        """What a step takes; None if no cluster was named."""
        if self.options.cluster is None:
            return None
        cluster, known = self.options.known_cluster, self.model.predictions
        decided = (cluster, self.mesh, self.decisions, self.pipeline)
        found = next((predicted for others, predicted in known if others == decided), None)
        if found is None:
            self._report("step time")
            found = predict(self.partitioned, cluster)
            known.append((decided, found))
        return found

    @cached_property
    def parameter_axes(self) -> int:
        """How many axes the mesh of DTensors has."""
        return len(dtensor_axes(self.partitioned))

    @cached_property
    def aligned(self) -> Candidate:
        """On a cluster the same with operators that divide axes in the same places, where the
        parameters' mesh has many axes, gets fewer, and no step is predicted to take longer. It
        takes many predictions, so it is for those that ask."""
        many = self.options.cluster is not None and self.parameter_axes > MANY_AXES
        return _aligned(self) if many else self

    @property
    def shards_storage(self) -> bool:
        """Whether parameters are stored otherwise than they are used."""
        used = storage_as_used(self.model.graph, self.mesh, self.decisions.cuts)
        return self.decisions.storage != used

    @property
    def sent(self) -> int:
        """Bytes that a device of the busiest stage sends in a step."""
        return max(map(sum, self.partitioned.step_bytes))

    @property
    def seconds(self) -> float:
        """Of a step; 0 if no cluster was named."""
        return 0.0 if self.predicted is None else self.predicted.seconds

    def memory(
        self, decisions: Decisions | None = None, stages: Container[int] | None = None
    ) -> Memory:
        """What each device needs, with these decisions or with others; of some stages or of all."""
        self._report("memory")
        partitioned = self.partitioned
        if decisions is not None:
            partitioned = replace(partitioned, decisions=decisions)
        optimizer, known = self.options.optimizer, self.model.dry_runs
        return memory(partitioned, optimizer, known, stages=stages)

    def _report(self, doing: str) -> None:
        self.options.on_progress(f"{doing}: {self.options.in_words()}")

    def plan(self) -> Plan:
        """The plan, on the folded device matrix."""
        model, options = self.model, self.options
        plan = make_plan(
            self.folded,
            mode=options.mode,
            options=options.of_search,
            search_seconds=self.search_seconds,
            training=model.training,
            pins=model.pins.strategies,
            predicted=self.predicted,
            memory_limit=options.device_memory,
            optimizer=options.optimizer,
            dry_runs=model.dry_runs,
            pricing=options.pricing(self.pipeline),
        )
        if self.measured is not None:
            # Devices need the same on a folded matrix.
            plan.analysis.memory = self.measured
        return plan


Decide = Callable[[PlanOptions], Sequence[Candidate]]
"""Decides a model with these options, in one way or several."""


def candidates(model: CapturedModel, options: PlanOptions) -> Sequence[Candidate]:
    """A model, decided with exactly these options. Of a search by seconds the objective is simpler
    than what is predicted for a whole plan, and operators that are computed again are none of its
    business, so data parallel stands beside it.

    Raises: as `plan`.
    """
    found = _decide(model, options, options.mode)
    if options.mode != "recursive_programming" or options.cost_model != "time":
        return found
    if not model.is_pinned:
        # Where the batch cannot be divided so there is none.
        with suppress(StrategyError):
            found += _decide(model, options, "data_parallel")
    return found


def _decide(model: CapturedModel, options: PlanOptions, mode: str) -> list[Candidate]:
    """One for each answer of the search."""
    graph, pins = model.graph, model.pins
    check_takes_pins(mode, pins.strategies)
    pipeline = pipeline_spec(options, graph, model.modules, model.loss_reduction)
    entries = input_entries(graph, options.dataset_strategy)
    of_stage = options.devices // pipeline.stages
    nodes = () if options.cluster is None else options.known_cluster.nodes(options.devices)
    fixed = resolve(graph, of_stage, pins.strategies, {**pins.parameters, **entries}, nodes)
    arriving = arrivals(graph, fixed.mesh, options.dataset_strategy)
    pricing = options.pricing(pipeline)
    request = SearchRequest(
        *(graph, fixed.mesh, fixed.cuts, fixed.outputs, arriving, pricing),
        mem_coeff=options.coefficient,
        order=options.order,
        log_costs=options.log_costs,
    )
    shared = None if pricing is None else pricing.sharing
    times = pipeline.stages, pipeline.micro_batches
    weighed = options.of_search.values() if MODES[mode].takes_pricing else ()
    key = (fixed.mesh, mode, *weighed, *times, shared)
    if key not in model.searched:
        on_share = share_reporter(options.on_progress, f"search: {options.in_words()}")
        if options.log_costs and mode == options.mode and not MODES[mode].takes_pricing:
            log.info("mode=%r weighs no costs, so that there are none to log", mode)
        started = time.perf_counter()
        answers = MODES[mode].searches(replace(request, on_share=on_share))
        model.searched[key] = answers, time.perf_counter() - started
    answers, seconds = model.searched[key]
    found = []
    # Without a cluster nothing says which answer is the best.
    answers = answers if options.cluster is not None else answers[:1]
    if options.cluster is not None and options.limit is not None:
        rings = (ring_cuts(graph, fixed.mesh, c, fixed.cuts, options.limit) for c in answers)
        answers = [*answers, *(cuts for cuts in rings if cuts is not None)]
    for number, cuts in enumerate(answers):
        divided = pipeline
        if pipeline.stages > 1 and options.stage_config is None:
            division = key, number, pipeline.num_chunks
            if division not in model.divisions:
                model.divisions[division] = _balanced(model, options, fixed.mesh, pipeline, cuts)
            divided = replace(pipeline, chunk_of=model.divisions[division])
        decisions = Decisions(
            cuts,
            _storage(model, fixed.mesh, cuts, options),
            fixed.outputs,
            arriving,
            sharding=options.sharding,
            bucket_bytes=int(options.bucket_mb * MB),
            recompute=model.recompute,
        )
        parts = model, options, fixed.mesh, decisions, divided, seconds
        candidate = Candidate(*parts, pinned=fixed.cuts)
        found.append(_nested(candidate) if options.cluster is None else candidate)
    return found


def _balanced(
    model: CapturedModel,
    options: PlanOptions,
    mesh: DeviceMatrix,
    pipeline: PipelineSpec,
    cuts: Mapping[str, Cuts],
) -> Mapping[str, int]:
    """For each operator the number of its chunk, of chunks that take about as long."""
    work = None
    if options.cluster is not None:
        time = TimeModel(options.known_cluster, mesh, pipeline.stages)
        work = operator_seconds(model.graph, time, cuts)
    return balanced_stages(model.graph, pipeline.num_chunks, work)


MANY_AXES = 4
"""With more axes of the parameters' mesh DTensor's first step takes over ten seconds, and with each
further axis about six times as long."""


def _aligned(candidate: Candidate) -> Candidate:
    """The same with operators that divide axes in the same places, if that is better."""
    model, mesh, options = candidate.model, candidate.mesh, candidate.options
    levels = TimeModel(options.known_cluster, mesh, candidate.pipeline.stages).links.levels
    best = candidate
    for axes in group_equal_axes(
        mesh, [dict(enumerate(levels)), dict(enumerate(mesh.device_matrix))]
    ):
        others = [best]
        for cuts in align_axis_splits(model.graph, mesh, best.decisions.cuts, best.pinned, axes):
            storage = _storage(model, mesh, cuts, options)
            decisions = replace(best.decisions, cuts=cuts, storage=storage)
            others.append(replace(best, decisions=decisions))
        best = min(
            (other for other in others if other.seconds <= best.seconds),
            key=lambda one: (one.parameter_axes, one.seconds),
        )
    return best


def _nested(candidate: Candidate) -> Candidate:
    """The same with its axes dealt out anew, if that sends no more: without a cluster all links are
    alike."""
    model, mesh, decisions = candidate.model, candidate.mesh, candidate.decisions
    cuts = reassign_equal_axes(model.graph, mesh, decisions.cuts, candidate.pinned)
    if cuts == decisions.cuts:
        return candidate
    storage = _storage(model, mesh, cuts, candidate.options)
    nested = replace(candidate, decisions=replace(decisions, cuts=cuts, storage=storage))
    return min((nested, candidate), key=lambda one: (one.sent, len(one.folded.mesh.device_matrix)))


def _storage(
    model: CapturedModel, mesh: DeviceMatrix, cuts: Mapping[str, Cuts], options: PlanOptions
) -> Storage:
    """How each parameter is stored: as used, as pinned, or sharded further where requested."""
    graph, pinned = model.graph, model.pins.parameters
    storage: Storage = requested_storage(graph, mesh, pinned, storage_as_used(graph, mesh, cuts))
    if options.sharding is None:
        return storage
    return sharded_storage(graph, mesh, cuts, storage, options.sharding, pinned)
