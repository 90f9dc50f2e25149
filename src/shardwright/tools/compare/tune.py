"""Plan with several values of `mem_coeff`, and recommend one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.core.cost.clusters import load_cluster
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.plan import Plan
from shardwright.core.planner.options import MEM_COEFFS, NO_LIMIT
from shardwright.core.planner.requirement import parse_bytes
from shardwright.core.search.recursive.break_even import break_even_mem_coeffs, main_operators
from shardwright.errors import ConfigError
from shardwright.progress import nested_progress
from shardwright.run.config import Run

TUNED_MODE = "recursive_programming"

UNLIMITED = {"memory_limit": NO_LIMIT, "recompute": None, "suggest_stages": False}
"""Planner options that turn off all decisions that do not depend on `mem_coeff`."""


@dataclass(frozen=True)
class Trial:
    """Summary of the plan for one value of `mem_coeff`.

    Args:
        plan: number of the plan, from 1; equal plans share a number.
        stages: number of pipeline stages.
        cuts: number of shards of each factor of each main operator; empty if the operator is
            replicated.
        bytes: communication volume per device and step, in bytes.
        memory: predicted peak memory per device, in bytes.
        seconds: predicted step time; None without a cluster.
        fits: whether `memory` is within the limit.
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
    def num_sharded_ops(self) -> int:
        """Number of main operators that the plan shards."""
        return sum(bool(cut) for cut in self.cuts.values())


@dataclass(frozen=True)
class Tuning:
    """The plans for all tried values of `mem_coeff`.

    Args:
        limit: memory limit in bytes per device; None without a limit.
        break_evens: for each main operator with a weight, the value of `mem_coeff` above which the
            symbolic search shards its batch dimension instead of replicating it.
    """

    devices: int
    cluster: str | None
    limit: int | None
    trials: tuple[Trial, ...]
    break_evens: dict[str, float]

    @property
    def best(self) -> Trial | None:
        """The recommended trial; None if no plan fits into memory.

        Among trials within the memory limit, the one with the shortest step time or, without a
        cluster, with the fewest replicated main operators. Ties go to the smallest `mem_coeff`.
        """

        def sort_key(trial: Trial) -> tuple[float, float]:
            # Negative, as the smallest key is the best.
            cost = -trial.num_sharded_ops if trial.seconds is None else trial.seconds
            return cost, trial.mem_coeff

        return min((trial for trial in self.trials if trial.fits), key=sort_key, default=None)


def tune_mem_coeff(run: Run, devices: int, mem_coeffs: Sequence[float] = MEM_COEFFS) -> Tuning:
    """Plan the model of a configuration with each of `mem_coeffs`.

    The memory limit, from the configuration or the cluster's devices, only decides which plans fit:
    plans are not changed to fit it.

    Raises:
        ConfigError: if the configuration's mode does not use `mem_coeff`.
        ShardwrightError: if the model cannot be planned.
    """
    # One number of micro-batches for all values, so that only `mem_coeff` differs.
    run = run.for_devices(devices).with_micro_batches(devices)
    parallel = run.config.parallel
    if parallel.mode != TUNED_MODE:
        raise ConfigError(
            f"parallel.mode: {parallel.mode} does not use `mem_coeff`\n"
            f"set `parallel.mode: {TUNED_MODE}`"
        )
    model, graph = run.capture()
    main_ops = main_operators(graph)
    limit = _find_memory_limit(run)
    plans, peaks = [], []
    for index, each in enumerate(mem_coeffs):
        report = nested_progress(run.on_progress, f"mem_coeff {each:g}", index, len(mem_coeffs))
        changes = {"mem_coeff": each, **UNLIMITED, "on_progress": report}
        plans.append(run.plan_graph(model, graph, devices, **changes))
        # Memory is measured by a dry run.
        report("memory")
        peaks.append(plans[-1].memory.peak)
    cuts = [_count_shards_by_factor(plan, main_ops) for plan in plans]
    # Plans count as equal if their stages and the shards of their main operators are.
    decisions = [(plan.pipeline.stages, cut) for plan, cut in zip(plans, cuts, strict=True)]
    # In order of first occurrence, so that their numbers ascend with `mem_coeff`.
    distinct_decisions = [
        decision for index, decision in enumerate(decisions) if decision not in decisions[:index]
    ]
    trials = [
        Trial(
            each,
            distinct_decisions.index(decision) + 1,
            plan.pipeline.stages,
            decision[1],
            plan.bytes,
            size,
            plan.step_time,
            limit is None or size <= limit,
        )
        for each, plan, size, decision in zip(mem_coeffs, plans, peaks, decisions, strict=True)
    ]
    # On the mesh of one stage, that of the first plan.
    values = break_even_mem_coeffs(graph, prime_mesh(plans[0].mesh.num_devices))
    return Tuning(devices, parallel.cluster, limit, tuple(trials), values)


def _find_memory_limit(run: Run) -> int | None:
    parallel = run.config.parallel
    # None if the limit is `none`.
    if parallel.memory_limit is not None:
        return parse_bytes(parallel.memory_limit)
    return None if run.cluster is None else int(load_cluster(run.cluster).device.memory)


def _count_shards_by_factor(plan: Plan, main_ops: Sequence[str]) -> dict[str, dict[str, int]]:
    sizes = plan.mesh.device_matrix
    return {
        name: {
            factor: prod(sizes[axis] for axis in axes)
            for factor, axes in plan.cuts.get(name, {}).items()
            if axes
        }
        for name in main_ops
    }
