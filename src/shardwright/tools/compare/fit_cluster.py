"""The figures of a cluster with which published runs are predicted best.

The logarithms of the figures are fitted by least squares; the residual of a run is the logarithm
of predicted over measured seconds. No run has figures of its own, and one that others contradict
counts less (soft L1). Figures stay within what is physically possible, and what the runs do not
determine stays near what the cluster had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median

import numpy as np

from shardwright.core.cost.cluster import Cluster
from shardwright.errors import ConfigError, needs_extra
from shardwright.progress import OnProgress, ignore_progress
from shardwright.tools.compare.published import PlannedMeasurement

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]

TOLERANCE = 0.05
"""Published throughput scatters by so much: the scale of residuals, relative."""

PULL, FEW_PULL = 0.3, 1.0
"""How much a figure that is off by its usual factor counts, in residuals of one run; where there
are fewer runs than figures, which then say less of each."""

UNEXPLAINED = 0.15
"""A run whose prediction is off by more is reported, relative."""

FAILED = 0.5
"""If half of the runs are off by more, the fit is none."""

MOST_EVALUATIONS, PRECISION = 60, 1e-4


@dataclass(frozen=True)
class Figure:
    """One figure of a cluster file.

    Args:
        name: a field of `Device`, or of the `LinkLevel` of number `level`.
        least, most: what is physically possible.
        usual: what it is where a cluster does not say.
        spread: the factor by which it usually differs is e to this.
    """

    name: str
    least: float
    most: float
    usual: float
    spread: float
    level: int | None = None

    def of(self, cluster: Cluster) -> float:
        """The figure within its bounds."""
        part = cluster.device if self.level is None else cluster.levels[self.level]
        value: float | None = getattr(part, self.name)
        return min(max(value or self.usual, self.least), self.most)

    def put(self, cluster: Cluster, value: float) -> Cluster:
        """The cluster with this figure."""
        change = {self.name: value}
        if self.level is None:
            return replace(cluster, device=replace(cluster.device, **change))  # type: ignore[arg-type]
        levels = list(cluster.levels)
        levels[self.level] = replace(levels[self.level], **change)  # type: ignore[arg-type]
        return replace(cluster, levels=tuple(levels))


DEVICE_FIGURES = (
    Figure("matrix_efficiency", 0.2, 0.95, 0.75, 0.3),
    Figure("matrix_half", 8, 2048, 200, 1.0),
    Figure("attention_efficiency", 0.05, 0.9, 0.3, 0.5),
    Figure("memory_efficiency", 0.3, 0.95, 0.8, 0.3),
    Figure("overlap_slowdown", 0.01, 0.9, 0.4, 1.0),
    Figure("overhead", 1e-6, 5e-5, 6e-6, 0.7),
)


def figures_of(cluster: Cluster) -> tuple[Figure, ...]:
    """All that are fitted: of its devices, and of the links of each level."""
    links = (
        figure
        for level in range(len(cluster.levels))
        for figure in (
            Figure("efficiency", 0.4, 1.0, 0.75, 0.3, level),
            Figure("latency", 5e-7, 3e-5 if level else 1e-5, 5e-6, 0.5, level),
        )
    )
    return (*DEVICE_FIGURES, *links)


@dataclass(frozen=True)
class Fit:
    """A fitted cluster, and for each run predicted over measured seconds on it."""

    cluster: Cluster
    ratios: dict[str, float]

    @property
    def error(self) -> float:
        """The median, relative."""
        return median(abs(ratio - 1) for ratio in self.ratios.values())

    @property
    def unexplained(self) -> dict[str, float]:
        """The runs that no figures explain together with the others."""
        return {run: r for run, r in self.ratios.items() if abs(r - 1) > UNEXPLAINED}


def fit_cluster(
    planned: Sequence[PlannedMeasurement],
    cluster: Cluster,
    on_progress: OnProgress = ignore_progress,
) -> Fit:
    """The cluster on which `planned` are predicted best.

    Args:
        cluster: its peaks are kept; the other figures are where the fit begins.

    Raises:
        ConfigError: if a run cannot be divided as it was, or the fit does not converge.
    """
    for done, each in enumerate(planned):
        on_progress(f"planning {each.run.id}", done, len(planned))
        each.seconds(cluster)
    figures = figures_of(cluster)
    first = np.array([log(figure.of(cluster)) for figure in figures])
    spread = np.array([figure.spread for figure in figures])
    pull = PULL if len(planned) >= len(figures) else FEW_PULL

    def fit_of(numbers: Sequence[float]) -> Fit:
        fitted = cluster
        for figure, number in zip(figures, numbers, strict=True):
            fitted = figure.put(fitted, number)
        return Fit(fitted, {p.run.id: p.seconds(fitted) / p.run.seconds for p in planned})

    def residuals(logs: Vector) -> Vector:
        ratios = list(fit_of(np.exp(logs).tolist()).ratios.values())
        return np.concatenate([np.log(ratios) / TOLERANCE, pull * (logs - first) / spread])

    on_progress("fitting")
    logs = _least_squares(residuals, first, figures)
    fit = fit_of([float(f"{number:.3g}") for number in np.exp(logs)])
    if fit.error > FAILED:
        raise ConfigError(
            f"the fit does not converge: with the best possible figures of {cluster.name} the"
            f" predictions are {fit.error:.0%} off in the median; check units and hardware"
        )
    return fit


def _least_squares(
    residuals: Callable[[Vector], Vector], first: Vector, figures: Sequence[Figure]
) -> Vector:
    with needs_extra("tools", "fitting a cluster needs scipy", ConfigError):
        from scipy.optimize import least_squares
    bounds = (
        [log(figure.least) - 1e-9 for figure in figures],
        [log(figure.most) + 1e-9 for figure in figures],
    )
    result = least_squares(
        residuals,
        first,
        bounds=bounds,
        loss="soft_l1",
        diff_step=1e-3,
        ftol=PRECISION,
        xtol=PRECISION,
        max_nfev=MOST_EVALUATIONS,
    )
    if result.status <= 0:
        raise ConfigError(
            f"the fit does not converge within {MOST_EVALUATIONS} steps: {result.message}"
        )
    logs: Vector = result.x
    return logs
