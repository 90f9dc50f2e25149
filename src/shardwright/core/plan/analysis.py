"""Memory, alternative cuts and optimality gap of a plan, computed from its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.cost.memory import Memory, memory
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.search.by_time.certificate import gap_of
from shardwright.core.search.choices import AxisChoice, axis_choices
from shardwright.core.search.request import TimedStep
from shardwright.progress import OnProgress, ignore_progress, share_reporter


@dataclass
class PlanAnalysis:
    """Properties of a plan that need its captured graph, computed on first use and cached.

    The planner assigns `partitioned` and `memory` if the search has computed them already.

    Args:
        partitioned: the graph with the decisions of the plan.
        optimizer: name or instance of the optimizer whose state is counted in the memory.
        dry_runs: cached dry runs of the chunks.
        timed_step: cluster and step for which a time-based search minimized seconds; None for other
            searches.
        mem_coeff: weight of memory in the search.
        on_progress: callback for the progress of slow computations.
    """

    partitioned: Partitioned
    optimizer: str | torch.optim.Optimizer
    dry_runs: DryRunCache
    timed_step: TimedStep | None
    mem_coeff: float
    on_progress: OnProgress = ignore_progress

    @cached_property
    def memory(self) -> Memory:
        """Peak bytes per device of each stage in a training step, from a dry run."""
        on_share = share_reporter(self.on_progress, "memory")
        # `dry_runs` holds those of the search, so that equal chunks do not run again.
        return memory(self.partitioned, self.optimizer, self.dry_runs, on_share)

    @cached_property
    def choices(self) -> tuple[AxisChoice, ...]:
        """Alternative cuts of the operators whose cuts the search chose by cost, per mesh axis."""
        graph, mesh = self.partitioned.graph, self.partitioned.mesh
        decisions = self.partitioned.decisions
        return axis_choices(graph, mesh, decisions, self.timed_step, self.mem_coeff)

    @cached_property
    def gap(self) -> float | None:
        """Optimality gap: the fraction by which the plan costs at most more than the best plan with
        the same device matrix, stages and micro-batches.

        None if the search did not minimize seconds on a cluster, or no lower bound on the cost is
        known.
        """
        # The lower bound is one of seconds, so other costs have no gap.
        if self.timed_step is None:
            return None
        return gap_of(
            self.partitioned.graph,
            self.partitioned.mesh,
            self.partitioned.decisions,
            self.timed_step,
            self.mem_coeff,
            share_reporter(self.on_progress, "gap"),
        )

    @contextmanager
    def reporting(self, on_progress: OnProgress) -> Iterator[None]:
        """Context manager in which computations report their progress to `on_progress`."""
        self.on_progress = on_progress
        try:
            yield
        finally:
            # The analysis outlives the call to which the callback belongs.
            self.on_progress = ignore_progress
