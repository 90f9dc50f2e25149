"""Compare automatic plans with expert configurations by predicted step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.core.api.plan import plan
from shardwright.core.capture.annotations import module_tags
from shardwright.core.cost.cluster import LOCAL, Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.graph.graph import Graph
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.plan import Plan
from shardwright.core.planner.options import NO_LIMIT
from shardwright.errors import ConfigError, MemoryLimitError
from shardwright.models.expert_sharding import (
    expert_stages,
    paths_of_blocks,
    pin_expert,
    tensor_parallel_dimensions,
)
from shardwright.progress import OnProgress, ignore_progress, nested_progress
from shardwright.run.config.objects import mark_recomputed
from shardwright.run.config.run import Run
from shardwright.tools.compare.alternatives import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    GRID,
    OF_GRID,
    TENSOR_PARALLEL,
    Alternative,
    Comparison,
    GridPoint,
    step_seconds_bound,
)


def compare_predicted(
    expert: str | Path,
    cluster: str,
    devices: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Compare predictions for the automatic plan of a language model, its expert plan and a grid.

    The grid has all combinations of data, tensor and pipeline parallelism. All alternatives have
    the same batch, micro-batches and memory limit.

    Args:
        expert: path of an expert configuration (`semi_auto` mode).
        cluster: cluster for planning and prediction, a name or a YAML file.
        devices: number of devices; by default that of the configuration.
        on_progress: called before each alternative is planned.

    Raises:
        ConfigError: if the file is not an expert configuration of a language model.
    """
    run = replace(expert_run(expert), on_progress=on_progress)
    assert run.foreign is not None
    num_devices = run.foreign.devices if devices is None else devices
    loaded_cluster = load_cluster(cluster)
    limit = run.foreign.memory_limit
    # The memory of the cluster `local` is that of the machine, which all processes share.
    if limit is None and loaded_cluster.name != LOCAL:
        limit = int(loaded_cluster.device.memory)
    comparison = GridComparison(run, loaded_cluster, num_devices, limit)
    return Comparison(
        model=run.foreign.name,
        devices=num_devices,
        cluster=cluster,
        global_batch=run.config.data.batch_size,
        limit=comparison.limit,
        alternatives=tuple(comparison.alternatives()),
    )


def expert_run(file: str | Path) -> Run:
    """Read an expert configuration of a language model.

    Raises:
        ConfigError: if the file is not an expert configuration, or has context parallelism or a
            pipeline schedule with several chunks per stage.
    """
    run = Run.from_file(file)
    if run.foreign is None or run.config.parallel.expert is None:
        raise ConfigError(
            f"{file} is not an expert configuration of a language model\n"
            "`compare` needs `parallel_mode: 1` with `data_parallel`, `model_parallel` and"
            " `pipeline_stage`, as in configs/llama2_7b_expert.yaml"
        )
    # The grid has no degree of context parallelism.
    if run.config.parallel.expert.context_parallel > 1:
        raise ConfigError(
            f"{file}: parallel_config.context_parallel: `compare` does not support context"
            " parallelism\nset it to 1"
        )
    parallel = run.config.parallel
    schedule = SCHEDULES.get(parallel.schedule)
    # The stages of Megatron-style plans have one chunk each.
    if schedule is not None and schedule.min_chunks > 1 and parallel.stages != 1:
        raise ConfigError(
            f"{file}: the pipeline schedule {parallel.schedule} has several chunks per stage, which"
            " `compare` does not support\nset `pipeline_scheduler: 1f1b` and `pipeline_interleave:"
            " False` in `parallel.pipeline_config`"
        )
    return run


