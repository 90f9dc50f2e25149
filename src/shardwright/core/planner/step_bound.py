"""Lower bounds on the seconds of a step, from its computation and the memory limit.

    T >= m max(W / S, w) + (S - 1) P / (S C) + overheads

    W      forward and backward seconds of one micro-batch on the devices of one stage, if every
           operator has its fastest sharding, without communication
    w      forward and backward seconds of the longest operator, which one stage computes
    m, S   micro-batches and stages
    P      as W, for the pass of the first micro-batch while later stages wait: forward and, unless
           weight gradients fill the end of the step, backward seconds
    C      chunks per stage

The bound takes no search, so options whose bound exceeds the best step time are never searched.

A tighter bound divides the operators into stages as the planner does, lengthens their passes by
communication (`sharding_overhead.py`), and adds to each stage the least recomputation with which
its activations fit into memory (`recompute_bound.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.core.cost.flops import Work, work_of
from shardwright.core.cost.optimizer_state import TrainedShard, optimizer_bytes, table_shapes_of
from shardwright.core.cost.pipeline_timeline import ChunkSeconds, min_timeline_seconds
from shardwright.core.cost.time_model import ForwardBackward, TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.recompute_bound import (
    RecomputeOptions,
    Vertex,
    least_recompute_seconds,
)
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import ShardingRule
from shardwright.core.search.assign_stages import balanced_chunks
from shardwright.core.search.recompute.levels import MIN_PEAK_RATIO, micro_batches_in_flight
from shardwright.errors import StrategyError

MAX_COMBINATIONS = 300
"""Maximum number of shardings of an operator that are compared; an operator with more is assumed to
be divided equally over all devices."""


SIMULATED_STAGES = 64
"""Maximum number of stages of a pipeline whose schedule is simulated to count the micro-batches in
flight; with more stages, these are in proportion to those of fewer stages."""

SIMULATED_PASSES = 512
"""Maximum product of stages and micro-batches of such a simulation, unless the schedule requires
more micro-batches."""

BALANCED_BOUND = 0.99
"""Assumed lower bound on the step time of a plan, as a fraction of the estimate for stages balanced
by the fastest sharding of each operator. The planner balances them by the cuts of the plan."""


SIMILAR_BOUND = 0.97
"""Assumed lower bound on the step time of a plan, as a fraction of an estimate from a similar plan:
with a smaller `mem_coeff`, or for other numbers of stages and micro-batches. Below 1, since plans
with a larger `mem_coeff` can be slightly faster: the objective of the search is simpler than the
predictor."""


@dataclass(frozen=True)
class ShardingOverhead:
    """Overhead of a plan relative to the fastest sharding of each operator without communication.

    Args:
        seconds: ratio of the seconds of a micro-batch; at least 1.
        saved_bytes: ratio of the bytes of activations that all devices save together; at least 1.
    """

    seconds: float = 1.0
    saved_bytes: float = 1.0


@dataclass(frozen=True)
class _Division:
    """A division of the model into stages, for the graph of one number of micro-batches.

    Args:
        saved_fractions: fraction of the model's saved activations in each stage.
        parameter_fractions: fraction of the trained parameters in each stage.
        curves: vertices (freed fraction of the model's activations, least recomputation seconds per
            micro-batch) of each stage.
    """

    saved_fractions: Sequence[float]
    parameter_fractions: Sequence[float]
    curves: Sequence[Sequence[Vertex]]


class StepBounds:
    """Lower bounds on step times of a model on a cluster, with a cache.

    All options of a search have one memory limit and one optimizer.

    Args:
        graphs: graph of one micro-batch, by number of micro-batches.
        recompute_options: function that returns the recomputation options of the model; by default
            no recomputation is counted.
    """

    def __init__(
        self,
        graphs: Mapping[int, Graph],
        recompute_options: Callable[[], RecomputeOptions] | None = None,
    ) -> None:
        self._graphs, self._recompute_options = graphs, recompute_options
        # By numbers of micro-batches and stages.
        self._cached_operator_seconds: dict[tuple[int, int], dict[int, ForwardBackward]] = {}
        self._cached_pass_seconds: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._cached_model_bytes: dict[int, tuple[float, float]] = {}
        self._cached_chunks: dict[int, Mapping[str, int] | None] = {}
        self._cached_divisions: dict[object, list[tuple[Mapping[str, int], _Division]]] = {}

    def min_seconds(self, options: PlanOptions) -> float:
        """Return a lower bound in seconds on the step time of all plans with `options`, from
        computation alone.

        Args:
            options: options with a cluster, a number of stages and a schedule. The bound is 0 if
                the number of stages does not divide the number of devices.
        """
        stages, cluster = options.stages, options.resolved_cluster
        if not isinstance(stages, int) or options.devices % stages:
            return 0.0
        forward, backward, longest = self._compute_min_pass_seconds(options)
        each, micro_batches = forward + backward, options.num_micro_batches
        if stages == 1:
            # Without stages no schedule runs passes, and there are no overheads of passes.
            return micro_batches * each
        # Idle stages leave the processor to others, so a step takes the mean of the stages.
        if cluster.device.is_oversubscribed(options.devices):
            return micro_batches * each / stages
        schedule, device = SCHEDULES[options.schedule], cluster.device
        # As in `pipeline_spec`: plans that the planner makes have the fewest chunks.
        chunks = schedule.min_chunks
        # Twice: each chunk has a forward and a backward pass for every micro-batch.
        busy = micro_batches * (max(each / stages, longest) + 2 * chunks * device.pass_overhead)
        # Schedules that split backward passes fill the end of the step with weight gradients.
        passed = forward if schedule.splits_backward else each
        fill = (stages - 1) * passed / (stages * chunks)
        return busy + fill + device.step_overhead

    def micro_batch(self, options: PlanOptions) -> tuple[float, float]:
        """Return lower bounds for one micro-batch: (forward plus backward seconds on the devices of
        one stage, from computation alone; bytes of activations that the model saves)."""
        forward, backward, _ = self._compute_min_pass_seconds(options)
        return forward + backward, self._model_bytes(options)[1]

    def balanced_seconds(
        self, options: PlanOptions, overhead: ShardingOverhead = ShardingOverhead()
    ) -> float:
        """Return an assumed lower bound in seconds on the step time of all plans with `options`,
        from the computation of balanced stages and the recomputation that memory requires.

        Args:
            options: as for `min_seconds`. The bound is 0 if the stages are not the planner's, or
                share a processor.
            overhead: overhead of plans that divide the batch into as many parts.
        """
        stages, device = options.stages, options.resolved_cluster.device
        if (
            not isinstance(stages, int)
            or options.devices % stages
            or options.stage_config is not None
            or device.is_oversubscribed(options.devices)
        ):
            return 0.0
        # As in `pipeline_spec`: plans that the planner makes have the fewest chunks.
        chunks = SCHEDULES[options.schedule].min_chunks if stages > 1 else 1
        chunk_of = self._balanced_chunks(options, stages * chunks)
        if chunk_of is None:
            return 0.0
        pipeline = PipelineSpec(
            stages, options.num_micro_batches, options.schedule, chunks, chunk_of
        )
        # The overhead on activations depends on `mem_coeff`; that on seconds hardly does.
        without = ShardingOverhead(overhead.seconds)
        return max(
            BALANCED_BOUND * self._estimate_seconds(options, pipeline, without),
            SIMILAR_BOUND * self._estimate_seconds(options, pipeline, overhead),
        )

    def _estimate_seconds(
        self, options: PlanOptions, pipeline: PipelineSpec, overhead: ShardingOverhead
    ) -> float:
        """Return an estimate of the least step time in seconds with the stages of `pipeline`."""
        recomputing = self.stage_recompute_seconds(options, pipeline, overhead)
        forward, backward = (
            [overhead.seconds * seconds for seconds in passes]
            for passes in self._chunk_seconds(options, pipeline)
        )
        if pipeline.stages == 1:
            return pipeline.micro_batches * (forward[0] + backward[0] + recomputing[0])
        busy = [0.0] * pipeline.stages
        for number, seconds in enumerate(backward):
            busy[pipeline.stage_of(number)] += seconds
        device = options.resolved_cluster.device
        chunk_seconds = []
        for number, seconds in enumerate(backward):
            stage = pipeline.stage_of(number)
            # Chunks of a stage share its recomputation in proportion to their backward passes.
            more = recomputing[stage] * seconds / busy[stage] if busy[stage] else 0.0
            passes = forward[number], seconds + more
            chunk_seconds.append(ChunkSeconds(*(each + device.pass_overhead for each in passes)))
        return min_timeline_seconds(pipeline, chunk_seconds) + device.step_overhead

    def stage_recompute_seconds(
        self,
        options: PlanOptions,
        pipeline: PipelineSpec,
        overhead: ShardingOverhead = ShardingOverhead(),
        stage_memory: Sequence[int] | None = None,
    ) -> Sequence[float]:
        """Return an estimate of the least seconds per micro-batch that each stage of `pipeline`
        recomputes to fit into the memory limit; 0 without a limit.

        Args:
            overhead: overhead of the plan, by default none.
            stage_memory: bytes per device of each stage without activations; by default those of
                parameters, gradients and optimizer state, sharded over all devices.
        """
        limit, stages = options.limit, pipeline.stages
        if limit is None or options.cluster is None or self._recompute_options is None:
            return [0.0] * stages
        if options.resolved_cluster.device.is_oversubscribed(options.devices):
            return [0.0] * stages
        parameter_bytes, saved_bytes = self._model_bytes(options)
        division = self._divide_model(options, pipeline)
        devices = options.devices // stages
        stage_bytes = limit * devices / MIN_PEAK_RATIO
        if stage_memory is None:
            memory = [parameter_bytes * each for each in division.parameter_fractions]
        else:
            memory = [size * devices for size in stage_memory]
        needed = zip(
            *(memory, division.saved_fractions, division.curves),
            _min_micro_batches_in_flight(pipeline),
            strict=True,
        )
        saved_bytes *= overhead.saved_bytes
        return [
            overhead.seconds
            * least_recompute_seconds(
                curve, saved - (stage_bytes - stored) / max(1, count * saved_bytes)
            )
            for stored, saved, curve, count in needed
        ]

    def _balanced_chunks(self, options: PlanOptions, count: int) -> Mapping[str, int] | None:
        """Return the chunk index of each operator, by name, for `count` chunks of nearly equal
        time; None if the model cannot be divided so."""
        # Fastest shardings divide the time between operators alike for all numbers of
        # micro-batches and stages, so that one division serves all of them.
        if count not in self._cached_chunks:
            graph, fastest = self._graph_of(options), self._fastest_seconds(options)
            seconds = [sum(fastest[id(work_of(op))]) for op in graph.ops]
            try:
                self._cached_chunks[count] = balanced_chunks(graph, count, seconds)
            except StrategyError:
                # The search of these options raises the error.
                self._cached_chunks[count] = None
        return self._cached_chunks[count]

    def _chunk_seconds(
        self, options: PlanOptions, pipeline: PipelineSpec
    ) -> tuple[list[float], list[float]]:
        """Return the least forward and backward seconds of each chunk for one micro-batch."""
        fastest = self._fastest_seconds(options)
        forward, backward = [0.0] * pipeline.num_chunks, [0.0] * pipeline.num_chunks
        for op in self._graph_of(options).ops:
            chunk = pipeline.chunk_of.get(op.name, 0)
            op_forward, op_backward = fastest[id(work_of(op))]
            forward[chunk] += op_forward
            backward[chunk] += op_backward
        return forward, backward

    def _divide_model(self, options: PlanOptions, pipeline: PipelineSpec) -> _Division:
        count, stages = options.num_micro_batches, pipeline.stages
        key = count, stages, pipeline.chunks, pipeline.schedule_spec.v_shaped
        # Assignments are not hashable; the planner has one object for equal cuts and stages.
        cached = self._cached_divisions.setdefault(key, [])
        for chunk_of, division in cached:
            if chunk_of is pipeline.chunk_of:
                return division
        assert self._recompute_options is not None
        recompute, graph = self._recompute_options(), self._graph_of(options)
        fastest, by_name = self._fastest_seconds(replace(options, stages=stages)), graph.by_name

        def stage_of(name: str) -> int:
            return pipeline.stage_of(pipeline.chunk_of.get(name, 0))

        def seconds_of(name: str) -> float:
            # A graph for another number of micro-batches may lack the operator.
            return fastest[id(work_of(by_name[name]))][0] if name in by_name else 0.0

        saved, stored = [0.0] * stages, [0.0] * stages
        for name, fraction in recompute.saved_fractions.items():
            saved[stage_of(name)] += fraction
        for value in graph.parameters:
            if value.requires_grad:
                for stage in {stage_of(op.name) for op, _ in graph.consumers[value]}:
                    stored[stage] += value.numel
        total = max(1.0, sum(stored))
        curves = recompute.stage_curves(seconds_of, stage_of, stages)
        division = _Division(saved, [each / total for each in stored], curves)
        cached.append((pipeline.chunk_of, division))
        return division

    def _model_bytes(self, options: PlanOptions) -> tuple[float, float]:
        """Return the bytes of the whole model: (parameters, gradients and optimizer state;
        activations that a micro-batch saves without recomputation)."""
        count, graph = options.num_micro_batches, self._graph_of(options)
        if count not in self._cached_model_bytes:
            tables = table_shapes_of(graph)
            shards = [
                TrainedShard(value.shape, value.stored_dtype, value.shape, value.shape in tables)
                for value in graph.parameters
                if value.requires_grad
            ]
            stored = sum(prod(shard.shape) * shard.dtype.itemsize for shard in shards)
            # Twice: parameters and their gradients.
            parameter_bytes = 2 * stored + optimizer_bytes(options.optimizer, shards).state
            recompute = self._recompute_options and self._recompute_options()
            saved_bytes = recompute.saved_bytes_in(graph) if recompute else 0.0
            self._cached_model_bytes[count] = parameter_bytes, saved_bytes
        return self._cached_model_bytes[count]

    def _graph_of(self, options: PlanOptions) -> Graph:
        return self._graphs[options.num_micro_batches]

    def _fastest_seconds(self, options: PlanOptions) -> Mapping[int, ForwardBackward]:
        """Return the (forward, backward) seconds of each operator in its fastest sharding, by the
        id of its `Work`."""
        stages = options.stages
        assert isinstance(stages, int)
        key = options.num_micro_batches, stages
        if key not in self._cached_operator_seconds:
            mesh = prime_mesh(options.devices // stages)
            model = TimeModel(options.resolved_cluster, mesh, stages)
            fastest = self._cached_operator_seconds[key] = {}
            for op in self._graph_of(options).ops:
                work = work_of(op)
                # Repeated layers share one `Work`, so that each kind of operator is compared once.
                if id(work) not in fastest:
                    fastest[id(work)] = _min_operator_seconds(model, work, rule_of(op))
        return self._cached_operator_seconds[key]

    def _compute_min_pass_seconds(self, options: PlanOptions) -> tuple[float, float, float]:
        """Return lower bounds for one micro-batch: (seconds of the forward pass, seconds of the
        backward pass, forward plus backward seconds of the longest operator)."""
        stages = options.stages
        assert isinstance(stages, int)
        key = options.num_micro_batches, stages
        if key not in self._cached_pass_seconds:
            fastest = self._fastest_seconds(options)
            seconds = [fastest[id(work_of(op))] for op in self._graph_of(options).ops]
            forward = sum(each for each, _ in seconds)
            backward = sum(each for _, each in seconds)
            longest = max(map(sum, seconds), default=0.0)
            self._cached_pass_seconds[key] = forward, backward, longest
        return self._cached_pass_seconds[key]


def _min_micro_batches_in_flight(pipeline: PipelineSpec) -> Sequence[float]:
    """Return an assumed lower bound on the number of micro-batches in flight of each stage."""
    stages = pipeline.stages
    if stages > SIMULATED_STAGES:
        # The schedules' numbers grow in proportion to stages and micro-batches.
        ratio = stages / SIMULATED_STAGES
        rounds = max(pipeline.schedule_spec.min_rounds, pipeline.micro_batches // stages)
        micro_batches = rounds * SIMULATED_STAGES
        fewer = replace(pipeline, stages=SIMULATED_STAGES, micro_batches=micro_batches)
        counts = _min_micro_batches_in_flight(fewer)
        return [ratio * counts[int(stage / ratio)] for stage in range(stages)]
    # More micro-batches than that hardly change how many are in flight, except with GPipe.
    fewest = pipeline.schedule_spec.min_micro_batches(stages)
    # A multiple of the stages, which interleaved schedules need.
    fewer_micro_batches = max(fewest, SIMULATED_PASSES // stages**2 * stages)
    if (
        pipeline.chunks > 1
        and fewer_micro_batches < pipeline.micro_batches
        and pipeline.schedule_spec.can_run(fewer_micro_batches, stages)
    ):
        pipeline = replace(pipeline, micro_batches=fewer_micro_batches)
    return micro_batches_in_flight(pipeline)


def _min_operator_seconds(
    model: TimeModel, work: Work, rule: ShardingRule | None
) -> ForwardBackward:
    """Return the (forward, backward) seconds of an operator in its fastest sharding."""
    if rule is None:
        return model.work_seconds(work, {})
    combinations = list(_enumerate_shard_counts(rule, model.mesh.device_matrix))
    if not combinations:
        forward, backward = model.work_seconds(work, {})
        return forward / model.mesh.num_devices, backward / model.mesh.num_devices
    # By the sum, as forward and backward have one sharding.
    return min((model.work_seconds(work, counts) for counts in combinations), key=sum)


def _enumerate_shard_counts(
    rule: ShardingRule, sizes: tuple[int, ...]
) -> Iterator[Mapping[str, int]]:
    """Yield each sharding of an operator over axes of `sizes` as numbers of shards by factor; yield
    nothing if there are more than `MAX_COMBINATIONS`."""
    factors = tuple(rule.factors)
    # Counts instead of axes: which axis of a size shards a factor does not change computation.
    counts = {(1,) * len(factors)}
    for size in sizes:
        counts |= {
            (*each[:n], each[n] * size, *each[n + 1 :])
            for each in counts
            for n, factor in enumerate(factors)
            if rule.capacity[factor] % (each[n] * size) == 0
        }
        if len(counts) > MAX_COMBINATIONS:
            return
    for each in counts:
        yield dict(zip(factors, each, strict=True))
