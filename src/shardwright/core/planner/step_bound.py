"""A lower bound on the seconds of a step, from its computation and the memory limit.

    T >= m max(W / S, w) + (S - 1) P / (S C) + overheads

    W      forward and backward seconds of one micro-batch on the devices of one stage, if every
           operator has its fastest sharding, without communication
    w      forward and backward seconds of the longest operator, which one stage computes
    m, S   micro-batches and stages
    P      as W, for the pass of the first micro-batch while later stages wait: forward and, unless
           weight gradients fill the end of the step, backward seconds
    C      chunks per stage

The bound takes no search, so options whose bound exceeds the best step time are never searched.
Under a memory limit, W / S becomes the seconds of the slowest stage with the least recomputation
(`recompute_bound.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.core.cost.flops import Work, work_of
from shardwright.core.cost.optimizer_state import TrainedShard, optimizer_bytes, table_shapes_of
from shardwright.core.cost.time_model import ForwardBackward, TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.recompute_bound import (
    RecomputeOptions,
    StageLimits,
    Vertex,
    least_recompute_seconds,
)
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import ShardingRule
from shardwright.core.search.recompute.levels import MIN_PEAK_RATIO, micro_batches_in_flight

MAX_COMBINATIONS = 300
"""Maximum number of shardings of an operator that are compared; an operator with more is assumed to
be divided equally over all devices."""


MAX_PASSES = 512
"""Maximum product of stages and micro-batches for which a schedule with several chunks is simulated
to count the micro-batches in flight; above, a smaller number of micro-batches is simulated."""


@dataclass(frozen=True)
class _Division:
    """A division of the model into stages.

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
    """Lower bounds on step times for a graph on a cluster, with a cache.

    Args:
        graph: graph of one micro-batch.
        recompute_options: function that returns the recomputation options of the model; by default
            no recomputation is counted.
    """

    def __init__(
        self, graph: Graph, recompute_options: Callable[[], RecomputeOptions] | None = None
    ) -> None:
        self._graph, self._recompute_options = graph, recompute_options
        self._cached_pass_seconds: dict[int, tuple[float, float, float]] = {}
        self._cached_operator_seconds: dict[int, dict[int, ForwardBackward]] = {}
        self._cached_stage_limits: dict[int, StageLimits] = {}
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

    def recompute_seconds(self, options: PlanOptions) -> float:
        """Return a lower bound on the seconds that all plans with `options` recompute in a step to
        fit into the memory limit; 0 without a limit."""
        stages, limit = options.stages, options.limit
        if limit is None or self._recompute_options is None or not isinstance(stages, int):
            return 0.0
        if options.devices % stages or options.resolved_cluster.device.is_oversubscribed(
            options.devices
        ):
            return 0.0
        limits = self._compute_stage_limits(options, limit)
        # Less the computation, which `min_seconds` counts already.
        each = limits.least_seconds(_min_micro_batches_in_flight(options)) - limits.seconds / stages
        return options.num_micro_batches * each

    def stage_recompute_seconds(
        self,
        options: PlanOptions,
        pipeline: PipelineSpec,
        stage_memory: Sequence[int] | None = None,
    ) -> Sequence[float]:
        """Return an estimate of the least seconds per micro-batch that each stage of `pipeline`
        recomputes to fit into the memory limit; 0 without a limit.

        Args:
            stage_memory: bytes per device of each stage without activations; by default those of
                parameters, gradients and optimizer state, sharded over all devices.
        """
        limit, stages = options.limit, pipeline.stages
        if limit is None or options.cluster is None or self._recompute_options is None:
            return [0.0] * stages
        if options.resolved_cluster.device.is_oversubscribed(options.devices):
            return [0.0] * stages
        limits = self._compute_stage_limits(replace(options, stages=stages), limit)
        division = self._compute_division(pipeline)
        if stage_memory is None:
            memory = [limits.parameter_bytes * each for each in division.parameter_fractions]
        else:
            memory = [size * (options.devices // stages) for size in stage_memory]
        needed = zip(
            *(memory, division.saved_fractions, division.curves),
            _min_micro_batches_in_flight(options),
            strict=True,
        )
        return [
            least_recompute_seconds(
                curve, saved - (limits.stage_bytes - stored) / max(1, count * limits.saved_bytes)
            )
            for stored, saved, curve, count in needed
        ]

    def _compute_division(self, pipeline: PipelineSpec) -> _Division:
        key = pipeline.stages, pipeline.chunks, pipeline.schedule_spec.v_shaped
        # Assignments are not hashable; the planner has one object for equal cuts and stages.
        cached = self._cached_divisions.setdefault(key, [])
        for chunk_of, division in cached:
            if chunk_of is pipeline.chunk_of:
                return division
        assert self._recompute_options is not None
        recompute, stages = self._recompute_options(), pipeline.stages
        fastest, by_name = self._cached_operator_seconds[stages], self._graph.by_name

        def stage_of(name: str) -> int:
            return pipeline.stage_of(pipeline.chunk_of.get(name, 0))

        saved, stored = [0.0] * stages, [0.0] * stages
        for name, fraction in recompute.saved_fractions.items():
            saved[stage_of(name)] += fraction
        for value in self._graph.parameters:
            if value.requires_grad:
                for stage in {stage_of(op.name) for op, _ in self._graph.consumers[value]}:
                    stored[stage] += value.numel
        total = max(1.0, sum(stored))
        division = _Division(
            saved,
            [each / total for each in stored],
            recompute.stage_curves(
                lambda name: fastest[id(work_of(by_name[name]))][0] if name in by_name else 0.0,
                stage_of,
                stages,
            ),
        )
        cached.append((pipeline.chunk_of, division))
        return division

    def _compute_stage_limits(self, options: PlanOptions, limit: int) -> StageLimits:
        stages = options.stages
        assert isinstance(stages, int)
        assert self._recompute_options is not None
        # By stages alone: all options of a search have one limit and one optimizer.
        if stages not in self._cached_stage_limits:
            forward, backward, _ = self._compute_min_pass_seconds(options)
            fastest, by_name = self._cached_operator_seconds[stages], self._graph.by_name
            recompute = self._recompute_options()

            def seconds_of(name: str) -> float:
                # A graph for another number of micro-batches may lack the operator.
                return fastest[id(work_of(by_name[name]))][0] if name in by_name else 0.0

            tables = table_shapes_of(self._graph)
            shards = [
                TrainedShard(value.shape, value.stored_dtype, value.shape, value.shape in tables)
                for value in self._graph.parameters
                if value.requires_grad
            ]
            stored = sum(prod(shard.shape) * shard.dtype.itemsize for shard in shards)
            self._cached_stage_limits[stages] = StageLimits(
                forward + backward,
                recompute.curve(seconds_of),
                # Twice: parameters and their gradients.
                2 * stored + optimizer_bytes(options.optimizer, shards).state,
                recompute.saved_bytes_in(self._graph),
                limit * (options.devices // stages) / MIN_PEAK_RATIO,
            )
        return self._cached_stage_limits[stages]

    def _compute_min_pass_seconds(self, options: PlanOptions) -> tuple[float, float, float]:
        """Return lower bounds for one micro-batch: (seconds of the forward pass, seconds of the
        backward pass, forward plus backward seconds of the longest operator)."""
        stages = options.stages
        assert isinstance(stages, int)
        if stages in self._cached_pass_seconds:
            return self._cached_pass_seconds[stages]
        mesh = prime_mesh(options.devices // stages)
        model = TimeModel(options.resolved_cluster, mesh, stages)
        fastest = self._cached_operator_seconds.setdefault(stages, {})
        forward = backward = longest = 0.0
        for op in self._graph.ops:
            work = work_of(op)
            # Repeated layers share one `Work`, so that each kind of operator is compared once.
            if id(work) not in fastest:
                fastest[id(work)] = _min_operator_seconds(model, work, rule_of(op))
            op_forward, op_backward = fastest[id(work)]
            forward, backward = forward + op_forward, backward + op_backward
            longest = max(longest, op_forward + op_backward)
        self._cached_pass_seconds[stages] = forward, backward, longest
        return self._cached_pass_seconds[stages]


def _min_micro_batches_in_flight(options: PlanOptions) -> tuple[int, ...]:
    """Return a lower bound on the number of micro-batches in flight of each stage."""
    assert isinstance(options.stages, int)
    stages, count = options.stages, options.num_micro_batches
    chunks = SCHEDULES[options.schedule].min_chunks if stages > 1 else 1
    pipeline = PipelineSpec(stages, count, options.schedule, chunks)
    # More micro-batches than that hardly change how many are in flight, except with GPipe.
    fewest = pipeline.schedule_spec.min_micro_batches(stages)
    # A multiple of the stages, which interleaved schedules need.
    fewer = max(fewest, MAX_PASSES // stages**2 * stages)
    if chunks > 1 and fewer < count and pipeline.schedule_spec.can_run(fewer, stages):
        pipeline = replace(pipeline, micro_batches=fewer)
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
