"""What is tried so that a plan fits into memory, in which order, and what is said if none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.core.cost.memory import Memory, StageMemory, binary
from shardwright.core.cost.pipeline_timeline import check_pipelining
from shardwright.core.partition.decisions import LEVELS, OptimizerParallel
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.planner.options import AUTO_RECOMPUTE, PlanOptions
from shardwright.errors import MemoryLimitError, PlanError

FACTOR, LARGEST_MEM_COEFF = 8.0, 1e4
"""By what `mem_coeff` grows from one attempt to the next, and how far."""


@dataclass(frozen=True)
class Attempt:
    """What is tried.

    Args:
        recompute: whether further operators may be computed again.
    """

    options: PlanOptions
    recompute: bool

    def __str__(self) -> str:
        return self.options.in_words(self.recompute)


Groups = Sequence[Sequence[Attempt]]
"""What competes, a group after the other: a later one is hardly ever faster."""


def phases(options: PlanOptions) -> list[Groups]:
    """What is tried, one after the other until something fits."""
    if options.limit is None:
        return [[[Attempt(options, False)]]]
    first = options.recompute == AUTO_RECOMPUTE
    found: list[Groups] = []
    if options.has_auto_mem_coeff:
        coefficients, limit = options.mem_coeffs, options.limit
        each = [replace(options, mem_coeff=one, memory_limit=limit) for one in coefficients]
        found, options = [[[Attempt(one, first)]] for one in each], each[0]
    if options.cluster is not None:
        larger = (options, *_larger_mem_coeff(options))
        return [*found, [[Attempt(one, True) for one in _levels(each)] for each in larger]]
    levels = _levels(options)
    found += [[[Attempt(each, first)]] for each in levels]
    for staged in (levels[-1], *_more_stages(levels[-1])):
        found += [[[Attempt(each, True)]] for each in (staged, *_larger_mem_coeff(staged))]
    return found


def _levels(options: PlanOptions) -> tuple[PlanOptions, ...]:
    return (options, *_more_sharded(options))


def _more_sharded(options: PlanOptions) -> Iterator[PlanOptions]:
    sharding = options.sharding
    done = LEVELS.index(sharding.level) + 1 if sharding is not None else 0
    for level in LEVELS[done:]:
        if level == "level2" and options.num_micro_batches == 1:
            continue  # As `level1`: there is one reduction.
        yield replace(options, hsdp=replace(sharding or OptimizerParallel(), level=level))


def _larger_mem_coeff(options: PlanOptions) -> Iterator[PlanOptions]:
    if "mem_coeff" not in options.of_search:
        return
    coefficient = options.coefficient * FACTOR
    while coefficient <= LARGEST_MEM_COEFF:
        yield replace(options, mem_coeff=coefficient)
        coefficient *= FACTOR


def _more_stages(options: PlanOptions) -> Iterator[PlanOptions]:
    """Where the user left the stages to be cut, every greater number that divides the devices and
    that the schedule runs with as many micro-batches."""
    if options.stage_config is not None or not isinstance(options.stages, int):
        return
    for stages in range(options.stages + 1, options.devices + 1):
        if options.devices % stages == 0:
            try:
                check_pipelining(PipelineSpec(stages, options.num_micro_batches, options.schedule))
            except PlanError:
                continue
            yield replace(options, stages=stages)


def too_large(attempt: Attempt, limit: int, needs: Memory) -> MemoryLimitError:
    """The error that no plan fits into `limit` bytes, of which `attempt` needs least."""
    stage = max(needs.stages, key=lambda each: each.peak)
    where = f" on stage {stage.stage}" if len(needs.stages) > 1 else ""
    options = attempt.options
    stages = ""
    if options.cluster is not None and options.stages == 1 < options.num_micro_batches:
        stages = ", or stages='auto'"
    text = (
        f"no plan for {options.devices} devices fits into memory_limit="
        f"{binary(limit)}; the smallest one needs {binary(needs.peak)}"
        f" ({needs.peak:,} bytes){where}, with {attempt}: {_breakdown(stage)}; set a larger"
        f" limit, or use more devices or more micro-batches{stages}"
    )
    return MemoryLimitError(text, needs.peak)


def _breakdown(stage: StageMemory) -> str:
    sizes = ((kind, getattr(stage, kind)) for kind in StageMemory.NAMES)
    return ", ".join(f"{kind} {binary(size)}" for kind, size in sizes if size)
