"""Candidates: decisions for a captured model with their predicted step time and memory.

Only the best candidate becomes a plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.core.constraints import (
    input_entries,
    resolve,
    sharded_input_axes,
)
from shardwright.core.cost.memory import Memory, memory
from shardwright.core.cost.predict import (
    ChunkTime,
    Predicted,
    chunk_times,
    min_step_seconds,
    predict,
    with_longer_backward,
)
from shardwright.core.cost.step_time import operator_seconds
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.fold_axes import dtensor_axes, fold_axes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.plan import Plan, make_plan
from shardwright.core.planner.captured_model import CapturedModel, SharedCuts
from shardwright.core.planner.options import MB, PlanOptions
from shardwright.core.planner.pipeline import pipeline_spec
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.align_axis_splits import align_axis_splits
from shardwright.core.search.assign_stages import balanced_chunks
from shardwright.core.search.modes import MODES, check_takes_pins
from shardwright.core.search.nearby_cuts import group_equal_axes
from shardwright.core.search.reassign_equal_axes import reassign_equal_axes
from shardwright.core.search.request import SearchRequest
from shardwright.core.search.ring_cuts import ring_cuts
from shardwright.errors import StrategyError
from shardwright.progress import share_reporter

log = logging.getLogger("shardwright.search")


@dataclass(frozen=True)
class Candidate:
    """Decisions for a model, and the options with which they were made.

    Args:
        mesh: device matrix of one stage, with axes of prime sizes.
        search_seconds: seconds that the search took.
        measured_memory: memory of each stage, measured by dry runs; None if not measured.
        pinned: cuts fixed by the user, by operator name.
        is_baseline: whether the cuts are plain data parallelism, with which every search competes.
    """

    model: CapturedModel
    options: PlanOptions
    mesh: DeviceMatrix
    decisions: Decisions
    pipeline: PipelineSpec
    search_seconds: float
    measured_memory: Memory | None = None
    pinned: Mapping[str, Cuts] = field(default_factory=dict)
    is_baseline: bool = False

    @cached_property
    def partitioned(self) -> Partitioned:
        """The model, partitioned by `decisions` on `mesh`."""
        return Partitioned(self.model.graph, self.mesh, self.decisions, self.pipeline)

    @cached_property
    def folded(self) -> Partitioned:
        """The model, partitioned by `decisions` on the device matrix with the fewest axes."""
        return fold_axes(self.partitioned)

    @cached_property
    def predicted(self) -> Predicted | None:
        """Predicted step time and its parts; None without a cluster."""
        if self.options.cluster is None:
            return None
        cluster, optimizer = self.options.resolved_cluster, self.options.optimizer
        return predict(self.partitioned, cluster, optimizer=optimizer, times=self._chunk_times)

    @property
    def _chunk_times(self) -> Sequence[ChunkTime]:
        """Predicted seconds of each chunk, from the cache of the model or computed."""
        cluster, pipeline = self.options.resolved_cluster, self.pipeline
        optimizer = self.options.optimizer
        key = (self.mesh, self.decisions, pipeline.chunk_of, cluster, optimizer)
        # A schedule that splits the backward pass starts fewer redistributions early.
        counts = pipeline.stages, pipeline.chunks, pipeline.schedule_spec.splits_backward
        cached = self.model.chunk_times.setdefault(counts, [])
        # Compared one by one, as decisions have dicts and cannot be hashed; few are cached.
        times = next((value for cached_key, value in cached if cached_key == key), None)
        if times is None:
            self._report_activity("step time")
            times = chunk_times(
                self.partitioned,
                cluster,
                optimizer=optimizer,
                cached_times=self.model.step_times(cluster),
            )
            cached.append((key, times))
        return times

    @property
    def micro_batch_seconds(self) -> float:
        """Predicted forward plus backward seconds of a micro-batch over all stages, on a
        cluster."""
        steps = [each.step for each in self._chunk_times]
        return sum(step.forward_seconds + step.backward_seconds for step in steps)

    def seconds_with_recompute(
        self, stage_seconds: Sequence[float], simulates_pipeline: bool = True
    ) -> float:
        """Return the predicted seconds of a step in which stages recompute more; 0 without a
        cluster.

        Args:
            stage_seconds: further seconds of the backward passes of a micro-batch, of each stage.
            simulates_pipeline: whether to simulate the passes of all stages; otherwise the result
                is a lower bound, which takes less time.
        """
        if self.options.cluster is None:
            return 0.0
        if simulates_pipeline and not any(stage_seconds):
            return self.seconds
        cluster = self.options.resolved_cluster
        times = with_longer_backward(self._chunk_times, self.pipeline, stage_seconds)
        if not simulates_pipeline:
            return min_step_seconds(self.partitioned, cluster, times)
        return predict(self.partitioned, cluster, times=times).seconds

    @cached_property
    def parameter_axes(self) -> int:
        """Number of axes of the `DeviceMesh` on which parameters are DTensors."""
        # On axes of prime sizes: `dtensor_axes` joins more of them than folding does, neighbors or
        # not.
        return len(dtensor_axes(self.partitioned))

    @cached_property
    def aligned(self) -> Candidate:
        """This candidate, or an equally fast variant whose parameters need fewer mesh axes.

        Variants are searched only if `parameter_axes` exceeds `MAX_PARAMETER_AXES`. As the search
        takes many predictions, read this property only if the candidate may be chosen.
        """
        has_many_axes = (
            self.options.cluster is not None and self.parameter_axes > MAX_PARAMETER_AXES
        )
        return _align_candidate(self) if has_many_axes else self

    @property
    def cuts(self) -> SharedCuts:
        """The cuts of all operators; candidates of one model with equal cuts return one object."""
        return self.model.share(self.decisions.cuts)

    @property
    def shards_storage(self) -> bool:
        """Whether any parameter is stored in a layout other than that of its uses, as with ZeRO."""
        used = default_storage(self.model.graph, self.mesh, self.decisions.cuts)
        return self.decisions.storage != used

    @property
    def communicated_bytes(self) -> int:
        """Communication volume in bytes per device and step, on the stage where it is largest."""
        return max(map(sum, self.partitioned.step_bytes))

    @property
    def seconds(self) -> float:
        """Predicted step time in seconds; 0 without a cluster."""
        return 0.0 if self.predicted is None else self.predicted.seconds

    def with_sharding_of(self, options: PlanOptions) -> Candidate:
        """Return a candidate with the same cuts, and storage sharded as in `options`."""
        storage = self.model.storage(self.mesh, self.cuts, options.sharding)
        decisions = replace(self.decisions, storage=storage, sharding=options.sharding)
        # The memory was measured with the other storage.
        return replace(self, options=options, decisions=decisions, measured_memory=None)

    def memory(
        self, decisions: Decisions | None = None, stages: Container[int] | None = None
    ) -> Memory:
        """Measure memory per device by dry runs.

        Args:
            decisions: decisions to measure; by default the candidate's decisions.
            stages: indices of the stages to measure; by default all.
        """
        self._report_activity("memory")
        partitioned = self.partitioned
        if decisions is not None:
            partitioned = replace(partitioned, decisions=decisions)
        return memory(partitioned, self.options.optimizer, self.model.dry_runs, stages=stages)

    def _report_activity(self, activity: str) -> None:
        self.options.on_progress(f"{activity}: {self.options.describe()}")

    def plan(self) -> Plan:
        """Return the plan of this candidate, on the device matrix with the fewest axes."""
        model, options = self.model, self.options
        plan = make_plan(
            self.folded,
            mode=options.mode,
            options=options.search_options,
            search_seconds=self.search_seconds,
            training=model.training,
            pins=model.pins.strategies,
            predicted=self.predicted,
            memory_limit=options.recorded_limit,
            optimizer=options.optimizer,
            dry_runs=model.dry_runs,
            timed_step=options.timed_step(self.pipeline),
        )
        if self.measured_memory is not None:
            # Folding renames axes and changes no local shape, so memory is the same.
            plan.analysis.memory = self.measured_memory
        return plan


@dataclass(frozen=True, eq=False)
class PlanTask:
    """A captured model, and the options to plan it with.

    Args:
        is_derived: whether the graph was derived from graphs of other batch sizes instead of
            captured, or depends on a derived graph.
    """

    model: CapturedModel
    options: PlanOptions
    is_derived: bool = False


FindCandidates = Callable[[PlanOptions], Sequence[Candidate]]
"""Function that searches with the given options and returns one or more candidates."""


def candidates(model: CapturedModel, options: PlanOptions) -> Sequence[Candidate]:
    """Search with `options`, ignoring the memory limit, and return the candidates to choose from.

    Raises:
        StrategyError: if no operator can be sharded, or the requested stages or pins are invalid.
        PlanError: if the model returns several losses with several micro-batches.
    """
    results = _search_with_mode(model, options, options.mode)
    # Without predicted seconds there is nothing by which to compare data parallelism with the
    # result.
    if options.mode != "recursive_programming" or options.cost_model != "time":
        return results
    # The search's objective is simpler than the prediction of a whole plan and ignores
    # recomputation, so that plain data parallelism can turn out to be faster.
    if not model.is_pinned:
        # Data parallelism is impossible if the batch is not divisible by the number of devices.
        with suppress(StrategyError):
            baselines = _search_with_mode(model, options, "data_parallel")
            results += [replace(each, is_baseline=True) for each in baselines]
    return results


def _search_with_mode(model: CapturedModel, options: PlanOptions, mode: str) -> list[Candidate]:
    """Return a candidate for each result of the search mode `mode`."""
    graph, pins = model.graph, model.pins
    check_takes_pins(mode, pins.strategies)
    pipeline = pipeline_spec(options, graph, model.modules, model.loss_reduction, model.batch_dims)
    entries = input_entries(graph, options.dataset_strategy, options.axis_matrix)
    # All stages have the same device matrix, so one search decides the operators of all of them.
    stage_devices = options.devices // pipeline.stages
    # `resolve` puts the axes that fit into a node innermost, over the fastest links.
    nodes = (
        ()
        if options.cluster is None
        else options.resolved_cluster.inner_group_sizes(options.devices)
    )
    fixed = resolve(graph, stage_devices, pins.strategies, {**pins.parameters, **entries}, nodes)
    sharded_inputs = sharded_input_axes(
        graph, fixed.mesh, options.dataset_strategy, options.axis_matrix
    )
    timed_step = options.timed_step(pipeline)
    request = SearchRequest(
        *(graph, fixed.mesh, fixed.cuts, fixed.outputs, sharded_inputs, timed_step),
        mem_coeff=options.fixed_mem_coeff,
        order=options.order,
        batch_dims=options.batch_dims,
        log_costs=options.log_costs,
    )
    # All arguments on which the result of a search depends: candidates with equal arguments share
    # the result.
    shard_size = None if timed_step is None else timed_step.optimizer_shard_size
    counts = pipeline.stages, pipeline.micro_batches
    key: tuple[object, ...] = (fixed.mesh, mode)
    # Other modes read none of these options.
    if MODES[mode].takes_cost_model:
        key = (*key, *options.search_options.values(), *counts, shard_size)
    results, search_seconds = _search_once(model, options, mode, key, request)
    candidates_of_mode = []
    # Without a cluster no step time is predicted, so that results cannot be compared.
    results = results if options.cluster is not None else results[:1]
    if options.cluster is not None and options.limit is not None:
        # Slower variants that need less memory: they can be the best only under a memory limit.
        rings = (ring_cuts(graph, fixed.mesh, c, fixed.cuts, options.limit) for c in results)
        results = [*results, *(model.share(cuts) for cuts in rings if cuts is not None)]
    for cuts in results:
        balanced_pipeline = pipeline
        # With `stage_config`, `pipeline_spec` has assigned the operators.
        if pipeline.stages > 1 and options.stage_config is None:
            division = fixed.mesh, cuts, pipeline.stages, pipeline.num_chunks
            # The division depends on the cuts only, not on the storage of parameters.
            if division not in model.chunk_assignments:
                model.chunk_assignments[division] = _assign_ops_to_balanced_chunks(
                    model, options, fixed.mesh, pipeline, cuts
                )
            balanced_pipeline = replace(pipeline, chunk_of=model.chunk_assignments[division])
        decisions = Decisions(
            cuts,
            model.storage(fixed.mesh, cuts, options.sharding),
            fixed.outputs,
            sharded_inputs,
            sharding=options.sharding,
            bucket_bytes=int(options.bucket_mb * MB),
            recompute=model.recompute,
        )
        candidate = Candidate(
            model,
            options,
            fixed.mesh,
            decisions,
            balanced_pipeline,
            search_seconds,
            pinned=fixed.cuts,
        )
        candidates_of_mode.append(
            _reassign_axes_of_candidate(candidate) if options.cluster is None else candidate
        )
    return candidates_of_mode


def _search_once(
    model: CapturedModel,
    options: PlanOptions,
    mode: str,
    key: tuple[object, ...],
    request: SearchRequest,
) -> tuple[Sequence[SharedCuts], float]:
    """Return the cuts from the search mode `mode`, and the seconds that the search took.

    Both are cached in `model` under `key`.

    Raises:
        StrategyError: if the search finds no cuts.
    """
    if key not in model.search_results:
        on_share = share_reporter(options.on_progress, f"search: {options.describe()}")
        # Not for the search for data parallelism that `candidates` adds.
        if options.log_costs and mode == options.mode and not MODES[mode].takes_cost_model:
            log.info("mode=%r does not compare costs, so that log_costs=True logs none", mode)
        started = time.perf_counter()
        try:
            results = MODES[mode].candidate_cuts(replace(request, on_share=on_share))
            shared = [model.share(cuts) for cuts in results]
            model.search_results[key] = shared, time.perf_counter() - started
        except StrategyError as error:
            # Other attempts search with equal arguments, and would fail in the same way.
            model.search_results[key] = error
    cached = model.search_results[key]
    if isinstance(cached, StrategyError):
        # Else the error would collect the frames of every caller that raises it.
        raise cached.with_traceback(None)
    return cached


def _assign_ops_to_balanced_chunks(
    model: CapturedModel,
    options: PlanOptions,
    mesh: DeviceMatrix,
    pipeline: PipelineSpec,
    cuts: Mapping[str, Cuts],
) -> Mapping[str, int]:
    """Return the pipeline chunk index of each operator, by name; chunks take about equal time."""
    # Without a cluster the work of an operator is its multiply-adds and parameters.
    work = None
    if options.cluster is not None:
        time_model = TimeModel(options.resolved_cluster, mesh, pipeline.stages)
        work = operator_seconds(model.graph, time_model, cuts)
    return balanced_chunks(model.graph, pipeline.num_chunks, work)


MAX_PARAMETER_AXES = 4
"""Maximum number of axes of the parameters' `DeviceMesh` before the planner tries to merge axes.
With more axes, DTensor's first step takes over ten seconds, and six times as long for each further
axis."""


def _align_candidate(candidate: Candidate) -> Candidate:
    """Return `candidate`, or a variant of it whose parameters need a `DeviceMesh` with fewer axes.

    In a variant, all operators split a group of equal axes in the same way (`align_axis_splits`),
    so that axes can be merged. Only variants that are predicted to be at least as fast count. The
    fewest axes win; ties go to the fastest, then to `candidate`.
    """
    model, mesh, options = candidate.model, candidate.mesh, candidate.options
    levels = TimeModel(options.resolved_cluster, mesh, candidate.pipeline.stages).links.levels
    # One group after another: each group starts from the best variant of the groups before.
    best = candidate
    # Only axes of the same size and link level are interchangeable.
    for axes in group_equal_axes(
        mesh, [dict(enumerate(levels)), dict(enumerate(mesh.device_matrix))]
    ):
        # First in the list, as `min` returns the first of equal variants.
        variants = [best]
        for cuts in align_axis_splits(model.graph, mesh, best.decisions.cuts, best.pinned, axes):
            shared = model.share(cuts)
            storage = model.storage(mesh, shared, options.sharding)
            decisions = replace(best.decisions, cuts=shared, storage=storage)
            variants.append(replace(best, decisions=decisions))
        best = min(
            (variant for variant in variants if variant.seconds <= best.seconds),
            key=lambda variant: (variant.parameter_axes, variant.seconds),
        )
    return best


def _reassign_axes_of_candidate(candidate: Candidate) -> Candidate:
    """Return `candidate` with axes of equal size permuted per operator, unless the permutation
    increases the communication volume."""
    # Only without a cluster, where all links are equal and these axes are interchangeable.
    model, mesh, decisions = candidate.model, candidate.mesh, candidate.decisions
    cuts = model.share(reassign_equal_axes(model.graph, mesh, decisions.cuts, candidate.pinned))
    if cuts is decisions.cuts:
        return candidate
    # Storage follows cuts: by default a parameter is stored as its first sharded use reads it.
    storage = model.storage(mesh, cuts, candidate.options.sharding)
    reassigned = replace(candidate, decisions=replace(decisions, cuts=cuts, storage=storage))
    return min(
        (reassigned, candidate),
        # With equal bytes the one whose axes fold into fewer.
        key=lambda each: (each.communicated_bytes, len(each.folded.mesh.device_matrix)),
    )
