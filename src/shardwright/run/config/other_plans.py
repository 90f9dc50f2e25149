"""Plans of a run beside the one that was made, with which a page of that one compares it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from shardwright.core.cost.memory import binary
from shardwright.core.graph.graph import Graph
from shardwright.core.plan import Plan
from shardwright.core.plan.diff import differences
from shardwright.core.planner.options import NO_LIMIT
from shardwright.errors import ShardwrightError
from shardwright.run.config.run import Run

PRESETS: dict[str, Any] = {
    "data parallel": None,
    "fully sharded data parallel": {"level": "level3", "threshold": 0},
}
"""How each stores parameters."""

NO_SEARCH: dict[str, Any] = {
    "mode": "data_parallel",
    "stages": 1,
    "stage_config": None,
    "memory_limit": NO_LIMIT,
    "recompute": None,
}


@dataclass(frozen=True)
class RunWithPlan:
    """A run on a number of devices with its plan, and what that was made of.

    Args:
        unplanned: the run as it was configured.
        run: the run with what was chosen for it.
    """

    unplanned: Run
    run: Run
    model: nn.Module
    graph: Graph
    plan: Plan

    @classmethod
    def of(cls, run: Run, devices: int) -> RunWithPlan:
        """Plans a run.

        Raises:
            ShardwrightError: as `Run.plan`.
        """
        unplanned, run = run, run.on(devices).with_micro_batches(devices)
        model, graph = run.captured()
        return cls(unplanned, run, model, graph, run.plan_of(model, graph, devices))

    def what_if(self) -> Iterator[tuple[str, Plan | str]]:
        """The plans for half the memory, twice the devices and another batch, while all else stays;
        in place of one that there is not, why not."""
        devices, size = self.plan.devices, self.run.config.data.batch_size
        limit = self.plan.memory_limit
        if limit is None and self.plan.known_memory is not None:
            limit = self.plan.known_memory.peak
        if limit is not None:
            name = f"half the memory, {binary(limit // 2)}"
            yield self._answer(name, devices, memory_limit=limit // 2)
        yield self._answer("twice the devices", 2 * devices)
        yield self._with_batch("half the batch", size // 2)
        yield self._with_batch("twice the batch", 2 * size)

    def presets(self) -> Iterator[tuple[str, Plan | str]]:
        """Plans that need no search, whether they fit into memory or not."""
        for name, hsdp in PRESETS.items():
            yield self._answer(name, self.plan.devices, hsdp=hsdp, **NO_SEARCH)

    def best_plans(self, top: int) -> Iterator[tuple[str, Plan | str]]:
        """The fastest plans of so many kinds, but for the one that is this plan, and why there is
        none of each other kind.

        Raises:
            ShardwrightError: without a cluster, which says how long a step takes.
        """
        ranked = self.unplanned.best_plans(self.plan.devices, top)
        for kind, plan in ranked.plans.items():
            if differences(self.plan, plan):
                yield str(kind), plan
        for kind, reason in ranked.left_out.items():
            yield str(kind), reason.text

    def _answer(self, name: str, devices: int, **changes: Any) -> tuple[str, Plan | str]:
        return _tried(
            self.run, name, partial(self.run.plan_of, self.model, self.graph, devices, **changes)
        )

    def _with_batch(self, name: str, size: int) -> tuple[str, Plan | str]:
        data = self.run.config.data.model_copy(update={"batch_size": size})
        config = self.run.config.model_copy(update={"data": data})
        # Of a published file the size would follow from the number of devices again.
        run = replace(self.run, config=config, foreign=None)
        return _tried(run, name, partial(run.plan, self.plan.devices))


def _tried(run: Run, name: str, plan: partial[Plan]) -> tuple[str, Plan | str]:
    run.on_progress(name)
    try:
        return name, plan()
    except ShardwrightError as error:
        return name, str(error)
