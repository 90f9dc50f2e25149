"""The options that the planner attempts under a memory limit, in order, and the error if no plan
fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.core.cost.memory import Memory, StageMemory, binary
from shardwright.core.cost.pipeline_timeline import check_pipelining
from shardwright.core.partition.decisions import LEVELS, OptimizerParallel
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.planner.options import AUTO_RECOMPUTE, PlanOptions
from shardwright.errors import MemoryLimitError, PlanError

MEM_COEFF_GROWTH, MAX_MEM_COEFF = 8.0, 1e4
"""Growth of `mem_coeff` from one attempt to the next, and the largest value attempted."""


@dataclass(frozen=True)
class Attempt:
    """Options to plan with.

    Args:
        recompute: whether the planner may recompute operators that the user has not marked.
    """

    options: PlanOptions
    recompute: bool

    def __str__(self) -> str:
        return self.options.in_words(self.recompute)


AttemptGroups = Sequence[Sequence[Attempt]]
"""Attempts that compete. The groups are in ascending order of `mem_coeff`: the best attempt of a
group is rarely faster than that of the group before."""


def attempt_phases(options: PlanOptions) -> list[AttemptGroups]:
    """Attempts in phases: a phase is begun only if nothing in the phases before fits.

    On a cluster, predicted step times decide among all changes of a single phase. Without one there
    is nothing to compare, so that each change is a phase, the least intrusive first: sharded
    optimizer state and parameters, recomputation, a larger `mem_coeff`, more stages.
    """
    if options.limit is None:
        return [[[Attempt(options, False)]]]
    recompute_first = options.recompute == AUTO_RECOMPUTE
    phases: list[AttemptGroups] = []
    # Ascending: the smallest `mem_coeff` that fits favors data parallelism most.
    if options.has_auto_mem_coeff:
        coefficients, limit = options.mem_coeffs, options.limit
        with_coefficients = [
            replace(options, mem_coeff=value, memory_limit=limit) for value in coefficients
        ]
        phases, options = (
            [[[Attempt(each, recompute_first)]] for each in with_coefficients],
            with_coefficients[0],
        )
    if options.cluster is not None:
        larger_coefficients = (options, *_larger_mem_coeff(options))
        return [
            *phases,
            [[Attempt(each, True) for each in _levels(base)] for base in larger_coefficients],
        ]
    levels = _levels(options)
    phases += [[[Attempt(each, recompute_first)]] for each in levels]
    for with_stages in (levels[-1], *_more_stages(levels[-1])):
        phases += [
            [[Attempt(each, True)]] for each in (with_stages, *_larger_mem_coeff(with_stages))
        ]
    return phases


def _levels(options: PlanOptions) -> tuple[PlanOptions, ...]:
    """The requested sharding level and all levels above it."""
    return (options, *_more_sharded(options))


def _more_sharded(options: PlanOptions) -> Iterator[PlanOptions]:
    sharding = options.sharding
    next_level = LEVELS.index(sharding.level) + 1 if sharding is not None else 0
    for level in LEVELS[next_level:]:
        # `level2` reduces gradients after each micro-batch instead of once per step, which with one
        # micro-batch is `level1`.
        if level == "level2" and options.num_micro_batches == 1:
            continue
        yield replace(options, hsdp=replace(sharding or OptimizerParallel(), level=level))


def _larger_mem_coeff(options: PlanOptions) -> Iterator[PlanOptions]:
    # Modes that do not weigh memory would find the same plan again.
    if "mem_coeff" not in options.search_options:
        return
    coefficient = options.fixed_mem_coeff * MEM_COEFF_GROWTH
    while coefficient <= MAX_MEM_COEFF:
        yield replace(options, mem_coeff=coefficient)
        coefficient *= MEM_COEFF_GROWTH


def _more_stages(options: PlanOptions) -> Iterator[PlanOptions]:
    """Every larger number of stages that divides the devices and that the schedule can run with the
    requested micro-batches; none if `stage_config` fixes the stages."""
    if options.stage_config is not None or not isinstance(options.stages, int):
        return
    for stages in range(options.stages + 1, options.devices + 1):
        # Every stage has an equal share of the devices.
        if options.devices % stages == 0:
            try:
                check_pipelining(PipelineSpec(stages, options.num_micro_batches, options.schedule))
            except PlanError:
                continue
            yield replace(options, stages=stages)


def too_large(attempt: Attempt, limit: int, needed: Memory) -> MemoryLimitError:
    """Build the error that no plan fits into `limit` bytes per device.

    Args:
        attempt: the attempt whose plan needs least memory.
        needed: memory of that plan.
    """
    stage = max(needed.stages, key=lambda stage: stage.peak)
    stage_text = f" on stage {stage.stage}" if len(needed.stages) > 1 else ""
    options = attempt.options
    or_stages = ""
    if options.cluster is not None and options.stages == 1 < options.num_micro_batches:
        or_stages = ", or stages='auto'"
    text = (
        f"no plan for {options.devices} devices fits into memory_limit="
        f"{binary(limit)}; the smallest one needs {binary(needed.peak)}"
        f" ({needed.peak:,} bytes){stage_text}, with {attempt}: {_breakdown(stage)}\n"
        f"set a larger limit, or use more devices or more micro-batches{or_stages}"
    )
    return MemoryLimitError(text, needed.peak)


def _breakdown(stage: StageMemory) -> str:
    sizes = ((name, getattr(stage, name)) for name in StageMemory.NAMES)
    return ", ".join(f"{name} {binary(size)}" for name, size in sizes if size)
