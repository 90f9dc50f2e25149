"""Plans that fit into the memory of their devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.api.options import AUTO_RECOMPUTE, MEM_COEFFS, Options
from shardwright.cost.memory import Memory, StageMemory, binary, memory
from shardwright.cost.schedule import check_pipelining
from shardwright.decided import LEVELS, Decided, OptimizerParallel
from shardwright.errors import MemoryLimitError, PlanError, StrategyError
from shardwright.pipelining import Pipelining
from shardwright.plan import Plan, changed_plan
from shardwright.search.memory import fit_by_recomputation

log = logging.getLogger("shardwright.search")

Decide = Callable[[Options], Plan]

FACTOR, LARGEST_MEM_COEFF = 8.0, 1e4
"""By what `mem_coeff` grows from one attempt to the next, and how far."""


@dataclass(frozen=True)
class Attempt:
    """What is tried.

    Args:
        recompute: whether further operators may be computed again.
    """

    options: Options
    recompute: bool

    def __str__(self) -> str:
        sharding, asked = self.options.sharding, self.options.asked
        words = [
            f"hsdp {sharding.level}" if sharding is not None else "",
            "recompute" if self.recompute else "",
            f"mem_coeff={self.options.coefficient:g}" if self.options.of_search else "",
            f"{asked.stages} stages" if asked.stages != 1 else "",
        ]
        return ", ".join(word for word in words if word) or "as asked"


def within_memory(options: Options, decide: Decide) -> Plan:
    """The plan that `options` ask for if it fits into their memory limit, else the first that does
    after these changes, each on top of those before: parameters and optimizer state are stored
    sharded (`level1` to `level3`), operators are computed again, `mem_coeff` grows, there are more
    stages. With `recompute="auto"`, operators are computed again first. With `mem_coeff="auto"` it
    is the smallest with which the plan fits without other changes; where there is none, the changes
    begin with the smallest.

    Raises:
        MemoryLimitError: if none fits; says the smallest limit that would do.
    """
    limit = options.limit
    if limit is None:
        return decide(options)
    best: tuple[Memory, Attempt] | None = None
    seen: list[tuple[Any, ...]] = []
    coefficients = MEM_COEFFS if options.has_auto_mem_coeff else ()
    if coefficients:
        options = replace(options, mem_coeff=coefficients[0], memory_limit=limit)
    for attempt in _attempts(options, coefficients[1:]):
        try:
            plan = decide(attempt.options)
        except (PlanError, StrategyError):
            if attempt.options == options:
                raise
            continue
        needed_by = _needed_by(plan, seen, attempt)
        if needed_by in seen:
            continue
        seen.append(needed_by)
        plan, needs = _fitted(plan, attempt)
        log.info("%s: %s of %s", attempt, binary(needs.peak), binary(limit))
        if needs.peak <= limit:
            return plan
        if best is None or needs.peak < best[0].peak:
            best = needs, attempt
    assert best is not None
    raise MemoryLimitError(_too_large(options, *best), best[0].peak)


def _fitted(plan: Plan, attempt: Attempt) -> tuple[Plan, Memory]:
    """A plan with what it needs, and with what it computes again if that is allowed."""
    options, graph = attempt.options, plan.graph
    assert graph is not None and options.limit is not None

    def needs(decided: Decided) -> Memory:
        return memory(graph, plan.mesh, decided, plan.pipeline, options.optimizer)

    if not attempt.recompute:
        return plan, needs(plan.decided)
    fitted = fit_by_recomputation(
        graph, plan.mesh, plan.decided, plan.pipeline, options.limit, needs
    )
    cluster = None if options.cluster is None else options.on
    return changed_plan(plan, fitted.decided, cluster), fitted.memory


def _attempts(options: Options, coefficients: Sequence[float]) -> Iterator[Attempt]:
    first = options.recompute == AUTO_RECOMPUTE
    yield Attempt(options, False)
    if first:
        yield Attempt(options, True)
    for coefficient in coefficients:
        yield Attempt(replace(options, mem_coeff=coefficient), first)
    stored = options
    for stored in _more_sharded(options):
        yield Attempt(stored, first)
    if not first:
        yield Attempt(stored, True)
    for staged in (stored, *_more_stages(stored)):
        if staged is not stored:
            yield Attempt(staged, True)
        for larger in _larger_mem_coeff(staged):
            yield Attempt(larger, True)


def _more_sharded(options: Options) -> Iterator[Options]:
    given = options.sharding
    done = LEVELS.index(given.level) + 1 if given is not None else 0
    for level in LEVELS[done:]:
        yield replace(options, hsdp=replace(given or OptimizerParallel(), level=level))


def _larger_mem_coeff(options: Options) -> Iterator[Options]:
    if "mem_coeff" not in options.of_search:
        return
    coefficient = options.coefficient * FACTOR
    while coefficient <= LARGEST_MEM_COEFF:
        yield replace(options, mem_coeff=coefficient)
        coefficient *= FACTOR


def _more_stages(options: Options) -> Iterator[Options]:
    """Where the user left the stages to be cut, every greater number that divides the devices and
    that the schedule runs with as many micro-batches."""
    asked = options.asked
    if asked.stage_config is not None or not isinstance(asked.stages, int):
        return
    for stages in range(asked.stages + 1, options.devices + 1):
        if options.devices % stages == 0:
            try:
                check_pipelining(Pipelining(stages, asked.micro_batches, asked.schedule))
            except PlanError:
                continue
            yield replace(options, asked=replace(asked, stages=stages))


def _needed_by(plan: Plan, seen: list[tuple[Any, ...]], attempt: Attempt) -> tuple[Any, ...]:
    """What a plan's memory depends on; the level only where it shards anything."""
    level = plan.sharding
    if any(plan.storage == storage and other is None for storage, other, *_ in seen):
        level = None
    return plan.storage, level, plan.cuts, plan.pipeline, attempt.recompute


def _too_large(options: Options, needs: Memory, attempt: Attempt) -> str:
    stage = max(needs.stages, key=lambda each: each.peak)
    where = f" on stage {stage.stage}" if len(needs.stages) > 1 else ""
    return (
        f"no plan for {options.devices} devices was found that fits into memory_limit="
        f"{binary(options.limit or 0)}; the least that was found needs {binary(needs.peak)}"
        f" ({needs.peak:,} bytes){where}, with {attempt}: {_breakdown(stage)}; give that much, more"
        " devices, or more micro-batches"
    )


def _breakdown(stage: StageMemory) -> str:
    kinds = ("parameters", "optimizer", "gradients", "gathered", "activations", "temporary")
    sizes = ((kind, getattr(stage, kind)) for kind in kinds)
    return ", ".join(f"{kind} {binary(size)}" for kind, size in sizes if size)
