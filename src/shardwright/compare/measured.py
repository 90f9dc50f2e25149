"""Plans that really run: steps of tiny models on local processes, beside what was predicted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shardwright.capture.pickling import dumps
from shardwright.compare.alternatives import (
    AUTO,
    DATA_PARALLEL,
    EXPERT,
    OF_GRID,
    TENSOR_PARALLEL,
    alternative_name,
)
from shardwright.compare.predicted import GridComparison, expert_run
from shardwright.compare.worker import MeasureOrder, tiny_run
from shardwright.config.run import Run
from shardwright.cost.calibrate import measure_cluster
from shardwright.cost.cluster import Cluster
from shardwright.cost.clusters import load_cluster
from shardwright.errors import ConfigError
from shardwright.graph.graph import Graph
from shardwright.plan import Plan
from shardwright.progress import OnProgress, silent
from shardwright.train.launch import LogFolder, launch

ROUNDS = 12


@dataclass(frozen=True)
class Measured:
    """One plan, predicted and measured.

    Args:
        ways: what it is: `expert 8·1·1`, `auto`; several where they are the same plan.
        predicted: seconds of a step.
        seconds: of each step, as long as the slowest process took.
    """

    ways: tuple[str, ...]
    predicted: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class RealComparison:
    """All ways of dividing one tiny model over the same processes.

    Args:
        batch: samples of a step.
        runs: the expert's first, then auto.
    """

    model: str
    processes: int
    batch: int
    seq_length: int
    runs: tuple[Measured, ...]

    @property
    def correlation(self) -> float:
        """Spearman's ρ between predicted and measured seconds; NaN if either are all equal."""
        return spearman([run.predicted for run in self.runs], [run.median for run in self.runs])

    def speed_ups(self, run: Measured) -> tuple[float, float, float]:
        """How much faster a step is than the expert's within a round: lower quartile, median, upper
        quartile."""
        expert = self.runs[0].seconds
        ratios = [theirs / mine for theirs, mine in zip(expert, run.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return low, middle, high

    def run(self, way: str) -> Measured:
        """The run of a way, by the beginning of its name."""
        return next(run for run in self.runs if any(each.startswith(way) for each in run.ways))


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's ρ: the correlation of ranks, where equal values share the mean of theirs."""
    ranks = np.array([_ranks(x), _ranks(y)])
    spread = ranks.std(axis=1).prod()
    return float(np.cov(ranks, bias=True)[0, 1] / spread) if spread else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def compare_measured(
    experts: Sequence[str | Path],
    logs: LogFolder,
    *,
    devices: int = 8,
    rounds: int = ROUNDS,
    cluster: str | None = None,
    on_progress: OnProgress = silent,
) -> list[RealComparison]:
    """Trains the tiny variants of language models for some steps, each automatically, as its expert
    divides it, and in all ways of data × tensor × pipeline parallel that divide it, on local
    processes; within one launch, where all ways of a model take turns.

    Args:
        experts: configurations in `semi_auto` mode.
        logs: where the processes write, and plans are put.
        rounds: timed steps of each way.
        cluster: for which steps are predicted and auto is planned; by default this machine,
            measured with as many processes.
        on_progress: told what is being done.

    Raises:
        ConfigError: a configuration is not an expert's of a language model, or cannot be divided
            among so many processes.
        RankFailedError: a plan failed; says which.
    """
    if devices < 2:
        raise ConfigError(f"devices={devices}: at least 2 processes are compared")
    if rounds < 2:
        raise ConfigError(f"rounds={rounds}: quartiles need at least 2")
    runs = [tiny_run(expert_run(file), devices) for file in experts]
    on_progress("the machine is measured")
    where = measure_cluster(devices) if cluster is None else load_cluster(cluster)
    logs.clear(devices)
    asked = []
    for run, file in zip(runs, experts, strict=True):
        on_progress(f"{_name(run)}: plans")
        asked.append(_planned(run, str(file), where, devices))
    on_progress("steps on local processes")
    orders = [_order(number, each, logs.run, rounds) for number, each in enumerate(asked)]
    seconds = _run(orders, devices, logs)
    return [
        _result(run, devices, each, of_each)
        for run, each, of_each in zip(runs, asked, seconds, strict=True)
    ]


@dataclass(frozen=True)
class _Planned:
    """A model, and its plans with all names of each."""

    config: str
    graph: Graph
    plans: tuple[tuple[tuple[str, ...], Plan], ...]


def _planned(run: Run, config: str, cluster: Cluster, devices: int) -> _Planned:
    course = GridComparison(run, cluster, devices)
    found: list[tuple[list[str], Plan]] = []
    for name, plan in _ways(course):
        same = next((names for names, other in found if _alike(plan, other)), None)
        if same is None:
            found.append(([name], plan))
        else:
            same.append(name)
    return _Planned(config, course.graph, tuple((tuple(names), plan) for names, plan in found))


def _ways(course: GridComparison) -> Iterator[tuple[str, Plan]]:
    parts, expert = course.expert()
    yield alternative_name(EXPERT, parts), expert
    automatic = course.automatic()
    stages = automatic.pipeline.stages
    yield AUTO if stages == 1 else f"{AUTO}, {stages} stages", automatic
    data, tensor = (course.devices, 1, 1), (1, course.devices, 1)
    for parts in course.grid():
        kind = {data: DATA_PARALLEL, tensor: TENSOR_PARALLEL}.get(parts, OF_GRID)
        yield alternative_name(kind, parts), course.by_hand(parts)
    if course.divides(data):
        sharded = course.by_hand(data, hsdp={"level": "level3", "threshold": 0})
        yield f"{alternative_name(DATA_PARALLEL, data)} level3", sharded


def _alike(plan: Plan, other: Plan) -> bool:
    """Whether both run the same: what is pinned may be said in other words."""

    def what_runs(one: Plan) -> tuple[object, ...]:
        stored = one.storage, one.sharding, one.recompute, one.pipeline
        return one.cuts, *stored, one.bytes, one.step_time

    return what_runs(plan) == what_runs(other)


def _order(number: int, asked: _Planned, folder: Path, rounds: int) -> MeasureOrder:
    """Writes graph and plans where the processes find them."""
    graph = folder / f"{number}.graph"
    graph.write_bytes(dumps(asked.graph))
    files = {}
    for place, (names, plan) in enumerate(asked.plans):
        file = folder / f"{number}.{place}.json"
        plan.save(file)
        files[" = ".join(names)] = str(file)
    return MeasureOrder(asked.config, str(graph), files, rounds)


def _run(orders: Sequence[MeasureOrder], devices: int, logs: LogFolder) -> list[list[list[float]]]:
    """For each order, for each plan, the seconds of its steps."""
    asked, answer = logs.run / "orders.json", logs.run / "seconds.json"
    asked.write_text(json.dumps([asdict(order) for order in orders]), encoding="utf-8")
    launch(["-P", "-m", "shardwright.compare.worker", str(asked), str(answer)], devices, logs)
    found: list[list[list[float]]] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def _result(
    run: Run, devices: int, asked: _Planned, seconds: Sequence[Sequence[float]]
) -> RealComparison:
    assert run.config.data.seq_length is not None
    found = []
    for (names, plan), each in zip(asked.plans, seconds, strict=True):
        assert plan.step_time is not None
        found.append(Measured(names, plan.step_time, tuple(each)))
    return RealComparison(
        _name(run),
        devices,
        run.config.data.batch_size,
        run.config.data.seq_length,
        tuple(found),
    )


def _name(run: Run) -> str:
    """The name of a tiny variant."""
    assert run.language is not None
    return f"{run.language.name}_tiny"
