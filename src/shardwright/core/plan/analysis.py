"""What follows from the decisions of a plan: memory, what else could be cut, the distance from the
best plan."""

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
from shardwright.core.search.choices import AxisChoice, choices
from shardwright.core.search.request import Pricing
from shardwright.progress import OnProgress, ignore_progress, share_reporter


@dataclass
class PlanAnalysis:
    """What follows from a plan and its captured graph, each fact computed when it is first needed
    and then cached. The planner assigns `partitioned` and `memory` where it has them already.

    Args:
        partitioned: the model, divided as planned.
        optimizer: whose state counts in the memory.
        dry_runs: results of dry runs of the chunks.
        pricing: what the search by seconds counted; None where another decided.
        mem_coeff: weight of memory in the search.
        on_progress: told of what takes long.
    """

    partitioned: Partitioned
    optimizer: str | torch.optim.Optimizer
    dry_runs: DryRunCache
    pricing: Pricing | None
    mem_coeff: float
    on_progress: OnProgress = ignore_progress

    @cached_property
    def memory(self) -> Memory:
        """The peak memory of a device of each stage in a training step, from a dry run."""
        on_share = share_reporter(self.on_progress, "memory")
        return memory(self.partitioned, self.optimizer, self.dry_runs, on_share)

    @cached_property
    def choices(self) -> tuple[AxisChoice, ...]:
        """What the operators that have a cost could cut else, and what that would cost."""
        divided = self.partitioned
        return choices(divided.graph, divided.mesh, divided.decisions, self.pricing, self.mem_coeff)

    @cached_property
    def gap(self) -> float | None:
        """By what share the plan costs more at most than any other with the same device matrix,
        stages and micro-batches; None without pricing, or if nothing is known."""
        if self.pricing is None:
            return None
        return gap_of(
            self.partitioned.graph,
            self.partitioned.mesh,
            self.partitioned.decisions,
            self.pricing,
            self.mem_coeff,
            share_reporter(self.on_progress, "gap"),
        )

    @contextmanager
    def reporting(self, on_progress: OnProgress) -> Iterator[None]:
        """A context in which `on_progress` is told of what is computed."""
        self.on_progress = on_progress
        try:
            yield
        finally:
            self.on_progress = ignore_progress
