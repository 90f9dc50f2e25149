"""Plan alternatives to the plan of a run, which the report page compares with the chosen plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from shardwright.core.cost.memory import bytes_text
from shardwright.core.graph.graph import Graph
from shardwright.core.plan import Plan
from shardwright.core.plan.diff import differences
from shardwright.core.planner.options import NO_LIMIT
from shardwright.errors import ShardwrightError, one_line
from shardwright.run.config.run import Run

PRESETS: dict[str, Any] = {
    "data parallel": None,
    "fully sharded data parallel": {"level": "level3", "threshold": 0},
}
"""Preset strategies that need no search: the value of option `hsdp`, by name of the strategy."""

# Options that turn off every decision of the planner, and the memory limit: the page shows presets
# even if they do not fit into memory.
NO_SEARCH: dict[str, Any] = {
    "mode": "data_parallel",
    "stages": 1,
    "stage_config": None,
    "memory_limit": NO_LIMIT,
    "recompute": None,
}


@dataclass(frozen=True)
class AlternativePlanner:
    """Planner of alternatives to the plan of a run; reuses the captured graph if possible.

    Args:
        unplanned: the run as configured, before the planner chose the number of micro-batches.
        run: the run with the chosen number of micro-batches.
        model, graph: the model and the captured graph that `Run.capture` returned for `run`.
        plan: the plan of `run`.
    """

    unplanned: Run
    run: Run
    model: nn.Module
    graph: Graph
    plan: Plan

    @classmethod
    def of(cls, run: Run, devices: int) -> AlternativePlanner:
        """Return a planner of alternatives, after capturing and planning `run` for `devices`.

        Raises:
            ShardwrightError: if the model cannot be built, captured or planned.
        """
        return cls(run, *run.for_devices(devices).planned(devices))

    def what_if_plans(self) -> Iterator[tuple[str, Plan | str]]:
        """Plan `run` with half the memory, twice the devices, and half and twice the batch size.

        Yields:
            (name of the change, plan, or error message if planning failed).
        """
        devices, batch_size = self.plan.devices, self.run.config.data.batch_size
        limit = self.plan.memory_limit
        # Without a limit, half of what the chosen plan needs is shown.
        if limit is None and self.plan.known_memory is not None:
            limit = self.plan.known_memory.peak
        if limit is not None:
            name = f"half the memory, {bytes_text(limit // 2)}"
            yield self._plan_with_options(name, devices, memory_limit=limit // 2)
        # Reuses the graph; only plans for another batch size, as below, need another.
        yield self._plan_with_options("twice the devices", 2 * devices)
        if batch_size > 1:
            yield self._plan_with_batch_size("half the batch", batch_size // 2)
        yield self._plan_with_batch_size("twice the batch", 2 * batch_size)

    def preset_plans(self) -> Iterator[tuple[str, Plan | str]]:
        """Plan `run` with each of `PRESETS`, without a search and without a memory limit.

        Yields:
            (name of the preset, plan, or error message if planning failed).
        """
        for name, hsdp in PRESETS.items():
            yield self._plan_with_options(name, self.plan.devices, hsdp=hsdp, **NO_SEARCH)

    def best_plans(self, top: int) -> Iterator[tuple[str, Plan | str]]:
        """Plan the `top` fastest strategies other than the chosen one.

        Strategies differ in stages, parameter storage, recomputation or micro-batches.

        Yields:
            (text of these decisions, plan, or the reason why planning failed).

        Raises:
            ShardwrightError: if the configuration names no cluster, so step times cannot be
                predicted.
        """
        ranked = self.unplanned.best_plans(self.plan.devices, top)
        for strategy_kind, plan in ranked.plans.items():
            # The chosen plan is one of the ranked plans.
            if differences(self.plan, plan):
                yield str(strategy_kind), plan
        for strategy_kind, reason in ranked.left_out.items():
            yield str(strategy_kind), reason.text

    def _plan_with_options(self, name: str, devices: int, **changes: Any) -> tuple[str, Plan | str]:
        return _try_plan(
            self.run, name, partial(self.run.plan_graph, self.model, self.graph, devices, **changes)
        )

    def _plan_with_batch_size(self, name: str, batch_size: int) -> tuple[str, Plan | str]:
        data = self.run.config.data.model_copy(update={"batch_size": batch_size})
        # The graphs that the configuration asks for are those of its own plan.
        parallel = self.run.config.parallel.model_copy(update={"save_graphs": None})
        config = self.run.config.model_copy(update={"data": data, "parallel": parallel})
        # `foreign` would recompute the batch size from the number of devices.
        run = replace(self.run, config=config, foreign=None)
        return _try_plan(run, name, partial(run.plan, self.plan.devices))


def _try_plan(run: Run, name: str, make_plan: partial[Plan]) -> tuple[str, Plan | str]:
    run.on_progress(name)
    try:
        return name, make_plan()
    # One alternative without a plan must not prevent the comparison with the others.
    except ShardwrightError as error:
        return name, one_line(error)
