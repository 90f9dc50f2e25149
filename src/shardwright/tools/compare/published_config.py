"""Published training runs described by MindFormers files, and predictions for them."""

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
from shardwright.tools.compare.measured_run import (
    check_below_peak,
    cluster_of,
    model_flops_utilization,
)
from shardwright.tools.compare.published import PlannedMeasurement, PlannedRun
from shardwright.tools.compare.published_rows import (
    Hardware,
    PublishedRun,
    read_published,
    read_rows,
    validate_row,
)
from shardwright.tools.compare.published_software import cluster_of_run

RATE_DTYPE = "bfloat16"
"""Dtype whose peak rate is used for all runs; float16, also found in files, has the same rate."""


class ConfigurationRow(BaseModel, strict=True, frozen=True):
    """Published throughput of a configuration file; unknown keys are ignored.

    Args:
        file: file name, searched in the folder of the list of runs, then below its subfolder
            `mindformers`, where the name may have a prefix such as `folder__`.
    """

    file: str
    source: str
    hardware: Hardware
    devices: Count
    tokens_per_second_per_device: Positive
    memory_gib: Positive | None = None


@dataclass(frozen=True)
class ConfiguredRun:
    """A published run with its configuration.

    Args:
        configuration: the run of the file, translated to Shardwright.
        mindformers_run: the parsed configuration file.
    """

    id: str
    source: str
    hardware: str
    devices: int
    tokens_per_second_per_device: float
    memory_gib: float | None
    configuration: Run
    mindformers_run: MindFormersRun

    @property
    def tokens(self) -> float:
        """Number of tokens that a device processes per step."""
        # A fraction of a sequence if several devices share one.
        batch = self.mindformers_run.batch.global_batch(self.devices)
        return batch * self.mindformers_run.model.sizes.seq_length / self.devices

    @property
    def seconds(self) -> float:
        """Measured seconds of a training step."""
        return self.tokens / self.tokens_per_second_per_device

    def utilization(self, cluster: Cluster, seconds: float) -> float:
        """Return the MFU of a step of `seconds` seconds; see `model_flops_utilization`."""
        tokens = self.tokens / seconds
        return model_flops_utilization(
            self.mindformers_run.model.sizes, tokens, cluster.device.rates[RATE_DTYPE]
        )


