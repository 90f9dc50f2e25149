"""Fits the figures of a cluster, such as efficiencies and latencies, to published training runs.

The fit is a least squares problem in the logarithms of the figures. The residual of a run is
log(predicted / measured seconds); all runs share the figures, and the loss is soft L1, so outliers
count less. Bounds keep figures physically possible, and a weak prior keeps figures that the runs do
not determine near their initial values.
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
"""Relative error of published throughput: the scale of the residuals."""

PRIOR_WEIGHT, PRIOR_WEIGHT_FEW_RUNS = 0.3, 1.0
"""Weight of the prior: a figure that is off by its usual factor counts as much as this many
residuals. The second is for fewer runs than figures, which determine each figure less."""

UNEXPLAINED = 0.15
"""Relative error of a prediction above which its run is reported."""

MAX_ERROR = 0.5
"""Median relative error above which a fit has failed."""

MAX_EVALUATIONS, PRECISION = 60, 1e-4


@dataclass(frozen=True)
class Figure:
    """One figure of a cluster file.

    Args:
        name: a field of `Device`, or of the `LinkLevel` with index `level`.
        least, most: bounds of physically possible values.
        usual: the initial value if the cluster has none.
        spread: logarithm of the factor by which it usually differs.
    """

    name: str
    least: float
    most: float
    usual: float
    spread: float
    level: int | None = None

    def of(self, cluster: Cluster) -> float:
        """Returns the value of the figure in a cluster, within the bounds."""
        part = cluster.device if self.level is None else cluster.levels[self.level]
        value: float | None = getattr(part, self.name)
        return min(max(value or self.usual, self.least), self.most)

    def put(self, cluster: Cluster, value: float) -> Cluster:
        """Returns the cluster with another value of the figure."""
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
    """Returns the fitted figures: those of the devices, and of the links of each level."""
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
    """A fitted cluster, and for each run the ratio of predicted to measured seconds."""

    cluster: Cluster
    ratios: dict[str, float]

    @property
    def error(self) -> float:
        """Median relative error of the predictions."""
        return median(abs(ratio - 1) for ratio in self.ratios.values())

    @property
    def unexplained(self) -> dict[str, float]:
        """The runs whose predictions stay wrong, with their ratios."""
        return {run: r for run, r in self.ratios.items() if abs(r - 1) > UNEXPLAINED}


def fit_cluster(
    planned: Sequence[PlannedMeasurement],
    cluster: Cluster,
    on_progress: OnProgress = ignore_progress,
) -> Fit:
    """Fits a cluster to published runs.

    Args:
        planned: the runs.
        cluster: its peak rates and bandwidths are kept, its other figures are initial values.

    Raises:
        ConfigError: a run cannot be sharded as published, or the fit does not converge.
    """
    for done, each in enumerate(planned):
        on_progress(f"planning {each.run.id}", done, len(planned))
        each.seconds(cluster)
    figures = figures_of(cluster)
    first = np.array([log(figure.of(cluster)) for figure in figures])
    spread = np.array([figure.spread for figure in figures])
    weight = PRIOR_WEIGHT if len(planned) >= len(figures) else PRIOR_WEIGHT_FEW_RUNS

    def fit_of(numbers: Sequence[float]) -> Fit:
        fitted = cluster
        for figure, number in zip(figures, numbers, strict=True):
            fitted = figure.put(fitted, number)
        return Fit(fitted, {p.run.id: p.seconds(fitted) / p.run.seconds for p in planned})

    def residuals(logs: Vector) -> Vector:
        ratios = list(fit_of(np.exp(logs).tolist()).ratios.values())
        return np.concatenate([np.log(ratios) / TOLERANCE, weight * (logs - first) / spread])

    on_progress("fitting")
    logs = _least_squares(residuals, first, figures)
    fit = fit_of([float(f"{number:.3g}") for number in np.exp(logs)])
    if fit.error > MAX_ERROR:
        raise ConfigError(
            f"the fit does not converge: with the best figures for {cluster.name} the median error"
            f" of predictions is {fit.error:.0%}\ncheck the units and the hardware of the runs"
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
        max_nfev=MAX_EVALUATIONS,
    )
    if result.status <= 0:
        raise ConfigError(
            f"the fit does not converge within {MAX_EVALUATIONS} steps: {result.message}"
        )
    logs: Vector = result.x
    return logs
