"""Published training runs by a configuration of MindFormers, and predictions for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.predict import predict
from shardwright.core.plan import Plan
from shardwright.core.planner.options import NO_LIMIT
from shardwright.errors import ConfigError, ShardwrightError, one_line
from shardwright.mindformers.config_format import MindFormersRun
from shardwright.run.config.run import Run
from shardwright.run.config.schema import Count, Positive
from shardwright.tools.compare.published import (
    Hardware,
    PlannedMeasurement,
    PlannedRun,
    PublishedRun,
    check_possible,
    cluster_of,
    read_published,
    rows_of,
    share_of_peak,
    validated_row,
)

RATE = "bfloat16"
"""Key of the peak rate; float16 takes as long as bfloat16."""


class ConfigurationRow(BaseModel, strict=True, frozen=True):
    """A run with a configuration file; other keys are ignored.

    Args:
        file: the name of the configuration. The file is next to the list of runs or in the folder
            `mindformers` there, where its name may have a folder as prefix: `folder__file.yaml`.
    """

    file: str
    source: str
    hardware: Hardware
    devices: Count
    tokens_per_second_per_device: Positive
    memory_gib: Positive | None = None


@dataclass(frozen=True)
class ConfiguredRun:
    """A published run with its configuration."""

    id: str
    source: str
    hardware: str
    devices: int
    tokens_per_second_per_device: float
    memory_gib: float | None
    configuration: Run
    language: MindFormersRun

    @property
    def tokens(self) -> float:
        """Tokens per step and device."""
        batch = self.language.batch.global_batch(self.devices)
        return batch * self.language.model.sizes.seq_length / self.devices

    @property
    def seconds(self) -> float:
        """Measured step time."""
        return self.tokens / self.tokens_per_second_per_device

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Model FLOPs utilization for a step time in seconds; see `share_of_peak`."""
        tokens = self.tokens / seconds
        return share_of_peak(self.language.model.sizes, tokens, cluster.device.rates[RATE])


@dataclass(frozen=True)
class PlannedConfiguration:
    """A published run with the plan of its configuration, without a memory limit."""

    run: ConfiguredRun
    cluster: Cluster

    def __post_init__(self) -> None:
        """Raises `ConfigError` if the measured throughput is above the peak."""
        check_possible(self.run, self.cluster)

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predicted step time, on the cluster of the run or on another."""
        # MindFormers did not start redistributions early, hence `blocking`.
        return predict(self.plan.partitioned, cluster or self.cluster, blocking=True).seconds

    @property
    def memory(self) -> int:
        """Predicted peak bytes per device."""
        return self.plan.memory.peak

    @cached_property
    def plan(self) -> Plan:
        """The plan. Raises `ConfigError` if the model cannot be sharded as configured."""
        try:
            model, graph = self.run.configuration.capture()
            return self.run.configuration.plan_graph(
                model, graph, self.run.devices, cluster=self.cluster, memory_limit=NO_LIMIT
            )
        except ShardwrightError as error:
            raise ConfigError(f"row {self.run.id}: {error}") from error


def read_configured(file: str | Path) -> tuple[list[ConfiguredRun], dict[str, str]]:
    """Reads the list `mindformers` of a JSON file.

    Returns:
        The runs, and for each run whose configuration is missing or not supported the reason.

    Raises:
        ConfigError: a key is missing or invalid; the message names the file, the row and the key.
    """
    runs: list[ConfiguredRun] = []
    left_out: dict[str, str] = {}
    for number, content in enumerate(rows_of(file, "mindformers")):
        row = validated_row(ConfigurationRow, content, f"{file}: mindformers[{number}]")
        try:
            runs.append(_configured(row, Path(file).parent))
        except ConfigError as error:
            left_out[row.file] = one_line(error)
    return runs, left_out


def planned_runs(
    file: str | Path, cluster: Cluster | None = None
) -> tuple[list[PlannedMeasurement], dict[str, str]]:
    """Reads all runs of a file. Each is planned when first needed.

    Args:
        cluster: selects the runs on this cluster; by default all, each on its own.

    Returns:
        The runs, those by dimensions first, and for each run that is left out the reason.

    Raises:
        ConfigError: the file is invalid, no run is on the cluster, or a run was faster than the
            peak of its hardware.
    """
    configured, left_out = read_configured(file)
    all_runs: list[PublishedRun | ConfiguredRun] = [*read_published(file), *configured]
    if not all_runs:
        raise ConfigError("; ".join(left_out.values()))
    chosen = [run for run in all_runs if cluster is None or run.hardware == cluster.name]
    if cluster is not None and not chosen:
        others = ", ".join(sorted({run.hardware for run in all_runs}))
        why = "".join(f"; left out: {each}" for each in left_out.values())
        raise ConfigError(f"no run is on {cluster.name}\nclusters of the file: {others}{why}")
    return [_planned(run, cluster or cluster_of(run)) for run in chosen], left_out


def _planned(run: PublishedRun | ConfiguredRun, cluster: Cluster) -> PlannedMeasurement:
    if isinstance(run, ConfiguredRun):
        return PlannedConfiguration(run, cluster)
    return PlannedRun(run, cluster)


def _configured(row: ConfigurationRow, folder: Path) -> ConfiguredRun:
    path = next(_paths_of(row.file, folder), None)
    if path is None:
        raise ConfigError(f"{row.file}: no such file in {folder} or {folder / 'mindformers'}")
    configuration = Run.from_file(path).for_devices(row.devices)
    if not isinstance(configuration.foreign, MindFormersRun):
        raise ConfigError(f"{row.file}: not a configuration of MindFormers")
    figures = row.model_dump(exclude={"file"})
    return ConfiguredRun(
        path.stem, **figures, configuration=configuration, language=configuration.foreign
    )


def _paths_of(name: str, folder: Path) -> Iterator[Path]:
    """Yields the paths where a configuration of that name is, best first."""
    if (folder / name).is_file():
        yield folder / name
    inside = sorted((folder / "mindformers").rglob("*.yaml"))
    yield from (path for path in inside if path.name == name)
    yield from (path for path in inside if path.name.endswith(f"__{name}"))