@dataclass(frozen=True)
class PlannedConfiguration:
    """A run described by a configuration file, planned as configured, without a memory limit."""

    run: ConfiguredRun
    cluster: Cluster

    def __post_init__(self) -> None:
        """Raise ConfigError if the measured throughput is above the peak of the cluster."""
        check_below_peak(self.run, self.cluster)

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predict the seconds of a step, by default on the cluster of the run."""
        # `blocking`, because MindFormers did not start redistributions early.
        return predict(self.plan.partitioned, cluster or self.cluster, blocking=True).seconds

    @property
    def memory(self) -> int:
        """Predicted peak memory per device, in bytes."""
        return self.plan.memory.peak

    @cached_property
    def plan(self) -> Plan:
        """Plan of the run. Raises ConfigError if the model cannot be sharded as configured."""
        try:
            model, graph = self.run.configuration.capture()
            return self.run.configuration.plan_graph(
                model, graph, self.run.devices, cluster=self.cluster, memory_limit=NO_LIMIT
            )
        except ShardwrightError as error:
            raise ConfigError(f"row {self.run.id} cannot be planned: {error}") from error


def read_configured(file: str | Path) -> tuple[list[ConfiguredRun], dict[str, str]]:
    """Read the published runs in the list `mindformers` of a JSON file.

    Returns:
        The runs, and the reason for each omitted run, by file name: its configuration is missing or
        not supported.

    Raises:
        ConfigError: if a key is missing or invalid; the message names the file, the row and the
            key.
    """
    runs: list[ConfiguredRun] = []
    left_out: dict[str, str] = {}
    for index, content in enumerate(read_rows(file, "mindformers")):
        row = validate_row(ConfigurationRow, content, f"{file}: mindformers[{index}]")
        try:
            runs.append(_read_configured_run(row, Path(file).parent))
        # A row whose file is missing or not supported is reported; the others are compared.
        except ConfigError as error:
            left_out[row.file] = one_line(error)
    return runs, left_out


def planned_runs(
    file: str | Path, cluster: Cluster | None = None, skips_invalid: bool = False
) -> tuple[list[PlannedMeasurement], dict[str, str]]:
    """Read the runs of a JSON file; each is planned on first use.

    Args:
        cluster: cluster to which runs are restricted; by default all runs, each on its own cluster.
        skips_invalid: whether a row that is not valid is omitted, instead of an error.

    Returns:
        The runs (those of the list `rows` first), and the reason for each omitted run, by file
        name, id or index.

    Raises:
        ConfigError: if the file is invalid, no run is on the cluster, or a run was faster than the
            peak of its cluster.
    """
    configured, left_out = read_configured(file)
    all_runs: list[PublishedRun | ConfiguredRun] = [
        *read_published(file, left_out if skips_invalid else None),
        *configured,
    ]
    if not all_runs:
        # A file without any row has been refused, so all rows are left out.
        raise ConfigError("; ".join(left_out.values()))
    selected = [run for run in all_runs if cluster is None or _is_run_on_cluster(run, cluster)]
    if cluster is not None and not selected:
        clusters = ", ".join(sorted({run.hardware for run in all_runs}))
        reasons = "".join(f"; left out: {each}" for each in left_out.values())
        raise ConfigError(
            f"{file}: no run is on the cluster {cluster.name}\nuse one of {clusters}{reasons}"
        )
    planned: list[PlannedMeasurement] = []
    for run in selected:
        try:
            # A given cluster takes the place of the run's own, with other figures.
            planned.append(_make_planned_measurement(run, cluster or _load_cluster_of_run(run)))
        except ConfigError as error:
            if not skips_invalid:
                raise
            left_out[run.id] = one_line(error)
    return planned, left_out


def _is_run_on_cluster(run: PublishedRun | ConfiguredRun, cluster: Cluster) -> bool:
    # Both names select a run: its hardware, and the variant with the figures of its framework.
    return cluster.name in (run.hardware, _load_cluster_of_run(run).name)


def _load_cluster_of_run(run: PublishedRun | ConfiguredRun) -> Cluster:
    return cluster_of_run(run) if isinstance(run, PublishedRun) else cluster_of(run)


def _make_planned_measurement(
    run: PublishedRun | ConfiguredRun, cluster: Cluster
) -> PlannedMeasurement:
    if isinstance(run, ConfiguredRun):
        return PlannedConfiguration(run, cluster)
    return PlannedRun(run, cluster)


def _read_configured_run(row: ConfigurationRow, folder: Path) -> ConfiguredRun:
    path = next(_iterate_existing_config_paths(row.file, folder), None)
    if path is None:
        raise ConfigError(
            f"{row.file}: no such file in {folder} or below {folder / 'mindformers'}\n"
            "correct the key `file` of the row"
        )
    configuration = Run.from_file(path).for_devices(row.devices)
    if not isinstance(configuration.foreign, MindFormersRun):
        raise ConfigError(
            f"{row.file}: not a MindFormers configuration\n"
            "give a file with the keys of MindFormers, such as `parallel_config` and `model.arch`"
        )
    # All other keys of a row are fields of `ConfiguredRun`.
    figures = row.model_dump(exclude={"file"})
    return ConfiguredRun(
        path.stem, **figures, configuration=configuration, mindformers_run=configuration.foreign
    )


def _iterate_existing_config_paths(name: str, folder: Path) -> Iterator[Path]:
    """Yield the existing paths of a configuration file, in order of preference."""
    if (folder / name).is_file():
        yield folder / name
    # Sorted, because the order of `rglob` depends on the file system.
    subfolder_files = sorted((folder / "mindformers").rglob("*.yaml"))
    yield from (path for path in subfolder_files if path.name == name)
    yield from (path for path in subfolder_files if path.name.endswith(f"__{name}"))
