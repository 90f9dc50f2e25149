"""What the search chooses for each value of `mem_coeff`, and which value to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.core.cost.clusters import load_cluster
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.plan import Plan
from shardwright.core.planner.options import MEM_COEFFS, NO_LIMIT
from shardwright.core.planner.requirement import parse_bytes
from shardwright.core.search.recursive.break_even import break_evens, main_operators
from shardwright.errors import ConfigError
from shardwright.progress import nested_progress
from shardwright.run.config import Run

SEARCHES = "recursive_programming"

UNLIMITED = {"memory_limit": NO_LIMIT, "recompute": None, "suggest_stages": False}
"""Options with which nothing but `mem_coeff` changes a plan."""


@dataclass(frozen=True)
class Trial:
    """What one value leads to.

    Args:
        plan: number of the plan, from 1; values that lead to the same have the same.
        stages: pipeline stages.
        cuts: of main operators, into how many parts each factor is cut; empty where it is whole.
        bytes: that a device sends in a step.
        memory: bytes that a device needs at most.
        seconds: predicted of a step; None without a cluster.
        fits: whether that is within the memory limit.
    """

    mem_coeff: float
    plan: int
    stages: int
    cuts: dict[str, dict[str, int]]
    bytes: int
    memory: int
    seconds: float | None
    fits: bool

    @property
    def operators_cut(self) -> int:
        """How many main operators are cut at all."""
        return sum(bool(cut) for cut in self.cuts.values())


@dataclass(frozen=True)
class Tuning:
    """All values that were tried.

    Args:
        limit: bytes of a device, None if there is no limit.
        break_evens: for each main operator with a weight the value above which the symbolic search
            rather cuts its batch than nothing.
    """

    devices: int
    cluster: str | None
    limit: int | None
    trials: tuple[Trial, ...]
    break_evens: dict[str, float]

    @property
    def best(self) -> Trial | None:
        """What to take, of all that fits into memory: the least time; without a cluster, what
        leaves the fewest main operators whole. Of equals the smallest; None if nothing fits."""

        def order(trial: Trial) -> tuple[float, float]:
            first = -trial.operators_cut if trial.seconds is None else trial.seconds
            return first, trial.mem_coeff

        return min((trial for trial in self.trials if trial.fits), key=order, default=None)


def tune_mem_coeff(run: Run, devices: int, mem_coeffs: Sequence[float] = MEM_COEFFS) -> Tuning:
    """Plans the model of a configuration with each of `mem_coeffs`. It is captured once.

    Nothing else is changed to fit a memory limit; that of the configuration, or of the cluster's
    devices, says what fits.

    Raises:
        ConfigError: `mem_coeff` means nothing in the configuration's mode.
        ShardwrightError: as `Run.plan`.
    """
    run = run.for_devices(devices).with_micro_batches(devices)
    parallel = run.config.parallel
    if parallel.mode != SEARCHES:
        raise ConfigError(f"parallel.mode: {parallel.mode} has no mem_coeff: valid is {SEARCHES}")
    model, graph = run.capture()
    main = main_operators(graph)
    limit = _limit(run)
    plans, needs = [], []
    for done, each in enumerate(mem_coeffs):
        report = nested_progress(run.on_progress, f"mem_coeff {each:g}", done, len(mem_coeffs))
        changes = {"mem_coeff": each, **UNLIMITED, "on_progress": report}
        plans.append(run.plan_graph(model, graph, devices, **changes))
        report("memory")
        needs.append(plans[-1].memory.peak)
    cuts = [_cuts(plan, main) for plan in plans]
    kinds = [(plan.pipeline.stages, cut) for plan, cut in zip(plans, cuts, strict=True)]
    distinct = [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    trials = [
        Trial(
            each,
            distinct.index(kind) + 1,
            plan.pipeline.stages,
            kind[1],
            plan.bytes,
            peak,
            plan.step_time,
            limit is None or peak <= limit,
        )
        for each, plan, peak, kind in zip(mem_coeffs, plans, needs, kinds, strict=True)
    ]
    evens = break_evens(graph, prime_mesh(plans[0].mesh.num_devices))
    return Tuning(devices, parallel.cluster, limit, tuple(trials), evens)


def _limit(run: Run) -> int | None:
    parallel = run.config.parallel
    if parallel.memory_limit is not None:
        return parse_bytes(parallel.memory_limit)
    return None if run.cluster is None else int(load_cluster(run.cluster).device.memory)


def _cuts(plan: Plan, main: Sequence[str]) -> dict[str, dict[str, int]]:
    sizes = plan.mesh.device_matrix
    return {
        name: {
            factor: prod(sizes[axis] for axis in axes)
            for factor, axes in plan.cuts.get(name, {}).items()
            if axes
        }
        for name in main
    }
