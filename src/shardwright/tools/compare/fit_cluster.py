"""Fit the figures of a cluster, such as efficiencies and latencies, to published training runs.

The fit is a least squares problem in the logarithms of the figures. The residual of a run is
log(predicted / measured seconds); all runs share the figures, and the loss is soft L1, so outliers
count less. Bounds keep figures physically possible. A weak prior keeps figures near their initial
values if the runs do not determine them.
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
"""Assumed relative error of published throughput, the unit of the residuals of runs."""

PRIOR_WEIGHT, PRIOR_WEIGHT_FEW_RUNS = 0.3, 1.0
"""Weights of the prior: with at least as many runs as fitted figures, and with fewer runs. The
weight is the residual of a figure that is exp(`log_spread`) times its initial value."""

UNEXPLAINED_ERROR = 0.15
"""Relative error of a fitted prediction above which its run is reported."""

MAX_MEDIAN_ERROR = 0.5
"""Median relative error above which a fit has failed."""

# Arguments `max_nfev`, and `ftol` and `xtol`, of SciPy's `least_squares`.
MAX_EVALUATIONS, CONVERGENCE_TOLERANCE = 60, 1e-4


@dataclass(frozen=True)
class Figure:
    """One fitted figure of a cluster file, such as an efficiency or a latency.

    Args:
        name: a field of `Device`, or of the `LinkLevel` with index `level`.
        minimum, maximum: bounds of physically possible values.
        default: initial value if the cluster file does not set the figure.
        log_spread: natural logarithm of the factor by which clusters usually differ.
        level: index of the link level; None for a figure of the devices.
    """

    name: str
    minimum: float
    maximum: float
    default: float
    log_spread: float
    level: int | None = None

    def value_in(self, cluster: Cluster) -> float:
        """Return the value that `cluster` has for this figure, clamped to physical bounds."""
        owner = cluster.device if self.level is None else cluster.levels[self.level]
        value: float | None = getattr(owner, self.name)
        # A figure that the file does not set is None or 0.
        return min(max(value or self.default, self.minimum), self.maximum)

    def replace_in(self, cluster: Cluster, value: float) -> Cluster:
        """Return a copy of `cluster` in which this figure has the value `value`."""
        change = {self.name: value}
        if self.level is None:
            return replace(cluster, device=replace(cluster.device, **change))  # type: ignore[arg-type]
        levels = list(cluster.levels)
        levels[self.level] = replace(levels[self.level], **change)  # type: ignore[arg-type]
        return replace(cluster, levels=tuple(levels))


DEVICE_FIGURES = (
    # Minimum, maximum, default and spread of each.
    Figure("matrix_efficiency", 0.2, 0.95, 0.75, 0.3),
    Figure("matrix_half", 8, 2048, 200, 1.0),
    Figure("attention_efficiency", 0.05, 0.9, 0.3, 0.5),
    Figure("memory_efficiency", 0.3, 0.95, 0.8, 0.3),
    Figure("overlap_slowdown", 0.01, 0.9, 0.4, 1.0),
    Figure("overhead", 1e-6, 5e-5, 6e-6, 0.7),
)


def figures_of(cluster: Cluster) -> tuple[Figure, ...]:
    """Return the fitted parameters of a cluster: those of its devices, and of each link level."""
    links = (
        figure
        for level in range(len(cluster.levels))
        for figure in (
            Figure("efficiency", 0.4, 1.0, 0.75, 0.3, level),
            # Level 0 links the devices of a node, at lower latency.
            Figure("latency", 5e-7, 3e-5 if level else 1e-5, 5e-6, 0.5, level),
        )
    )
    return (*DEVICE_FIGURES, *links)


@dataclass(frozen=True)
class Fit:
    """A fitted cluster, and the ratio of predicted to measured seconds, by run id."""

    cluster: Cluster
    ratios: dict[str, float]

    @property
    def error(self) -> float:
        """Median relative error of the predicted step times of all runs."""
        return median(abs(ratio - 1) for ratio in self.ratios.values())

    @property
    def unexplained(self) -> dict[str, float]:
        """Ratios of runs whose predictions are off by more than `UNEXPLAINED_ERROR`, by run id."""
        return {
            run: ratio for run, ratio in self.ratios.items() if abs(ratio - 1) > UNEXPLAINED_ERROR
        }


def fit_cluster(
    planned: Sequence[PlannedMeasurement],
    cluster: Cluster,
    on_progress: OnProgress = ignore_progress,
) -> Fit:
    """Fit a cluster to published runs.

    Args:
        planned: published runs, each with the plan of its publication.
        cluster: cluster with the peak rates and bandwidths, and with initial values of the fitted
            figures.
        on_progress: called before each run is planned, and before fitting.

    Returns:
        The cluster with fitted figures, each rounded to three digits.

    Raises:
        ConfigError: if a run cannot be sharded as published, or the fit does not converge.
    """
    for index, each in enumerate(planned):
        on_progress(f"planning {each.run.id}", index, len(planned))
        # Plans the run, and caches the plan, so that each evaluation of the fit only predicts.
        each.seconds(cluster)
    figures = figures_of(cluster)
    # Logarithms keep figures positive, and make equal relative changes equal steps.
    initial_logs = np.array([log(figure.value_in(cluster)) for figure in figures])
    log_spread = np.array([figure.log_spread for figure in figures])
    # With fewer runs than figures, the prior must decide more.
    weight = PRIOR_WEIGHT if len(planned) >= len(figures) else PRIOR_WEIGHT_FEW_RUNS

    def fit_with(values: Sequence[float]) -> Fit:
        fitted = cluster
        for figure, value in zip(figures, values, strict=True):
            fitted = figure.replace_in(fitted, value)
        return Fit(fitted, {p.run.id: p.seconds(fitted) / p.run.seconds for p in planned})

    def residuals(logs: Vector) -> Vector:
        ratios = list(fit_with(np.exp(logs).tolist()).ratios.values())
        return np.concatenate(
            [np.log(ratios) / TOLERANCE, weight * (logs - initial_logs) / log_spread]
        )

    on_progress("fitting")
    logs = _fit_by_least_squares(residuals, initial_logs, figures)
    fitted = fit_with([float(f"{value:.3g}") for value in np.exp(logs)])
    if fitted.error > MAX_MEDIAN_ERROR:
        raise ConfigError(
            f"fitting the cluster {cluster.name} failed: predicted step times are off by"
            f" {fitted.error:.0%} in the median\ncheck the units and `hardware` of the runs"
        )
    return fitted


def _fit_by_least_squares(
    residuals: Callable[[Vector], Vector], initial_logs: Vector, figures: Sequence[Figure]
) -> Vector:
    with needs_extra("tools", "fitting a cluster needs `scipy`", ConfigError):
        from scipy.optimize import least_squares
    bounds = (
        # A little wider, since the logarithm of a value at a bound may be rounded to outside of it.
        [log(figure.minimum) - 1e-9 for figure in figures],
        [log(figure.maximum) + 1e-9 for figure in figures],
    )
    result = least_squares(
        residuals,
        initial_logs,
        bounds=bounds,
        loss="soft_l1",
        diff_step=1e-3,
        ftol=CONVERGENCE_TOLERANCE,
        xtol=CONVERGENCE_TOLERANCE,
        max_nfev=MAX_EVALUATIONS,
    )
    # SciPy: 0 if evaluations run out, negative for invalid arguments.
    if result.status <= 0:
        raise ConfigError(
            f"the fit does not converge within {MAX_EVALUATIONS} steps: {result.message}\n"
            "check the units and `hardware` of the runs, or add runs"
        )
    logs: Vector = result.x
    return logs
