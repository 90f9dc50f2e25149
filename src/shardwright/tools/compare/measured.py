"""Compare plans by measured training steps of tiny models on local processes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.serialize import dumps
from shardwright.core.plan import Plan
from shardwright.errors import ConfigError
from shardwright.progress import OnProgress, ignore_progress, nested_progress
from shardwright.run.config.run import Run
from shardwright.run.launch.launch import launch
from shardwright.run.launch.log_folder import LogFolder
from shardwright.tools.compare.alternatives import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    OF_GRID,
    TENSOR_PARALLEL,
    alternative_name,
)
from shardwright.tools.compare.measure_processes import measure_cluster
from shardwright.tools.compare.predicted import GridComparison, expert_run
from shardwright.tools.compare.worker import MeasureOrder, tiny_run


@dataclass(frozen=True)
class MeasuredPlan:
    """Predicted and measured step times of one plan.

    Args:
        names: names of the alternatives that have this plan, such as `expert 8·1·1` and `auto`.
        predicted: predicted seconds of a step.
        seconds: measured seconds of each step on the slowest process.
    """

    names: tuple[str, ...]
    predicted: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over rounds of the measured seconds of a training step."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Ratio of the predicted seconds to the median of the measured seconds."""
        return self.predicted / self.median


@dataclass(frozen=True)
class MeasuredComparison:
    """Measured alternatives of one tiny model.

    Args:
        batch: samples per step.
        runs: measurements of each distinct plan: the expert plan, the automatic plan, then the
            plans of the grid.
    """

    model: str
    processes: int
    batch: int
    seq_length: int
    runs: tuple[MeasuredPlan, ...]

    @property
    def correlation(self) -> float:
        """Spearman's ρ between predicted and measured seconds; NaN if all predicted or all measured
        seconds are equal."""
        return spearman([run.predicted for run in self.runs], [run.median for run in self.runs])

    def speed_ups(self, run: MeasuredPlan) -> tuple[float, float, float]:
        """Return the quartiles of `run`'s speedup over the expert plan, compared round by round."""
        # The first run is the expert's. Other load affects both steps of a round alike.
        expert = self.runs[0].seconds
        ratios = [
            expert_seconds / run_seconds
            for expert_seconds, run_seconds in zip(expert, run.seconds, strict=True)
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return low, middle, high

    def run(self, prefix: str) -> MeasuredPlan:
        """Return the first measured plan with an alternative whose name starts with `prefix`."""
        # A prefix, because names end with degrees or stages, as in `auto, 2 stages`.
        return next(run for run in self.runs if any(each.startswith(prefix) for each in run.names))


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's ρ, with mean ranks for ties; NaN if all of `x` or all of `y` are equal."""
    ranks = np.array([_compute_tie_averaged_ranks(x), _compute_tie_averaged_ranks(y)])
    # 0 if all values of one of the two are equal.
    spread = ranks.std(axis=1).prod()
    # Pearson's correlation of the ranks.
    return float(np.cov(ranks, bias=True)[0, 1] / spread) if spread else float("nan")


def _compute_tie_averaged_ranks(values: Sequence[float]) -> list[float]:
    # The first rank of a tie, plus half the distance to its last.
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def compare_measured(
    experts: Sequence[str | Path],
    logs: LogFolder,
    *,
    devices: int = 8,
    rounds: int,
    cluster: str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> list[MeasuredComparison]:
    """Measure training steps of the tiny variants of language models on local processes.

    The alternatives of a model are its automatic plan, its expert plan, and all degrees of data,
    tensor and pipeline parallelism that divide its sizes. All alternatives take turns within one
    launch.

    Args:
        experts: paths of expert configurations (`semi_auto` mode).
        logs: folder for the logs, plans and results of the processes.
        devices: number of processes.
        rounds: number of measured steps of each alternative.
        cluster: cluster for planning and prediction; by default this machine, measured with the
            same number of processes.
        on_progress: called before each phase.

    Raises:
        ConfigError: if a configuration is not an expert configuration of a language model, or its
            degrees of parallelism do not divide the number of processes.
        RankFailedError: if a plan failed to run; the message names the plan.
    """
    if devices < 2:
        raise ConfigError(
            f"--devices {devices} is too few to compare plans\nuse at least --devices 2"
        )
    if rounds < 2:
        raise ConfigError(f"--rounds {rounds} is too few for quartiles\nuse at least --rounds 2")
    # All files are checked before the minutes of measuring.
    runs = [tiny_run(expert_run(file), devices) for file in experts]
    calibrating = nested_progress(on_progress, "calibrating this machine")
    # Before planning, as plans minimize the time of a step on this machine.
    machine = measure_cluster(devices, calibrating) if cluster is None else load_cluster(cluster)
    logs.clear(devices)
    model_plans = []
    for run, file in zip(runs, experts, strict=True):
        on_progress(f"{_make_tiny_model_name(run)}: planning")
        model_plans.append(_make_distinct_plans(run, str(file), machine, devices))
    on_progress("measuring steps on local processes")
    orders = [
        _save_measure_order(index, plans, logs.run, rounds)
        for index, plans in enumerate(model_plans)
    ]
    # One launch per model: the process groups of other models would slow down its steps.
    seconds = [_measure_step_seconds(order, devices, logs) for order in orders]
    return [
        _make_measured_comparison(run, devices, plans, plan_seconds)
        for run, plans, plan_seconds in zip(runs, model_plans, seconds, strict=True)
    ]


@dataclass(frozen=True)
class _ModelPlans:
    """A captured model, and its distinct plans with the names of their alternatives.

    Args:
        config: path of the expert configuration.
        plans: each plan, with the names of the alternatives that have this plan.
    """

    config: str
    graph: Graph
    plans: tuple[tuple[tuple[str, ...], Plan], ...]


def _make_distinct_plans(run: Run, config: str, cluster: Cluster, devices: int) -> _ModelPlans:
    comparison = GridComparison(run, cluster, devices)
    distinct: list[tuple[list[str], Plan]] = []
    for name, plan in _iterate_named_plans(comparison):
        # Equal plans are measured once; a difference between their times would be noise.
        equal_names = next(
            (names for names, other in distinct if _have_equal_programs(plan, other)), None
        )
        if equal_names is None:
            distinct.append(([name], plan))
        else:
            equal_names.append(name)
    return _ModelPlans(
        config, comparison.graph, tuple((tuple(names), plan) for names, plan in distinct)
    )


def _iterate_named_plans(comparison: GridComparison) -> Iterator[tuple[str, Plan]]:
    degrees, expert = comparison.expert()
    yield alternative_name(EXPERT, degrees), expert
    automatic = comparison.automatic()
    # Unlike the other plans, the automatic one chooses its number of stages.
    stages = automatic.pipeline.stages
    yield AUTO if stages == 1 else f"{AUTO}, {stages} stages", automatic
    # Two corners of the grid have names of their own.
    data, tensor = (comparison.devices, 1, 1), (1, comparison.devices, 1)
    for degrees in comparison.grid():
        name = {data: DATA_PARALLEL, tensor: TENSOR_PARALLEL}.get(degrees, OF_GRID)
        yield alternative_name(name, degrees), comparison.megatron_plan(degrees)
    # Not a point of the grid, whose plans have the ZeRO level of the configuration.
    if comparison.is_divisible_by(data):
        sharded = comparison.megatron_plan(data, hsdp={"level": "level3", "threshold": 0})
        yield f"{alternative_name(DATA_PARALLEL, data)} level3", sharded


def _have_equal_programs(first_plan: Plan, second_plan: Plan) -> bool:
    """Whether two plans lower to the same program, even if their pins differ."""

    def runtime_decisions(plan: Plan) -> tuple[object, ...]:
        # Bytes and time stand for the redistributions, which may differ between equal cuts.
        stored = plan.storage, plan.sharding, plan.recompute, plan.pipeline
        return plan.cuts, *stored, plan.bytes, plan.step_time

    return runtime_decisions(first_plan) == runtime_decisions(second_plan)


def _save_measure_order(
    model_index: int, model_plans: _ModelPlans, folder: Path, rounds: int
) -> MeasureOrder:
    """Write a model's graph and plans to files in `folder`, which the measuring processes read."""
    graph = folder / f"{model_index}.graph"
    graph.write_bytes(dumps(model_plans.graph))
    files = {}
    for plan_index, (names, plan) in enumerate(model_plans.plans):
        file = folder / f"{model_index}.{plan_index}.json"
        plan.save(file)
        # The names of all alternatives with this plan, which an error of the worker gives.
        files[" = ".join(names)] = str(file)
    return MeasureOrder(model_plans.config, str(graph), files, rounds)


def _measure_step_seconds(order: MeasureOrder, devices: int, logs: LogFolder) -> list[list[float]]:
    """Launch the processes, and return the measured step seconds by plan and round."""
    request, result = logs.run / "order.json", logs.run / "seconds.json"
    request.write_text(json.dumps(asdict(order)), encoding="utf-8")
    # Without -P, `-m` puts the working folder on sys.path, where a file may shadow a module.
    launch(
        ["-P", "-m", "shardwright.tools.compare.worker", str(request), str(result)], devices, logs
    )
    seconds: list[list[float]] = json.loads(result.read_text(encoding="utf-8"))
    return seconds


def _make_measured_comparison(
    run: Run, devices: int, model_plans: _ModelPlans, seconds: Sequence[Sequence[float]]
) -> MeasuredComparison:
    assert run.config.data.seq_length is not None
    runs = []
    for (names, plan), step_seconds in zip(model_plans.plans, seconds, strict=True):
        # All these plans are made for a cluster, which predicts their time.
        assert plan.step_time is not None
        runs.append(MeasuredPlan(names, plan.step_time, tuple(step_seconds)))
    return MeasuredComparison(
        _make_tiny_model_name(run),
        devices,
        run.config.data.batch_size,
        run.config.data.seq_length,
        tuple(runs),
    )


def _make_tiny_model_name(run: Run) -> str:
    assert run.foreign is not None
    return f"{run.foreign.name}_tiny"