class GridComparison:
    """Planner of alternative shardings of one model, from one captured graph.

    Args:
        run: the run of an expert configuration.
        cluster: cluster for planning and prediction.
        devices: number of devices.
        limit: memory limit in bytes per device; None without a limit.
    """

    def __init__(self, run: Run, cluster: Cluster, devices: int, limit: int | None = None) -> None:
        self.run, self.cluster, self.devices, self.limit = run, cluster, devices, limit
        self.net = run.model_to_plan()
        self.batch = run.micro_batch_to_plan()
        # Captured once, as alternatives differ only in the tags of modules.
        self.graph = run.capture_graph(self.net, self.batch)
        parallel = run.config.parallel
        # After the capture, so that only Megatron-style plans, which read these tags, recompute.
        if parallel.recompute is not None and not parallel.recomputes_as_needed:
            mark_recomputed(self.net, parallel.recompute)
        data = run.config.data
        assert data.seq_length is not None
        self.tokens = data.batch_size * data.seq_length

    def alternatives(self) -> Iterator[Alternative]:
        """Yield the expert plan, the automatic plan and all other plans of the model, each with its
        predicted step time in seconds and peak memory in bytes."""
        degrees, plan = self.expert()
        expert = self._predict_alternative(EXPERT, degrees, plan)
        yield expert
        yield self._predict_alternative(AUTO, None, self.automatic())
        # Plans of points of the grid, which the search below does not plan again.
        planned_points: dict[GridPoint, Plan] = {}
        for name, degrees in (
            (DATA_PARALLEL, (self.devices, 1, 1)),
            (TENSOR_PARALLEL, (1, self.devices, 1)),
        ):
            if self.is_divisible_by(degrees):
                planned_points[degrees] = self.megatron_plan(degrees)
                yield self._predict_alternative(name, degrees, planned_points[degrees])
        yield from self._search_grid(expert, planned_points)

    def expert(self) -> tuple[GridPoint, Plan]:
        """Return the configuration's degrees of parallelism, and the plan with these degrees."""
        parallel = self.run.config.parallel
        assert parallel.expert is not None
        # A configuration with `expert` cannot have `stages: auto`.
        expert, stages = parallel.expert, int(parallel.stages)
        degrees = expert.data_parallel, expert.model_parallel, stages
        plan = self.megatron_plan(
            degrees,
            seq_parallel=expert.seq_parallel,
            vocab_emb_dp=expert.vocab_emb_dp,
            expert_parallel=expert.expert_parallel,
            layers=expert.layers,
        )
        return degrees, plan

    def _search_grid(
        self, expert: Alternative, planned_points: dict[GridPoint, Plan]
    ) -> Iterator[Alternative]:
        """Yield the fastest plan of the grid within the memory limit, then faster plans that exceed
        the limit.

        Args:
            expert: the expert plan, which competes with the plans of the grid.
            planned_points: plans of the grid that have already been made, by degrees of
                parallelism.
        """
        micro_batches = self.run.config.parallel.num_micro_batches
        bounds = {
            degrees: step_seconds_bound(self.graph, self.cluster, degrees, micro_batches)
            for degrees in self.grid()
        }
        # The expert's plan competes as well, even where its degrees are no point of the grid.
        best, too_large = replace(expert, kind=GRID), list[Alternative]()
        # Planning takes seconds, and the dry run for the memory takes longer, so points of the grid
        # are tried in order of their lower bounds, until no bound is below the best step time.
        for degrees in sorted(bounds, key=lambda each: bounds[each]):
            if best.fits and bounds[degrees] >= best.seconds:
                break
            plan = planned_points.get(degrees) or self.megatron_plan(degrees)
            assert plan.step_time is not None
            if not best.fits or plan.step_time < best.seconds:
                alternative = self._predict_alternative(GRID, degrees, plan)
                if not alternative.fits:
                    too_large.append(replace(alternative, kind=OF_GRID))
                # Until a plan fits, the best is the one that needs the least memory.
                if alternative.fits or alternative.memory < best.memory:
                    best = alternative
        yield best
        yield from (each for each in too_large if each.tokens_per_second > best.tokens_per_second)

    def grid(self) -> Iterator[GridPoint]:
        """Yield the degrees (data, tensor, pipeline) that divide the model's sizes."""
        for stages in _compute_divisors(self.devices):
            for model in _compute_divisors(self.devices // stages):
                degrees = self.devices // stages // model, model, stages
                if self.is_divisible_by(degrees):
                    yield degrees

    def is_divisible_by(self, degrees: GridPoint) -> bool:
        """Whether `degrees` divide the model's sizes, and the schedule can run the stages."""
        data, model, stages = degrees
        parallel, (rows, length) = self.run.config.parallel, self.batch[0].shape
        pipeline = PipelineSpec(stages, parallel.num_micro_batches, self._megatron_schedule)
        can_pipeline = stages == 1 or (
            # Each stage needs a block and a micro-batch of its own.
            stages <= min(parallel.num_micro_batches, len(list(paths_of_blocks(self.net))))
            and pipeline.can_run(parallel.num_micro_batches)
        )
        sizes = (size for _, _, size in tensor_parallel_dimensions(self.net))
        return can_pipeline and all(
            size % degree == 0
            # The sequence too, which sequence parallelism shards over `model` devices.
            for size, degree in ((rows, data), (length, model), *((size, model) for size in sizes))
        )

    def automatic(self) -> Plan:
        """Return the automatic plan; ignores the memory limit if no plan fits."""
        try:
            return self._plan_automatically(self.graph, memory_limit=self.limit)
        # Compared nevertheless, as an alternative over the limit.
        except MemoryLimitError:
            return self._plan_automatically(self.graph, memory_limit=None)

    def _plan_automatically(self, graph: Graph, memory_limit: int | None) -> Plan:
        return plan(
            graph,
            devices=self.devices,
            cluster=self.cluster,
            stages="auto",
            memory_limit=NO_LIMIT if memory_limit is None else memory_limit,
            on_progress=nested_progress(self.run.on_progress, AUTO),
            # A planner may choose the schedule, which Megatron-style plans do not.
            **{**self._make_shared_plan_options(), "schedule": self.run.config.parallel.schedule},
        )

    def megatron_plan(
        self,
        degrees: GridPoint,
        seq_parallel: bool | None = None,
        vocab_emb_dp: bool = False,
        expert_parallel: int = 1,
        layers: Sequence[int] | None = None,
        hsdp: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Plan with data, tensor and pipeline parallelism as in Megatron-LM.

        Args:
            degrees: degrees of parallelism.
            seq_parallel: whether to shard norms and residuals along the sequence; by default only
                with tensor parallelism.
            vocab_emb_dp: whether to replicate the embedding over tensor-parallel devices.
            expert_parallel: number of shards of the experts.
            layers: number of blocks in each stage; by default the same number in all.
            hsdp: ZeRO settings; by default the ones in the configuration.
        """
        data, model, stages = degrees
        pin_expert(
            self.net,
            data_parallel=data,
            model_parallel=model,
            # Sequence parallelism sends as much and needs less memory (Korthikanti et al., 2022).
            expert_parallel=expert_parallel,
            seq_parallel=model > 1 if seq_parallel is None else seq_parallel,
            vocab_emb_dp=vocab_emb_dp,
        )
        # With the pins that were just set.
        graph = replace(self.graph, module_tags=module_tags(self.net))
        return plan(
            graph,
            devices=self.devices,
            mode="sharding_propagation",
            cluster=self.cluster,
            # Plans over the limit are compared as well, and excluded afterwards.
            memory_limit=NO_LIMIT,
            stage_config=expert_stages(self.net, stages, layers) if stages > 1 else None,
            on_progress=nested_progress(self.run.on_progress, "·".join(map(str, degrees))),
            **{**self._make_shared_plan_options(), **({} if hsdp is None else {"hsdp": hsdp})},
        )

    def _make_shared_plan_options(self) -> dict[str, Any]:
        parallel = self.run.config.parallel
        return {
            "micro_batches": parallel.num_micro_batches,
            "schedule": self._megatron_schedule,
            "hsdp": None if parallel.hsdp is None else parallel.hsdp.model_dump(),
        }

    @property
    def _megatron_schedule(self) -> str:
        """Return the schedule of Megatron-style plans: the one in the configuration, or the default
        instead of `auto`."""
        schedule = self.run.config.parallel.schedule
        return schedule if schedule in SCHEDULES else next(iter(SCHEDULES))

    def _predict_alternative(self, name: str, degrees: GridPoint | None, plan: Plan) -> Alternative:
        # All plans are for a cluster, which predicts their steps.
        assert plan.step is not None
        phase = name if degrees is None else "·".join(map(str, degrees))
        # Before the memory, for which a dry run takes seconds.
        self.run.on_progress(f"{phase}: memory")
        peak_bytes = plan.memory.peak
        return Alternative(
            name,
            degrees,
            plan.step.seconds,
            self.tokens / plan.step.seconds,
            peak_bytes,
            plan.bytes,
            self.limit is None or peak_bytes <= self.limit,
            plan.gap if name == AUTO else None,
        )


def _compute_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
