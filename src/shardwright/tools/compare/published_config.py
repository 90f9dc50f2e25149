"""Published training runs that a configuration of MindFormers describes."""

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
from shardwright.errors import ConfigError, ShardwrightError
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
"""Half precision of either kind takes the same time."""


class ConfigurationRow(BaseModel, strict=True, frozen=True):
    """A run whose configuration is a file; other keys are ignored.

    Args:
        file: its name. It lies beside the list of runs or in a folder `mindformers` there, where
            its name may have that of its folder, as `folder__file.yaml`, before it.
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
        """Of a step and device."""
        batch = self.language.batch.global_batch(self.devices)
        return batch * self.language.model.sizes.seq_length / self.devices

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""
        return self.tokens / self.tokens_per_second_per_device

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """The share of the peak in a step of so many seconds."""
        tokens = self.tokens / seconds
        return share_of_peak(self.language.model.sizes, tokens, cluster.device.rates[RATE])


@dataclass(frozen=True)
class PlannedConfiguration:
    """A published run, divided as its configuration says, whatever memory that needs."""

    run: ConfiguredRun
    cluster: Cluster

    def __post_init__(self) -> None:
        """Raises: ConfigError: the measured throughput is impossible."""
        check_possible(self.run, self.cluster)

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Of a step, as predicted. What others ran did not start redistributions early."""
        return predict(self.plan.partitioned, cluster or self.cluster, blocking=True).seconds

    @property
    def memory(self) -> int:
        """Bytes that a device needs at most, as predicted."""
        return self.plan.memory.peak

    @cached_property
    def plan(self) -> Plan:
        """Raises: ConfigError: the model cannot be divided so."""
        try:
            model, graph = self.run.configuration.capture()
            return self.run.configuration.plan_graph(
                model, graph, self.run.devices, cluster=self.cluster, memory_limit=NO_LIMIT
            )
        except ShardwrightError as error:
            raise ConfigError(f"row {self.run.id}: {error}") from error


def read_configured(file: str | Path) -> tuple[list[ConfiguredRun], dict[str, str]]:
    """The runs in the list `mindformers` of a JSON file, and those whose configuration is not there
    or not accepted, each with why.

    Raises:
        ConfigError: names the file, the row and the key that is missing or impossible.
    """
    runs: list[ConfiguredRun] = []
    left_out: dict[str, str] = {}
    for number, content in enumerate(rows_of(file, "mindformers")):
        row = validated_row(ConfigurationRow, content, f"{file}: mindformers[{number}]")
        try:
            runs.append(_configured(row, Path(file).parent))
        except ConfigError as error:
            left_out[row.file] = str(error)
    return runs, left_out


def planned_runs(
    file: str | Path, cluster: Cluster | None = None
) -> tuple[list[PlannedMeasurement], dict[str, str]]:
    """All runs of a file, those with dimensions first, and those that are left out, each with why.
    Each is planned at first use.

    Args:
        cluster: leaves the runs on other hardware out; by default each runs on its own.

    Raises:
        ConfigError: as `read_published` and `read_configured`; no run is on the cluster, or a run
            was faster than its hardware.
    """
    configured, left_out = read_configured(file)
    all_runs: list[PublishedRun | ConfiguredRun] = [*read_published(file), *configured]
    if not all_runs:
        raise ConfigError("; ".join(left_out.values()))
    chosen = [run for run in all_runs if cluster is None or run.hardware == cluster.name]
    if cluster is not None and not chosen:
        others = ", ".join(sorted({run.hardware for run in all_runs}))
        why = "".join(f"; left out: {each}" for each in left_out.values())
        raise ConfigError(f"no run is on {cluster.name}; those that there are run on {others}{why}")
    return [_planned(run, cluster or cluster_of(run)) for run in chosen], left_out


def _planned(run: PublishedRun | ConfiguredRun, cluster: Cluster) -> PlannedMeasurement:
    if isinstance(run, ConfiguredRun):
        return PlannedConfiguration(run, cluster)
    return PlannedRun(run, cluster)


def _configured(row: ConfigurationRow, folder: Path) -> ConfiguredRun:
    path = next(_places(row.file, folder), None)
    if path is None:
        raise ConfigError(f"{row.file}: no such file in {folder} or {folder / 'mindformers'}")
    configuration = Run.from_file(path).for_devices(row.devices)
    if not isinstance(configuration.foreign, MindFormersRun):
        raise ConfigError(f"{row.file}: not a configuration of MindFormers")
    figures = row.model_dump(exclude={"file"})
    return ConfiguredRun(
        path.stem, **figures, configuration=configuration, language=configuration.foreign
    )


def _places(name: str, folder: Path) -> Iterator[Path]:
    """Where the file of that name is, if it is anywhere."""
    if (folder / name).is_file():
        yield folder / name
    inside = sorted((folder / "mindformers").rglob("*.yaml"))
    yield from (path for path in inside if path.name == name)
    yield from (path for path in inside if path.name.endswith(f"__{name}"))
